#include "nucleus.h"

#include <algorithm>
#include <cstddef>

#include "numeric.h"

namespace trioengine {
namespace {

constexpr float kFirstBound = 0.05f;  // of the likeliest token's weight; then its square, and so on
constexpr float kLeastBound = 1e-37f;  // what is masked may weigh up to that
constexpr double kFewTokens = 32.0;    // are sorted rather than probed

bool ranks_before(float weight, int32_t id, float other_weight, int32_t other_id) {
  return weight > other_weight || (weight == other_weight && id < other_id);
}

// Halves the number of floats between two: for weights that is roughly the number of tokens.
float between(float low, float high) {
  const uint32_t a = float_to_bits(low), b = float_to_bits(high);
  return bits_to_float(a + (b - a) / 2);
}

}  // namespace

int32_t Nucleus::draw(const LogitsRow& row, const UnitMasses& units, const Peak& peak,
                      float factor, double mass, double uniform) {
  const Goal goal{mass, false};
  take_until(row, units, peak, factor, goal);
  const Spot end = locate(goal, {0.0f, 0, 0.0});
  return locate({uniform * end.reached, true}, end).id;
}

// Takes more and more units, the likeliest first, until they hold the nucleus.
void Nucleus::take_until(const LogitsRow& row, const UnitMasses& units, const Peak& peak,
                         float factor, const Goal& goal) {
  weights_.clear();
  firsts_.clear();
  probes_.assign(1, {2.0f, 0.0});  // no token weighs more than 1
  float low = kFirstBound, high = 2.0f;
  for (;;) {
    take(row, units, peak, factor, low, high);
    if (goal.met_by(probe(low).above) || low == kLeastBound) return;
    high = low;
    low = std::max(low * low, kLeastBound);
  }
}

// Takes the units whose likeliest token weighs more than `low`, and no more than `high`.
void Nucleus::take(const LogitsRow& row, const UnitMasses& units, const Peak& peak, float factor,
                   float low, float high) {
  for (int unit = 0; unit < row.units; ++unit) {
    const float top = units.top_weight(unit);
    if (!(top > low && top <= high)) continue;
    const std::size_t size = weights_.size();
    weights_.resize(size + kUnitColumns);
    firsts_.push_back(unit * kUnitColumns);
    kernels_.exp_unit(row.unit(unit), unit_bits(row, unit), peak.value, factor,
                      weights_.data() + size);
  }
}

Nucleus::Probe Nucleus::probe(float bound) {
  const int count = static_cast<int>(weights_.size());
  probes_.push_back({bound, static_cast<double>(
                                kernels_.mass_above(weights_.data(), count, bound))});
  return probes_.back();
}

// The first token in the order of likelihood with which the goal is met, but none behind `last`.
Nucleus::Spot Nucleus::locate(const Goal& goal, const Spot& last) {
  Probe low{kLeastBound, 0.0}, high = probes_.front();
  for (const Probe& each : probes_) {
    if (goal.met_by(each.above)) {
      if (each.bound > low.bound) low = each;
    } else if (each.bound < high.bound) {
      high = each;
    }
  }
  if (high.bound <= low.bound) high = probes_.front();  // sums that rounding has put out of order
  while ((low.above - high.above) / static_cast<double>(low.bound) > kFewTokens) {
    const float bound = between(low.bound, high.bound);
    if (bound == low.bound) break;
    const Probe middle = probe(bound);
    (goal.met_by(middle.above) ? low : high) = middle;
  }
  find_between(low.bound, high.bound);
  Spot found{0.0f, 0, high.above};
  for (const Spot& spot : spots_) {
    if (last.weight > 0.0f && ranks_before(last.weight, last.id, spot.weight, spot.id)) break;
    found = {spot.weight, spot.id, found.reached + static_cast<double>(spot.weight)};
    if (goal.met_by(found.reached)) break;
  }
  return found.weight > 0.0f ? found : last;
}

// Puts the tokens between two weights into their order.
void Nucleus::find_between(float low, float high) {
  const int count = static_cast<int>(weights_.size());
  places_.resize(weights_.size());
  const int found = kernels_.find_between(weights_.data(), count, low, high, places_.data());
  spots_.clear();
  for (int i = 0; i < found; ++i) {
    const int place = places_[static_cast<std::size_t>(i)];
    const int first = firsts_[static_cast<std::size_t>(place / kUnitColumns)];
    spots_.push_back({weights_[static_cast<std::size_t>(place)], first + place % kUnitColumns, 0.0});
  }
  std::sort(spots_.begin(), spots_.end(), [](const Spot& a, const Spot& b) {
    return ranks_before(a.weight, a.id, b.weight, b.id);
  });
}

}  // namespace trioengine
