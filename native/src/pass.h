// What one thread does in a step. All threads walk through the same phases.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "batch.h"
#include "gemm_plan.h"
#include "row_logprobs.h"
#include "sampler.h"
#include "spans.h"
#include "thread_pool.h"
#include "wanted_rows.h"
#include "workspace.h"

namespace trioengine {

// Where the results of a step go.
struct StepOutput {
  int32_t* tokens = nullptr;  // [num_rows]
  LogprobsOut logprobs;       // of the rows that ask for them
  float* logits = nullptr;    // [num_rows][vocab], as the model gives them; null: not wanted
};

// What one thread needs to give a row its token.
struct RowSampler {
  explicit RowSampler(const KernelTable& kernels) : sampler(kernels), logprobs(kernels) {}

  // The same row with logits that may be changed.
  LogitsRow copy(LogitsRow row) {
    edited.resize(static_cast<std::size_t>(row.units) * kUnitColumns);
    for (int u = 0; u < row.units; ++u) {
      std::copy_n(row.unit(u), row.unit_count(u), edited.data() + u * kUnitColumns);
    }
    row.logits = edited.data();
    row.stride = kUnitColumns;
    return row;
  }

  Sampler sampler;
  LogprobsReader logprobs;
  std::vector<float> edited;  // a copy of a row whose own logits must stay
  std::vector<OldLogit> old;  // or what has to be put back
};

// The rows that are computed: all tokens of the step, or those alone whose logits are wanted.
struct RowsView {
  int count;
  float* hidden;             // [count][hidden_width], the residual
  const int32_t* positions;  // [count]
  const Spans* spans;        // how they attend
};

// What the threads of a step share.
struct StepState {
  const Model& model;
  const KernelTable& kernels;
  Workspace& space;
  std::vector<Phase>& phases;
  std::vector<RowSampler>& samplers;  // one per thread
  RowsView all;
  RowsView last;             // what the last layer is left with after its keys and values
  const WantedRows* wanted;  // which these are; null where they are all
  uint16_t* cache;
  int tiles_per_block;
  int threads;
};

// Up to so many rows quantised weights are asked for far ahead, in streams of each thread's own.
constexpr int kStreamedRows = 16;

class Pass {
 public:
  static constexpr int kPhasesPerLayer = 7;
  static constexpr int kPhasesToNarrow = 2;
  static constexpr int kPhasesPerHead = 3;

  Pass(const StepState& state, const StepView& step, int thread);

  // Computes all layers, then the logits rows.
  void run(const StepOutput& output);

 private:
  Phase& next_phase() { return state_.phases[phase_++]; }
  int width() const { return shape_.hidden_width(); }
  float* hidden_row(int row) const;
  KvLayer kv_layer(std::size_t layer) const;

  // Where a norm finds its rows: in the residual, or still elsewhere.
  enum class Origin { kResidual, kTokens, kAllRows };

  void layer(std::size_t index);
  void attention_and_mlp(const Layer& layer, const KvLayer& kv);
  Acts norm(const float* weight, InputForms forms, Origin origin);
  void fetch_row(Origin origin, int row) const;
  void norm_rows(const float* weight, const Acts& out, int row, int rows) const;
  void heads(const Layer& layer, const KvLayer& kv, const Acts& input, int begin, int end);
  HeadTask head_task(const Layer& layer, const KvLayer& kv) const;
  void clear_unused(const KvLayer& kv, int head, int row0, int rows) const;
  void attend(const Layer& layer, const KvLayer& kv, const Acts& output);
  Stretch stretch_of(int unit, int units, int window) const;
  void add_to_hidden(const Linear& w, const Acts& input);

  void head(int first, int rows, const StepOutput& output);
  LogitsLine logits_line(int row, int slot, int rows, const StepOutput& output) const;
  SamplingParams sampling(int row) const;
  bool wants_logprobs(int row) const;
  int residual_row(int row) const;
  int32_t pick(int row, int slot, const LogitsLine& line, const StepOutput& output) const;
  int32_t sample_edited(int row, LogitsRow line, bool keep) const;
  int32_t sample(int row, const LogitsRow& line) const;

  // Runs `unit` on the units of a matrix product, telling each what comes after it.
  template <class Unit>
  void gemm(const GemmPlan& plan, int grain, const Unit& unit);
  // True where each thread is to have its own part of the units.
  bool apart(const GemmPlan& plan) const {
    return plan.row_blocks > 1 ||
           (plan.rows <= kStreamedRows && plan.weight->format != Format::kBf16);
  }
  // Calls unit(index, the same thread's probable next one).
  template <class Unit>
  void claim(bool apart, int total, int grain, const Unit& unit);

  const StepState& state_;
  const Model& model_;
  const ModelShape& shape_;
  const KernelTable& kernels_;
  Workspace& space_;
  const StepView& step_;
  const int thread_;
  const ThreadSpace& own_;
  float* const scratch_;
  RowsView rows_;
  std::size_t phase_ = 0;
};

template <class Unit>
void Pass::gemm(const GemmPlan& plan, int grain, const Unit& unit) {
  claim(apart(plan), plan.total(), grain, [&](int index, int next) {
    GemmUnit work = plan.unit(index, scratch_);
    work.ahead = plan.weights(next);
    unit(work);
  });
}

// Where all rows are one block the threads take turns, so that together they read the weights in
// one stream. Else each keeps to its own rows, as far as it can; and to its own weights where they
// are quantised and few rows meet them, since kernels then ask for what comes far behind.
template <class Unit>
void Pass::claim(bool apart, int total, int grain, const Unit& unit) {
  const int threads = state_.threads;
  if (!apart) {
    const int stride = grain > 1 ? 1 : threads;
    next_phase().run(total, grain, [&](int index) { unit(index, index + stride); });
  } else {
    next_phase().run_ranges(thread_, threads, total, [&](int index) { unit(index, index + 1); });
  }
}

}  // namespace trioengine
