#include "unit_masses.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>

namespace trioengine {
namespace {

constexpr int kFew = 64;

}  // namespace

Peak peak_of(const LogitsRow& row) {
  Peak best = row.peaks[0];
  for (int u = 1; u < row.units; ++u) {
    if (row.peaks[u].value > best.value) best = row.peaks[u];
  }
  return best;
}

double UnitMasses::read(const LogitsRow& row, float shift, float factor) {
  const std::size_t units = static_cast<std::size_t>(row.units);
  peaks_.resize(units);
  masses_.resize(units);
  top_weights_.resize(units);
  for (int u = 0; u < row.units; ++u) {
    const float peak = row.peaks[u].value;
    peaks_[static_cast<std::size_t>(u)] = peak;
    if (row.sums[u] != kStale) continue;
    row.sums[u] = kernels_.sum_unit(row.unit(u), unit_bits(row, u), peak, factor);
  }
  kernels_.exp_row(peaks_.data(), row.units, shift, factor, top_weights_.data());
  double total = 0.0;
  for (std::size_t u = 0; u < units; ++u) {
    masses_[u] = top_weights_[u] * row.sums[u];
    total += masses_[u];
  }
  return total;
}

// The units that hold such a token.
void UnitMasses::find_reaching(const LogitsRow& row, float threshold) {
  found_.resize(static_cast<std::size_t>(row.units));
  std::size_t end = 0;
  for (int unit = 0; unit < row.units; ++unit) {
    found_[end] = unit;
    end += row.peaks[unit].value >= threshold ? 1 : 0;
  }
  found_.resize(end);
  for (std::size_t i = 0; i < std::min(end, kFoundAhead); ++i) fetch_unit(row, found_[i]);
}

float UnitMasses::reached_by(const LogitsRow& row, int count) {
  if (count > row.units) return -std::numeric_limits<float>::infinity();
  if (count <= kFew) return among_few(row, static_cast<std::size_t>(count));
  peaks_.resize(static_cast<std::size_t>(row.units));
  for (int u = 0; u < row.units; ++u) peaks_[static_cast<std::size_t>(u)] = row.peaks[u].value;
  const auto kth = peaks_.begin() + (count - 1);
  std::nth_element(peaks_.begin(), kth, peaks_.end(), std::greater<float>());
  return *kth;
}

// Most peaks are not among the largest, so a few of those are soonest kept in order.
float UnitMasses::among_few(const LogitsRow& row, std::size_t count) {
  peaks_.clear();
  for (int u = 0; u < row.units; ++u) {
    const float peak = row.peaks[u].value;
    if (peaks_.size() == count) {
      if (peak <= peaks_.back()) continue;
      peaks_.pop_back();
    }
    peaks_.insert(std::upper_bound(peaks_.begin(), peaks_.end(), peak, std::greater<float>()),
                  peak);
  }
  return peaks_.back();
}

}  // namespace trioengine
