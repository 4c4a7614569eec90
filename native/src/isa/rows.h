// Kernels over single rows: embedding, RMS norm, exponentials.
#pragma once

#include "math.h"

namespace trioengine {
namespace {

void embed(const uint16_t* embedding, int width, const int32_t* tokens, int rows, float* hidden,
           int hidden_width) {
  for (int r = 0; r < rows; ++r) {
    const uint16_t* from = embedding + static_cast<size_t>(tokens[r]) * static_cast<size_t>(width);
    float* to = hidden + static_cast<size_t>(r) * static_cast<size_t>(hidden_width);
    int i = 0;
    for (; i + kLanes <= width; i += kLanes) vstore(to + i, vload_bf16(from + i));
    for (; i < width; ++i) to[i] = bf16_to_float(from[i]);
    for (; i < hidden_width; ++i) to[i] = 0.0f;
  }
}

TRIO_INLINE float inverse_rms(const float* x, int padded, int width, float eps) {
  Vf even = vset(0.0f), odd = vset(0.0f);
  for (int i = 0; i < padded; i += kGroup) {
    const Vf a = vload(x + i), b = vload(x + i + kLanes);
    even = vfma(a, a, even);
    odd = vfma(b, b, odd);
  }
  return 1.0f / __builtin_sqrtf(vsum(vadd(even, odd)) / static_cast<float>(width) + eps);
}

void norm(const float* hidden, int hidden_width, int width, const float* weight, float eps,
          int rows, const Acts& out, int out_row) {
  for (int r = 0; r < rows; ++r) {
    const float* x = hidden + static_cast<size_t>(r) * static_cast<size_t>(hidden_width);
    const Vf factor = vset(inverse_rms(x, hidden_width, width, eps));
    for (int i = 0; i < hidden_width; i += kGroup) {
      const Vf a = vmul(vmul(vload(x + i), factor), vload(weight + i));
      const Vf b = vmul(vmul(vload(x + i + kLanes), factor), vload(weight + i + kLanes));
      store_acts(out, static_cast<size_t>(out_row + r), static_cast<size_t>(i), a, b);
    }
  }
}

void exp_row(const float* logits, int count, float shift, float factor, float* out) {
  const Vf base = vset(shift), scale = vset(factor);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    vstore(out + i, vexp(vmul(vsub(vload(logits + i), base), scale)));
  }
  if (i == count) return;
  float tail[kLanes] = {};
  for (int j = i; j < count; ++j) tail[j - i] = logits[j];
  vstore(tail, vexp(vmul(vsub(vload(tail), base), scale)));
  for (int j = i; j < count; ++j) out[j] = tail[j - i];
}

}  // namespace
}  // namespace trioengine
