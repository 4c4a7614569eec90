// The end of the head: peaks and sums of 64 tokens, taken while their logits are in the L1 cache;
// and what the sampler does with many tokens at once.
#pragma once

#include "gemm.h"
#include "math.h"

namespace trioengine {
namespace {

static_assert(kHeadUnitPanels * kLanes == 64, "one bit for each column");

// 64 logits, -inf where there is no bit; such lanes are not even read where a panel has none.
struct UnitLogits {
  Vf parts[kHeadUnitPanels];
};

TRIO_INLINE UnitLogits load_unit(const float* logits, uint64_t bits) {
  const Vf least = vset(-__builtin_inff());
  UnitLogits unit;
  for (int p = 0; p < kHeadUnitPanels; ++p) {
    const unsigned own = static_cast<unsigned>(bits >> (p * kLanes)) & 0xffffu;
    unit.parts[p] = own == 0 ? least : vload(logits + p * kLanes);
    if (own != 0xffffu) unit.parts[p] = vpick(own, unit.parts[p], least);
  }
  return unit;
}

// The likeliest. Which of them it is, is anybody's guess, so it is found without a branch.
TRIO_INLINE Peak find_peak(const UnitLogits& unit, uint64_t bits, int first_index) {
  Vf most = vset(-__builtin_inff());
  for (const Vf& part : unit.parts) most = vmax(part, most);  // a NaN in the part loses
  const float value = vmaximum(most);
  uint64_t equal = 0;
  for (int p = 0; p < kHeadUnitPanels; ++p) {
    equal |= static_cast<uint64_t>(vequal(unit.parts[p], vset(value))) << (p * kLanes);
  }
  equal &= bits;  // nothing but -inf and NaN: what pads the unit is no token
  return {value, first_index + (equal != 0 ? __builtin_ctzll(equal) : 0)};
}

TRIO_INLINE float sum_of(const UnitLogits& unit, float peak, float factor) {
  const Vf base = vset(peak > -__builtin_inff() ? peak : 0.0f), scale = vset(factor);
  Vf sum = vexp(vmul(vsub(unit.parts[0], base), scale));
  for (int p = 1; p < kHeadUnitPanels; ++p) {
    sum = vadd(sum, vexp(vmul(vsub(unit.parts[p], base), scale)));
  }
  return vsum(sum);
}

// As many logits as there are tokens: 64, but for the end of the vocabulary.
TRIO_INLINE void copy_unit(float* out, const float* values, uint64_t real) {
  constexpr int kColumns = kHeadUnitPanels * kLanes;
  if (real == ~uint64_t{0}) {
    for (int i = 0; i < kColumns; i += kLanes) vstore(out + i, vload(values + i));
  } else {
    std::memcpy(out, values, static_cast<size_t>(__builtin_popcountll(real)) * sizeof(float));
  }
}

TRIO_INLINE void tell_unit(const LogitsLine& line, const float* values, uint64_t bits,
                           uint64_t real, int index) {
  const int first = index * kHeadUnitPanels * kLanes;
  const UnitLogits unit = load_unit(values, bits);
  const Peak peak = find_peak(unit, bits, first);
  line.peaks[index] = peak;
  if (line.sums != nullptr) {
    line.sums[index] = bits == 0 ? 0.0f : sum_of(unit, peak.value, line.factor);
  }
  if (line.own_sums == nullptr) return;
  if (line.own_peaks == nullptr) {
    line.own_sums[index] = sum_of(unit, peak.value, 1.0f);
    return;
  }
  const UnitLogits all = load_unit(values, real);
  const Peak own = bits == real ? peak : find_peak(all, real, first);
  line.own_peaks[index] = own;
  line.own_sums[index] = sum_of(all, own.value, 1.0f);
}

// Most of the vocabulary, where a grammar has few tokens: nothing is computed for it.
TRIO_INLINE void tell_nothing(const LogitsLine& line, int index) {
  line.peaks[index] = {-__builtin_inff(), index * kHeadUnitPanels * kLanes};
  if (line.sums != nullptr) line.sums[index] = 0.0f;
}

void gemm_logits(const GemmUnit& u, const LogitsLine* rows) {
  const int index = u.panel0 / kHeadUnitPanels;
  const int vocab = u.weight->outputs;
  const uint64_t real = allowed_bits({}, index, vocab);
  gemm(u, [&](int row, const float* values) {
    const LogitsLine& line = rows[row];
    const uint64_t bits =
        line.allowed.words == nullptr ? real : allowed_bits(line.allowed, index, vocab);
    if (bits == 0 && line.allowed_only) return tell_nothing(line, index);
    tell_unit(line, values, bits, real, index);
    if (line.logits != nullptr) copy_unit(line.logits + index * line.stride, values, real);
  });
}

// As load_unit, reading nothing behind the last token that has a bit: there a row may end.
TRIO_INLINE UnitLogits load_stored_unit(const float* logits, uint64_t bits) {
  const int count = bits == 0 ? 0 : 64 - __builtin_clzll(bits);
  if (count % kLanes == 0) return load_unit(logits, bits);
  float copy[kHeadUnitPanels * kLanes] = {};
  std::memcpy(copy, logits, static_cast<size_t>(count) * sizeof(float));
  return load_unit(copy, bits);
}

float sum_unit(const float* logits, uint64_t bits, float peak, float factor) {
  return bits == 0 ? 0.0f : sum_of(load_stored_unit(logits, bits), peak, factor);
}

// The weights of a part of a unit, 0 where there is no bit.
TRIO_INLINE Vf weigh(const UnitLogits& unit, int part, uint64_t bits, Vf base, Vf scale) {
  const Vf power = vexp(vmul(vsub(unit.parts[part], base), scale));
  return vpick(static_cast<unsigned>(bits >> (part * kLanes)) & 0xffffu, power, vset(0.0f));
}

void exp_unit(const float* logits, uint64_t bits, float shift, float factor, float* out) {
  const UnitLogits unit = load_stored_unit(logits, bits);
  for (int p = 0; p < kHeadUnitPanels; ++p) {
    vstore(out + p * kLanes, weigh(unit, p, bits, vset(shift), vset(factor)));
  }
}

// Units lie far apart, and most of them not in the L2 cache: they are asked for long before their
// turn, and into that cache, since few requests of the L1 cache are in flight at once.
constexpr int kUnitsAhead = 24;

TRIO_INLINE void fetch_unit(const StoredUnits& from, int index) {
  if (index >= from.count + from.ahead) return;
  const float* logits = from.logits + from.units[index] * from.stride;
  for (int p = 0; p < kHeadUnitPanels; ++p) __builtin_prefetch(logits + p * kLanes, 0, 2);
}

// A bit for each token of a unit with a lower id.
TRIO_INLINE uint64_t bits_before(int32_t id, int unit) {
  const int count = id - unit * kHeadUnitPanels * kLanes;
  if (count <= 0) return 0;
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

void masses_before(const StoredUnits& from, const RankedToken& end, float shift, float factor,
                   float* masses) {
  const Vf base = vset(shift), scale = vset(factor), last = vset(end.logit);
  for (int i = 0; i < from.count; ++i) {
    fetch_unit(from, i + kUnitsAhead);
    const int index = from.units[i];
    const uint64_t bits = allowed_bits(from.allowed, index, from.vocab_size);
    const uint64_t lower = bits_before(end.id, index);
    const UnitLogits unit = load_stored_unit(from.logits + index * from.stride, bits);
    Vf sum = vset(0.0f);
    for (int p = 0; p < kHeadUnitPanels; ++p) {
      const unsigned ties = static_cast<unsigned>(lower >> (p * kLanes)) & 0xffffu;
      const unsigned own = vabove(unit.parts[p], last) | (vequal(unit.parts[p], last) & ties);
      const Vf power = vexp(vmul(vsub(unit.parts[p], base), scale));
      sum = vadd(sum, vpick(own, power, vset(0.0f)));
    }
    masses[i] = vsum(sum);
  }
}

uint64_t reaching(const float* logits, uint64_t bits, float threshold) {
  const UnitLogits unit = load_stored_unit(logits, bits);
  const Vf least = vset(threshold);
  uint64_t found = 0;
  for (int p = 0; p < kHeadUnitPanels; ++p) {
    const unsigned own = vabove(unit.parts[p], least) | vequal(unit.parts[p], least);
    found |= static_cast<uint64_t>(own) << (p * kLanes);
  }
  return found & bits;
}

}  // namespace
}  // namespace trioengine
