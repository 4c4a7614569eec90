#include "nucleus.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

#include "uniform.h"

namespace trioengine {
namespace {

constexpr std::size_t kUnitsAtOnce = 32;
constexpr RankedToken kBehindAll{-std::numeric_limits<float>::infinity(), 0};  // no -inf is drawn

// Another number in [0, 1) that nobody can tell from chance.
double next_uniform(double uniform, int64_t attempt) {
  uint64_t bits;
  std::memcpy(&bits, &uniform, sizeof bits);
  return uniform_of(bits, attempt);
}

}  // namespace

int32_t Nucleus::draw(const LogitsRow& row, const Peak& peak, float factor, float share,
                      double uniform) {
  double mass = units_.read(row, peak.value, factor);
  const double enough = mass * static_cast<double>(share);
  RankedToken end = kBehindAll;
  for (int64_t attempt = 0;; ++attempt) {
    const int32_t id = draw_before(row, end, peak.value, factor, uniform * mass);
    if (id == kNoToken) return peak.index;  // sums that rounding has left nothing of
    if (share >= 1.0f) return id;
    end = {row.at(id), id};
    mass = mass_before(row, end, peak.value, factor, enough);
    if (!(mass >= enough)) return id;  // nor if a broken model makes it not a number
    uniform = next_uniform(uniform, attempt);
  }
}

// Inverse CDF, in the order of ids, over what ranks before `end`: first the units, then the 64 of
// one.
int32_t Nucleus::draw_before(const LogitsRow& row, const RankedToken& end, float shift,
                             float factor, double target) {
  double reached = 0.0;
  int unit = 0, last = 0;
  for (; unit < row.units; ++unit) {
    const float mass = units_.mass(unit);
    if (mass > 0.0f) last = unit;
    if (reached + mass > target) break;
    reached += mass;
  }
  unit = std::min(unit, last);
  const float* logits = row.unit(unit);
  uint64_t bits = unit_bits(row, unit);
  weights_.resize(kUnitColumns);
  kernels_.exp_unit(logits, bits, shift, factor, weights_.data());
  int32_t chosen = kNoToken;
  for (; bits != 0; bits &= bits - 1) {
    const int column = __builtin_ctzll(bits);
    const RankedToken token{logits[column], unit * kUnitColumns + column};
    if (!token.ranks_before(end)) continue;
    chosen = token.id;
    reached += weights_[static_cast<std::size_t>(column)];
    if (reached > target) break;
  }
  return chosen;
}

// What ranks before a token weighs together. Less than `enough` is not exact, but no less than that.
double Nucleus::mass_before(const LogitsRow& row, const RankedToken& token, float shift,
                            float factor, double enough) {
  double most = keep_reaching(row, token);
  weights_.resize(kUnitsAtOnce);
  for (std::size_t begin = 0; begin < left_.size() && most >= enough; begin += kUnitsAtOnce) {
    const std::size_t count = std::min(left_.size() - begin, kUnitsAtOnce);
    const StoredUnits from{row.logits,
                           row.stride,
                           row.allowed,
                           row.vocab_size,
                           left_.data() + begin,
                           static_cast<int>(count),
                           static_cast<int>(left_.size() - begin - count)};
    kernels_.masses_before(from, token, shift, factor, weights_.data());
    for (std::size_t i = 0; i < count; ++i) {
      float& mass = units_.mass(left_[begin + i]);
      most += static_cast<double>(weights_[i]) - static_cast<double>(mass);
      mass = weights_[i];
    }
  }
  return most;
}

// Leaves the units that have something before a token; returns what they weigh as a whole.
double Nucleus::keep_reaching(const LogitsRow& row, const RankedToken& token) {
  left_.resize(static_cast<std::size_t>(row.units));
  std::size_t end = 0;
  double mass = 0.0;
  for (int unit = 0; unit < row.units; ++unit) {
    const Peak& peak = row.peaks[unit];
    if (!RankedToken{peak.value, peak.index}.ranks_before(token)) {
      units_.mass(unit) = 0.0f;
      continue;
    }
    left_[end++] = unit;
    mass += static_cast<double>(units_.mass(unit));
  }
  left_.resize(end);
  return mass;
}

}  // namespace trioengine
