#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace trioengine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

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
  return nucleus_.draw(row, peak, inverse, params.top_p, params.uniform);
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

void Sampler::collect(const LogitsRow& row, float threshold) {
  candidates_.clear();
  masses_.each_reaching(row, threshold, [&](float logit, int32_t id) {
    if (logit > kMinusInfinity) candidates_.push_back({logit, id});
  });
}

// Sorts by likelihood, then id, and keeps `most`.
void Sampler::rank(std::size_t most) {
  const auto before = [](const RankedToken& a, const RankedToken& b) { return a.ranks_before(b); };
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
