// Elementary functions on 16 lanes, and activations stored in the forms that matrices want.
#pragma once

#include "../layout.h"

// Before a loop over sums that registers hold: GCC keeps an array in memory where it unrolls late.
#define TRIO_UNROLL _Pragma("GCC unroll 24")

namespace trioengine {
namespace {

constexpr float kNever = -1e30f;  // score of a masked token: finite, so that differences are too

// 2^x for x <= 127; below -126 it stays there or is 0. With kExact 2^0 is 1 and the relative error
// below 1e-7; else it is below 8e-5 where results are rounded to bf16, which is far coarser.
// Source: minimax polynomials, degree 6 on [-1/2, 1/2] and 3 on [0, 1], fitted by iterated least
// squares.
template <bool kExact>
TRIO_INLINE Vf vexp2(Vf x) {
#ifdef TRIO_BF16
  if constexpr (!kExact) {
    const Vf r = vfraction(x);
    Vf p = vset(7.802393287e-2f);
    p = vfma(p, r, vset(2.260669917e-1f));
    p = vfma(p, r, vset(6.958341599e-1f));
    return vscale2(vfma(p, r, vset(9.999250770e-1f)), x);
  }
#endif
  x = vclamp_exponent(x);
  const Vf n = vround(x), r = vsub(x, n);
  Vf p = vset(1.534581173e-4f);
  p = vfma(p, r, vset(1.339993122e-3f));
  p = vfma(p, r, vset(9.618488958e-3f));
  p = vfma(p, r, vset(5.550328777e-2f));
  p = vfma(p, r, vset(2.402264689e-1f));
  p = vfma(p, r, vset(6.931472057e-1f));
  p = vfma(p, r, vset(1.0f));
  return vscale2(p, n);
}

constexpr float kLog2E = 1.44269504f;
constexpr bool kExactWeights = sizeof(Plain) == sizeof(float);  // what is not rounded to bf16

// e^x for x <= 88; below -87 it stays at e^-87.
TRIO_INLINE Vf vexp(Vf x) { return vexp2<true>(vmul(x, vset(kLog2E))); }

// x / (1 + e^-x), without overflow for either sign.
TRIO_INLINE Vf vsilu(Vf x) {
  const Vf power = vmin(vmul(x, vset(-kLog2E)), vset(126.0f));
  const Vf divisor = vadd(vset(1.0f), vexp2<kExactWeights>(power));
  return kExactWeights ? vdiv(x, divisor) : vmul(x, vreciprocal(divisor));
}

TRIO_INLINE void quantise_group(Vf a, Vf b, int8_t* bytes, ActScale* scale) {
  const float largest = vmaximum(vmax(vabs(a), vabs(b)));
  const Vf inverse = vset(largest > 0.0f ? 127.0f / largest : 0.0f);
  const Vi low = iround(vmul(a, inverse)), high = iround(vmul(b, inverse));
  istore_bytes(bytes, low);
  istore_bytes(bytes + kLanes, high);
  const int32_t sum = isum(iadd(low, high));
  scale->scale = largest / 127.0f;
  scale->scaled_sum = largest / 127.0f * static_cast<float>(sum);
  scale->sum = sum;
}

// Stores columns [column, column + 32) of a row.
TRIO_INLINE void store_acts(const Acts& out, size_t row, size_t column, Vf a, Vf b) {
  const size_t at = row * static_cast<size_t>(out.width) + column;
  if (out.plain != nullptr) {
    Plain* plain = static_cast<Plain*>(out.plain) + at;
    vstore_plain(plain, a);
    vstore_plain(plain + kLanes, b);
  }
  if (out.quant != nullptr) quantise_group(a, b, out.quant + at, out.scales + at / kGroup);
}

}  // namespace
}  // namespace trioengine
