#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace trioengine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

double uniform_of(uint64_t seed, int64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t state = mix(seed + kGolden) + static_cast<uint64_t>(position) * kGolden;
  return static_cast<double>(mix(state) >> 11) * 0x1p-53;
}

int32_t Sampler::likeliest(const LogitsRow& row) {
  const Peak peak = peak_of(row);
  return peak.value == kMinusInfinity ? kNoToken : peak.index;
}

int32_t Sampler::sample(const LogitsRow& row, const SamplingParams& params) {
  const Peak peak = peak_of(row);
  const float inverse = params.inverse();
  if (peak.value == kMinusInfinity) return kNoToken;
  // Not a number, or a temperature so small that it is greedy in float.
  if (!std::isfinite(peak.value) || !std::isfinite(inverse)) return peak.index;
  if (!params.needs_sums(row.vocab_size)) return sample_few(row, params, peak);
  if (params.top_p >= 1.0f) return sample_all(row, peak, inverse, params.uniform);
  const double mass = masses_.read(row, peak.value, inverse) * static_cast<double>(params.top_p);
  return nucleus_.draw(row, masses_, peak, inverse, mass, params.uniform);
}

// Where min_p or top_k leave a few: those are sorted.
int32_t Sampler::sample_few(const LogitsRow& row, const SamplingParams& params, const Peak& peak) {
  float threshold = kMinusInfinity;
  if (params.min_p > 0.0f) threshold = peak.value + std::log(params.min_p) * params.temperature;
  threshold = std::min(threshold, peak.value);  // min_p = 1 keeps the likeliest
  const bool has_top_k = params.limits(row.vocab_size);
  if (has_top_k) threshold = std::max(threshold, masses_.reached_by(row, params.top_k));
  collect(row, threshold);
  rank(has_top_k ? static_cast<std::size_t>(params.top_k) : candidates_.size());
  weigh(peak, params.inverse());
  if (params.top_p < 1.0f) {
    double mass = 0.0;
    for (const float weight : weights_) mass += weight;
    cut_to_mass(mass * params.top_p);
  }
  return draw(params.uniform);
}

// Inverse CDF over the whole vocabulary in the order of ids: first the units, then the 64 of one.
int32_t Sampler::sample_all(const LogitsRow& row, const Peak& peak, float inverse,
                            double uniform) {
  const double target = uniform * masses_.read(row, peak.value, inverse);
  double reached = 0.0;
  int unit = 0, last = 0;
  for (; unit < row.units; ++unit) {
    const float mass = masses_.mass(unit);
    if (mass > 0.0f) last = unit;
    if (reached + mass > target) break;
    reached += mass;
  }
  unit = std::min(unit, last);
  const int first = unit * kUnitColumns;
  const float* logits = row.unit(unit);
  values_.resize(kUnitColumns);
  uint64_t bits = unit_bits(row, unit);
  kernels_.exp_unit(logits, bits, peak.value, inverse, values_.data());
  int chosen = -1;
  for (int i = 0; bits != 0; ++i, bits >>= 1) {
    if ((bits & 1) == 0 || logits[i] == kMinusInfinity) continue;
    chosen = first + i;
    reached += values_[static_cast<std::size_t>(i)];
    if (reached > target) break;
  }
  return chosen >= 0 ? chosen : peak.index;
}

void Sampler::collect(const LogitsRow& row, float threshold) {
  candidates_.clear();
  masses_.each_reaching(row, threshold, [&](float logit, int32_t id) {
    if (logit > kMinusInfinity) candidates_.push_back({logit, id});
  });
}

// Sorts by likelihood, then id, and keeps `most`.
void Sampler::rank(std::size_t most) {
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
  };
  if (most < candidates_.size()) {
    std::nth_element(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(most),
                     candidates_.end(), before);
    candidates_.resize(most);
  }
  std::sort(candidates_.begin(), candidates_.end(), before);
}

void Sampler::weigh(const Peak& peak, float inverse) {
  values_.resize(candidates_.size());
  weights_.resize(candidates_.size());
  for (std::size_t i = 0; i < candidates_.size(); ++i) values_[i] = candidates_[i].logit;
  kernels_.exp_row(values_.data(), static_cast<int>(values_.size()), peak.value, inverse,
                   weights_.data());
}

// Keeps the likeliest candidates that reach `mass` together, all if they fall short by rounding.
void Sampler::cut_to_mass(double mass) {
  double reached = 0.0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    reached += weights_[i];
    if (reached < mass) continue;
    candidates_.resize(i + 1);
    weights_.resize(i + 1);
    return;
  }
}

int32_t Sampler::draw(double uniform) const {
  double total = 0.0;
  for (const float weight : weights_) total += weight;
  const double target = uniform * total;
  double reached = 0.0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    reached += weights_[i];
    if (reached > target) return candidates_[i].id;
  }
  return candidates_.back().id;
}

}  // namespace trioengine
