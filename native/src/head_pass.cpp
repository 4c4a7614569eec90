// The end of a pass: final norm, head, and one token per row.
#include <algorithm>

#include "numeric.h"
#include "pass.h"

namespace trioengine {
namespace {

constexpr int kHeadGrain = 8;  // head units claimed at once: there are hundreds

}  // namespace

// Logits rows [first, first + rows).
void Pass::head(int first, int rows, const StepOutput& output) {
  const Linear& w = model_.head();
  InputForms forms;
  forms.add(model_.head_weight());
  const Acts input = space_.head_input.view(forms);
  next_phase().run(rows, 1, [&](int row) {
    kernels_.norm(hidden_row(step_.logits_rows[first + row]), width(), shape_.hidden,
                  model_.final_norm(), shape_.eps, 1, input, row);
  });
  float* full[kHeadRows];
  for (int row = 0; row < rows; ++row) full[row] = full_logits(first + row, row, output.logits);
  LogitsTask task{space_.peaks.data(), ceil_div(w.panels, kHeadUnitPanels), full};
  gemm(plan_gemm(kernels_, w, input, rows, kHeadUnitPanels, state_.threads), kHeadGrain,
       [&](const GemmUnit& unit) { kernels_.gemm_logits(unit, task); });
  next_phase().run(rows, 1, [&](int row) {
    const LogitsRow line{full[row], space_.peaks.data() + static_cast<std::size_t>(row) *
                                                              static_cast<std::size_t>(task.units),
                         shape_.vocab, task.units};
    output.tokens[first + row] = pick(first + row, line, output);
  });
}

// Where the logits of a row go; null where its peaks are enough.
float* Pass::full_logits(int row, int slot, float* logits) const {
  if (logits != nullptr) {
    return logits + static_cast<std::size_t>(row) * static_cast<std::size_t>(shape_.vocab);
  }
  if (step_.temperature[row] == 0.0f && !wants_logprobs(row) && !step_.edits.touch(row)) {
    return nullptr;
  }
  return space_.logits.as<float>() + static_cast<std::size_t>(slot) *
                                         static_cast<std::size_t>(model_.head().panels) * kLanes;
}

bool Pass::wants_logprobs(int row) const {
  return step_.logprobs_k != nullptr && step_.logprobs_k[row] >= 0;
}

// The token of a row, and its logprobs where they are wanted: those of the model's own logits,
// which therefore outlive what sampling does to them.
int32_t Pass::pick(int row, const LogitsRow& line, const StepOutput& output) const {
  RowSampler& own = state_.samplers[static_cast<std::size_t>(thread_)];
  const bool told = wants_logprobs(row);
  const std::size_t top = static_cast<std::size_t>(row) *
                          static_cast<std::size_t>(output.logprobs.width);
  if (told) {
    own.logprobs.read(line, step_.logprobs_k[row], output.logprobs.top_ids + top,
                      output.logprobs.top + top);
  }
  const int32_t target = step_.targets != nullptr ? step_.targets[row] : -1;
  const int32_t token =
      target >= 0 ? target : sample_edited(row, line, told || output.logits != nullptr);
  if (told && token >= 0) {
    output.logprobs.chosen[row] = own.logprobs.logprob(line.logits[token]);
    output.logprobs.ranks[row] = own.logprobs.rank(line, line.logits[token]);
  }
  return token;
}

// Leaves the logits as they were if they are to be kept, the peaks in any case not.
int32_t Pass::sample_edited(int row, LogitsRow line, bool keep) const {
  RowSampler& own = state_.samplers[static_cast<std::size_t>(thread_)];
  if (!step_.edits.touch(row)) return sample(row, line);
  if (step_.temperature[row] == 0.0f && !step_.edits.sparse(row)) {
    return Sampler::token_of(step_.edits.allowed_peak(row, line));
  }
  const bool copied = keep && step_.edits.dense(row);
  if (copied) {
    own.edited.assign(line.logits, line.logits + shape_.vocab);
    line.logits = own.edited.data();
  } else if (keep) {
    step_.edits.note(row, line, &own.old);
  }
  step_.edits.apply(row, line);
  const int32_t token = sample(row, line);
  if (keep && !copied) restore(line, own.old);
  return token;
}

int32_t Pass::sample(int row, const LogitsRow& line) const {
  if (step_.temperature[row] == 0.0f) return Sampler::likeliest(line);
  const SamplingParams params{step_.temperature[row], step_.top_p[row], step_.top_k[row],
                              step_.min_p[row],
                              uniform_of(step_.seeds[row], step_.sample_positions[row])};
  return state_.samplers[static_cast<std::size_t>(thread_)].sampler.sample(line, params);
}

}  // namespace trioengine
