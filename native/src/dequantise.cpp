// What packed weights mean, read back one by one.
#include "numeric.h"
#include "packing.h"

namespace trioengine {
namespace {

float packed_value(const Linear& w, const uint8_t* panel, int k, int n) {
  if (w.format == Format::kBf16) {
    const std::size_t pair = static_cast<std::size_t>(k / 2) * kLanes + static_cast<std::size_t>(n);
    return bf16_to_float(load_u16(panel + (pair * 2 + static_cast<std::size_t>(k % 2)) * 2));
  }
  const std::size_t groups = static_cast<std::size_t>(w.inputs / kGroup);
  const std::size_t g = static_cast<std::size_t>(k / kGroup), at = (g * kLanes + n) * 2;
  const uint8_t* bytes = panel + g * quant_bytes(w.format);
  const uint8_t* scales = panel + groups * quant_bytes(w.format);
  const float scale = half_to_float(load_u16(scales + at));
  const int i = k % kGroup;
  if (w.format == Format::kQ8) {
    return scale * static_cast<float>(bytes[i / 4 * 64 + n * 4 + i % 4] - 128);
  }
  const unsigned code = bytes[i / 8 * 64 + n * 4 + i % 4] >> (i / 4 % 2 * 4) & 15u;
  if (w.format == Format::kQ4) return scale * static_cast<float>(static_cast<int>(code) - 8);
  const float minimum = half_to_float(load_u16(scales + groups * kLanes * 2 + at));
  return scale * static_cast<float>(code) + minimum;
}

}  // namespace

void PackedLinear::dequantise(float* out) const {
  for (int n = 0; n < view_.panels * kLanes; ++n) {
    const uint8_t* panel = view_.data + static_cast<std::size_t>(n / kLanes) * view_.panel_bytes;
    for (int k = 0; k < view_.inputs; ++k) {
      *out++ = packed_value(view_, panel, k, n % kLanes);
    }
  }
}

}  // namespace trioengine
