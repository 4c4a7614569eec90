#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>

namespace trioengine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Tokens this far (in units of the temperature) below the likeliest are looked at first when only
// top_p filters: together they hold the nucleus of nearly every distribution.
constexpr float kNucleusReach = 10.0f;

uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

Peak peak_of(const LogitsRow& row) {
  Peak best = row.peaks[0];
  for (int u = 1; u < row.units; ++u) {
    if (row.peaks[u].value > best.value) best = row.peaks[u];  // a tie goes to the lower id
  }
  return best;
}

}  // namespace

double uniform_of(uint64_t seed, int64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t state = mix(seed + kGolden) + static_cast<uint64_t>(position) * kGolden;
  return static_cast<double>(mix(state) >> 11) * 0x1p-53;
}

int32_t Sampler::token_of(const Peak& peak) {
  return peak.value == kMinusInfinity ? kNoToken : peak.index;
}

int32_t Sampler::likeliest(const LogitsRow& row) { return token_of(peak_of(row)); }

int32_t Sampler::sample(const LogitsRow& row, const SamplingParams& params) {
  const Peak peak = peak_of(row);
  const float inverse = 1.0f / params.temperature;
  if (peak.value == kMinusInfinity) return kNoToken;
  // Not a number, or a temperature so small that it is greedy in float.
  if (!std::isfinite(peak.value) || !std::isfinite(inverse)) return peak.index;
  const bool has_top_k = params.top_k > 0 && params.top_k < row.vocab_size;
  if (!has_top_k && params.top_p >= 1.0f && params.min_p <= 0.0f) {
    return sample_all(row, peak, inverse, params.uniform);
  }
  float threshold = kMinusInfinity;
  if (params.min_p > 0.0f) threshold = peak.value + std::log(params.min_p) * params.temperature;
  threshold = std::min(threshold, peak.value);  // min_p = 1 keeps the likeliest
  if (has_top_k) {
    collect(row, std::max(threshold, top_k_bound(row, params.top_k)));
    rank(static_cast<std::size_t>(params.top_k));
    weigh(peak, inverse);
  } else if (params.min_p > 0.0f) {
    collect(row, threshold);
    rank(candidates_.size());
    weigh(peak, inverse);
  } else {
    keep_nucleus(row, peak, inverse, threshold, params.top_p);
    return draw(params.uniform);
  }
  if (params.top_p < 1.0f) {
    double mass = 0.0;
    for (const float weight : weights_) mass += weight;
    cut_to_mass(mass * params.top_p);
  }
  return draw(params.uniform);
}

// Inverse CDF over the whole vocabulary in the order of ids: sums of 64 columns, then the 64.
int32_t Sampler::sample_all(const LogitsRow& row, const Peak& peak, float inverse,
                            double uniform) {
  const double target = uniform * total_mass(row, peak, inverse);
  double reached = 0.0;
  int unit = 0, last = 0;
  for (; unit < row.units; ++unit) {
    if (sums_[static_cast<std::size_t>(unit)] > 0.0f) last = unit;
    if (reached + sums_[static_cast<std::size_t>(unit)] > target) break;
    reached += sums_[static_cast<std::size_t>(unit)];
  }
  unit = std::min(unit, last);
  const int count = unit_count(row, unit), first = unit * kUnitColumns;
  values_.resize(kUnitColumns);
  kernels_.exp_row(row.logits + first, count, peak.value, inverse, values_.data());
  int chosen = -1;
  for (int i = 0; i < count; ++i) {
    if (row.logits[first + i] == kMinusInfinity) continue;
    chosen = first + i;
    reached += values_[static_cast<std::size_t>(i)];
    if (reached > target) break;
  }
  return chosen >= 0 ? chosen : peak.index;
}

double Sampler::total_mass(const LogitsRow& row, const Peak& peak, float inverse) {
  sums_.resize(static_cast<std::size_t>(row.units));
  kernels_.exp_sums(row.logits, row.vocab_size, peak.value, inverse, sums_.data());
  double total = 0.0;
  for (const float sum : sums_) total += sum;
  return total;
}

void Sampler::collect(const LogitsRow& row, float threshold) {
  candidates_.clear();
  for (int unit = 0; unit < row.units; ++unit) {
    if (!(row.peaks[unit].value >= threshold)) continue;
    const int first = unit * kUnitColumns, last = first + unit_count(row, unit);
    for (int id = first; id < last; ++id) {
      const float logit = row.logits[id];
      if (logit >= threshold && logit > kMinusInfinity) candidates_.push_back({logit, id});
    }
  }
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

// Keeps the likeliest candidates that reach `mass` together, at least one. False if all fall short.
bool Sampler::cut_to_mass(double mass) {
  double reached = 0.0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    reached += weights_[i];
    if (reached >= mass) {
      candidates_.resize(i + 1);
      weights_.resize(i + 1);
      return true;
    }
  }
  return false;
}

// A logit that at least top_k tokens reach: the top_k-th of the peaks of the units.
float Sampler::top_k_bound(const LogitsRow& row, int32_t top_k) {
  if (top_k > row.units) return kMinusInfinity;
  values_.resize(static_cast<std::size_t>(row.units));
  for (int u = 0; u < row.units; ++u) values_[static_cast<std::size_t>(u)] = row.peaks[u].value;
  const auto kth = values_.begin() + (top_k - 1);
  std::nth_element(values_.begin(), kth, values_.end(), std::greater<float>());
  return *kth;
}

void Sampler::keep_nucleus(const LogitsRow& row, const Peak& peak, float inverse, float threshold,
                           float top_p) {
  const double mass = total_mass(row, peak, inverse) * static_cast<double>(top_p);
  collect(row, std::max(threshold, peak.value - kNucleusReach / inverse));
  rank(candidates_.size());
  weigh(peak, inverse);
  if (cut_to_mass(mass)) return;
  collect(row, threshold);
  rank(candidates_.size());
  weigh(peak, inverse);
  cut_to_mass(mass);  // falling short by rounding keeps all
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
