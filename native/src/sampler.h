// One token from one row of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "nucleus.h"
#include "unit_masses.h"

namespace trioengine {

struct SamplingParams {
  float temperature;
  float top_p;
  int32_t top_k;  // 0 keeps all
  float min_p;
  double uniform;  // in [0, 1)

  float inverse() const { return 1.0f / temperature; }
  bool limits(int vocab_size) const { return top_k > 0 && top_k < vocab_size; }
  // Whether `sample` reads the sums of a row; their factor is then `inverse()`.
  bool needs_sums(int vocab_size) const {
    return temperature > 0.0f && !limits(vocab_size) && min_p <= 0.0f;
  }
};

class Sampler {
 public:
  explicit Sampler(const KernelTable& kernels)
      : kernels_(kernels), masses_(kernels), nucleus_(kernels) {}

  static int32_t likeliest(const LogitsRow& row);
  // Filters in vLLM's order: temperature, min_p, top_k, top_p. Equally likely tokens rank by id.
  int32_t sample(const LogitsRow& row, const SamplingParams& params);

 private:
  int32_t sample_few(const LogitsRow& row, const SamplingParams& params, const Peak& peak);
  void collect(const LogitsRow& row, float threshold);
  void rank(std::size_t most);
  void weigh(const Peak& peak, float inverse);
  void cut_to_mass(double mass);
  int32_t draw(double uniform) const;

  const KernelTable& kernels_;
  UnitMasses masses_;
  Nucleus nucleus_;
  std::vector<float> values_;
  std::vector<RankedToken> candidates_;
  std::vector<float> weights_;
};

}  // namespace trioengine
