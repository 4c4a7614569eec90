// The end of a pass: final norm, head, and one token per row.
#include <algorithm>

#include "numeric.h"
#include "pass.h"
#include "uniform.h"

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
    kernels_.norm(hidden_row(residual_row(first + row)), width(), shape_.hidden,
                  model_.final_norm(), shape_.eps, 1, input, row);
  });
  if (step_.edits.allow.filled != nullptr) step_.edits.allow.filled->wait();
  LogitsLine lines[kHeadRows];
  for (int row = 0; row < rows; ++row) lines[row] = logits_line(first + row, row, rows, output);
  gemm(plan_gemm(kernels_, w, input, rows, kHeadUnitPanels, state_.threads), kHeadGrain,
       [&](const GemmUnit& unit) { kernels_.gemm_logits(unit, lines); });
  next_phase().run(rows, 1, [&](int row) {
    output.tokens[first + row] = pick(first + row, row, lines[row], output);
  });
}

// The row of the residual whose logits a row wants.
int Pass::residual_row(int row) const {
  const int token = step_.logits_rows[row];
  return state_.wanted != nullptr ? state_.wanted->place(token) : token;
}

// What is needed of a row, and where it goes.
LogitsLine Pass::logits_line(int row, int slot, int rows, const StepOutput& output) const {
  const UnitNotes::Row notes = space_.notes.row(slot);
  LogitsLine line;
  line.allowed = step_.edits.allowed(row);
  line.peaks = notes.peaks;
  const SamplingParams params = sampling(row);
  if (params.needs_sums(shape_.vocab)) {
    line.sums = notes.sums;
    line.factor = params.inverse();
  }
  if (wants_logprobs(row)) {
    // Where all is allowed they are the peaks: what costs here is storing the notes of many rows.
    if (line.allowed.words != nullptr) line.own_peaks = notes.own_peaks;
    line.own_sums = notes.own_sums;
  }
  line.allowed_only = line.own_sums == nullptr && output.logits == nullptr;
  if (output.logits != nullptr) {
    line.logits = output.logits + static_cast<std::size_t>(row) *
                                      static_cast<std::size_t>(shape_.vocab);
    line.stride = kUnitColumns;
  } else if (params.temperature > 0.0f || wants_logprobs(row) || step_.edits.sparse(row)) {
    // Side by side what is written together: rows of their own would get in each other's way.
    line.logits = space_.logits.as<float>() + slot * kUnitColumns;
    line.stride = static_cast<std::ptrdiff_t>(rows) * kUnitColumns;
  }
  return line;
}

SamplingParams Pass::sampling(int row) const {
  return {step_.temperature[row], step_.top_p[row], step_.top_k[row], step_.min_p[row],
          uniform_of(step_.seeds[row], step_.sample_positions[row])};
}

bool Pass::wants_logprobs(int row) const {
  return step_.logprobs_k != nullptr && step_.logprobs_k[row] >= 0;
}

// The token of a row, and its logprobs where they are wanted: those of the model's own logits,
// which therefore outlive what sampling does to them.
int32_t Pass::pick(int row, int slot, const LogitsLine& line, const StepOutput& output) const {
  const int units = ceil_div(model_.head().panels, kHeadUnitPanels);
  const UnitNotes::Row notes = space_.notes.row(slot);
  Peak* const own_peaks = line.own_peaks != nullptr ? notes.own_peaks : notes.peaks;
  LogitsRow own{line.logits, line.stride, own_peaks, notes.own_sums, {}, shape_.vocab, units};
  const LogitsRow allowed{line.logits,  line.stride,  notes.peaks, notes.sums,
                          line.allowed, shape_.vocab, units};
  LogprobsReader& reader = state_.samplers[static_cast<std::size_t>(thread_)].logprobs;
  const bool told = wants_logprobs(row);
  const std::size_t top = static_cast<std::size_t>(row) *
                          static_cast<std::size_t>(output.logprobs.width);
  if (told) {
    reader.read(own, step_.logprobs_k[row], output.logprobs.top_ids + top,
                output.logprobs.top + top);
    if (line.own_peaks == nullptr && step_.edits.sparse(row)) {  // those will be edited
      std::copy_n(notes.peaks, units, notes.own_peaks);
      own.peaks = notes.own_peaks;
    }
  }
  const int32_t target = step_.targets != nullptr ? step_.targets[row] : -1;
  const int32_t token =
      target >= 0 ? target : sample_edited(row, allowed, told || output.logits != nullptr);
  if (told && token >= 0) {
    output.logprobs.chosen[row] = reader.logprob(own.at(token));
    output.logprobs.ranks[row] = reader.rank(own, own.at(token));
  }
  return token;
}

// Leaves the logits as they were if they are to be kept, peaks and sums in any case not.
int32_t Pass::sample_edited(int row, LogitsRow line, bool keep) const {
  RowSampler& own = state_.samplers[static_cast<std::size_t>(thread_)];
  if (!step_.edits.sparse(row)) return sample(row, line);
  const bool copied = keep && line.allowed.words != nullptr;
  if (copied) {
    line = own.copy(line);
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
  return state_.samplers[static_cast<std::size_t>(thread_)].sampler.sample(line, sampling(row));
}

}  // namespace trioengine
