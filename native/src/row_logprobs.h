// Log-probabilities of single tokens from a row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "unit_masses.h"

namespace trioengine {

constexpr float kLeastLogprob = -9999.0f;  // stands for -inf and for what is no number

// Where the logprobs of a step go; see RowLogprobs in engine_proc/runner.py.
struct LogprobsOut {
  float* chosen = nullptr;     // [num_rows]
  int32_t* ranks = nullptr;    // [num_rows]
  int32_t* top_ids = nullptr;  // [num_rows][width], -1 where there are no more tokens
  float* top = nullptr;        // [num_rows][width]
  int width = 0;
};

// One thread's. Works on rows whose logits, peaks and sums (of factor 1) are the model's own.
class LogprobsReader {
 public:
  explicit LogprobsReader(const KernelTable& kernels) : masses_(kernels) {}

  // Takes in a row: its normaliser and its `count` likeliest tokens, equals by id.
  void read(const LogitsRow& row, int count, int32_t* top_ids, float* top);
  // Of a token of the row that was read last.
  float logprob(float logit) const;
  int32_t rank(const LogitsRow& row, float logit) const;

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };

  double normaliser(const LogitsRow& row);
  void collect(const LogitsRow& row, float threshold);

  UnitMasses masses_;
  double normaliser_ = 0.0;
  std::vector<Candidate> candidates_;
};

}  // namespace trioengine
