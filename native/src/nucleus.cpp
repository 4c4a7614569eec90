#include "nucleus.h"

#include <algorithm>
#include <cstddef>

#include "numeric.h"

namespace trioengine {
namespace {

constexpr float kFirstBound = 0.05f;  // of the likeliest token's weight; then its square, and so on
constexpr float kLeastBound = 1e-37f;  // what is masked may weigh up to that
constexpr double kFewTokens = 32.0;    // are sorted rather than probed
constexpr double kAim = 1.0 / 32.0;    // of the mass in question

bool ranks_before(float weight, int32_t id, float other_weight, int32_t other_id) {
  return weight > other_weight || (weight == other_weight && id < other_id);
}

// A weight between two, so that about `share` of the mass between them weighs more.
float between(float low, float high, double share) {
  const uint32_t a = float_to_bits(low), b = float_to_bits(high);  // rise as logarithms do
  const double least = 1.0 / 64.0;
  const double kept = std::min(std::max(share, least), 1.0 - least);
  return bits_to_float(b - static_cast<uint32_t>(static_cast<double>(b - a) * kept));
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
  weights_.resize(static_cast<std::size_t>(row.units) * kUnitColumns);
  units_.clear();
  probes_.assign(1, {2.0f, 0.0});  // no token weighs more than 1
  float low = kFirstBound, high = 2.0f;
  for (;;) {
    const double before = probe(low).above;  // of the units taken for a higher bound
    probes_.back().above = before + take(row, units, peak, factor, low, high);
    if (goal.met_by(probes_.back().above) || low == kLeastBound) return;
    high = low;
    low = std::max(low * low, kLeastBound);
  }
}

// Takes the units whose likeliest token weighs more than `low`, and no more than `high`; returns
// the mass of what weighs more than `low` in them.
double Nucleus::take(const LogitsRow& row, const UnitMasses& units, const Peak& peak,
                     float factor, float low, float high) {
  const std::size_t before = units_.size();
  units_.resize(before + static_cast<std::size_t>(row.units));
  std::size_t end = before;
  for (int unit = 0; unit < row.units; ++unit) {
    const float top = units.top_weight(unit);
    units_[end] = unit;
    end += top > low && top <= high ? 1 : 0;
  }
  units_.resize(end);
  const StoredUnits from{row.logits,     row.stride,  row.allowed,
                         row.vocab_size, units_.data() + before, static_cast<int>(end - before)};
  return static_cast<double>(kernels_.exp_units(from, peak.value, factor, low,
                                                weights_.data() + before * kUnitColumns));
}

Nucleus::Probe Nucleus::probe(float bound) {
  probes_.push_back({bound, static_cast<double>(
                                kernels_.mass_above(weights_.data(), taken(), bound))});
  return probes_.back();
}

// Probes until few tokens are left between a bound that meets the goal and one that does not. Each
// probe aims a little past the goal, on the side that the last one has not moved.
std::pair<Nucleus::Probe, Nucleus::Probe> Nucleus::narrow(const Goal& goal) {
  Probe low{kLeastBound, 0.0}, high = probes_.front();
  for (const Probe& each : probes_) {
    if (goal.met_by(each.above)) {
      if (each.bound > low.bound) low = each;
    } else if (each.bound < high.bound) {
      high = each;
    }
  }
  if (high.bound <= low.bound) high = probes_.front();  // sums that rounding has put out of order
  double aim = kAim;
  for (;;) {
    const double mass = low.above - high.above;
    if (mass <= kFewTokens * static_cast<double>(low.bound)) break;
    const float bound = between(low.bound, high.bound, (goal.mass - high.above) / mass + aim);
    if (bound <= low.bound || bound >= high.bound) break;
    const Probe middle = probe(bound);
    const bool met = goal.met_by(middle.above);
    (met ? low : high) = middle;
    aim = met ? -kAim : kAim;
  }
  return {low, high};
}

// The first token in the order of likelihood with which the goal is met, but none behind `last`.
Nucleus::Spot Nucleus::locate(const Goal& goal, const Spot& last) {
  auto [low, high] = narrow(goal);
  find_between(low.bound, high.bound);
  if (spots_.empty()) {  // their sums differ by rounding alone
    high = probes_.front();
    find_between(low.bound, high.bound);
  }
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
  places_.resize(weights_.size());
  const int found = kernels_.find_between(weights_.data(), taken(), low, high, places_.data());
  spots_.clear();
  for (int i = 0; i < found; ++i) {
    const int place = places_[static_cast<std::size_t>(i)];
    const int unit = units_[static_cast<std::size_t>(place / kUnitColumns)];
    spots_.push_back({weights_[static_cast<std::size_t>(place)],
                      unit * kUnitColumns + place % kUnitColumns, 0.0});
  }
  std::sort(spots_.begin(), spots_.end(), [](const Spot& a, const Spot& b) {
    return ranks_before(a.weight, a.id, b.weight, b.id);
  });
}

}  // namespace trioengine
