// Elementary functions on 16 lanes, and activations stored in the forms that matrices want.
#pragma once

#include "../layout.h"

namespace trioengine {
namespace {

constexpr float kNever = -1e30f;  // score of a masked token: finite, so that differences are too

// e^x for x <= 88, within 2 units in the last place; below -87 it stays at e^-87.
// Source: Cody and Waite's two-part reduction by ln 2, then a Taylor polynomial of degree 6.
TRIO_INLINE Vf vexp(Vf x) {
  x = vmax(x, vset(-87.0f));
  const Vf n = vround(vmul(x, vset(1.44269504f)));
  Vf r = vfnma(n, vset(0.693147182f), x);
  r = vfnma(n, vset(-1.904654e-9f), r);
  Vf p = vset(1.0f / 720.0f);
  p = vfma(p, r, vset(1.0f / 120.0f));
  p = vfma(p, r, vset(1.0f / 24.0f));
  p = vfma(p, r, vset(1.0f / 6.0f));
  p = vfma(p, r, vset(0.5f));
  p = vfma(p, r, vset(1.0f));
  p = vfma(p, r, vset(1.0f));
  return vscale2(p, n);
}

// x / (1 + e^-x), without overflow for either sign.
TRIO_INLINE Vf vsilu(Vf x) {
  const Vf clamped = vmax(x, vset(-87.0f));
  return vdiv(x, vadd(vset(1.0f), vexp(vsub(vset(0.0f), vmin(clamped, vset(87.0f))))));
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
