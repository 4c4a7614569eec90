// One token from one row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "row_edits.h"

namespace trioengine {

constexpr int32_t kNoToken = -1;  // where no logit is above -inf

struct SamplingParams {
  float temperature;
  float top_p;
  int32_t top_k;  // 0 keeps all
  float min_p;
  double uniform;  // in [0, 1)
};

// The uniform of (seed, position): SplitMix64 as a counter-based generator, the same numbers as
// engine_proc/uniform.py.
double uniform_of(uint64_t seed, int64_t position);

class Sampler {
 public:
  explicit Sampler(const KernelTable& kernels) : kernels_(kernels) {}

  static int32_t likeliest(const LogitsRow& row);
  static int32_t token_of(const Peak& peak);
  // Filters in vLLM's order: temperature, min_p, top_k, top_p. Equally likely tokens rank by id.
  int32_t sample(const LogitsRow& row, const SamplingParams& params);

 private:
  struct Candidate {
    float logit;
    int32_t id;
  };

  int32_t sample_all(const LogitsRow& row, const Peak& peak, float inverse, double uniform);
  double total_mass(const LogitsRow& row, const Peak& peak, float inverse);
  void collect(const LogitsRow& row, float threshold);
  void rank(std::size_t most);
  void weigh(const Peak& peak, float inverse);
  bool cut_to_mass(double mass);
  float top_k_bound(const LogitsRow& row, int32_t top_k);
  void keep_nucleus(const LogitsRow& row, const Peak& peak, float inverse, float threshold,
                    float top_p);
  int32_t draw(double uniform) const;

  const KernelTable& kernels_;
  std::vector<float> sums_;
  std::vector<float> values_;
  std::vector<Candidate> candidates_;
  std::vector<float> weights_;
};

}  // namespace trioengine
