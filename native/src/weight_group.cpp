#include "weight_group.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numeric.h"

namespace trioengine {
namespace {

constexpr int kHalfBytes = 2;

// The nearest code in [0, most]; a NaN becomes 0. Plain casts, which compilers vectorise.
inline int nearest_code(float value, int most) {
  const float clamped = value > 0.0f ? (value < static_cast<float>(most) ? value : most) : 0.0f;
  return static_cast<int>(clamped + 0.5f);
}

// 16 steps between two halves, and what they cost.
struct Grid {
  uint16_t scale;
  uint16_t minimum;
  float error;
};

// Sums squared errors in 8 strands, in the order that compilers vectorise without being told that
// addition is associative.
Grid try_grid(const float* x, float low, float high) {
  constexpr int kStrands = 8;
  Grid grid;
  grid.minimum = float_to_half(low);
  grid.scale = float_to_half((high - low) / 15.0f);
  const float scale = half_to_float(grid.scale), minimum = half_to_float(grid.minimum);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  float errors[kStrands] = {};
  for (int i = 0; i < kGroup; i += kStrands) {
    for (int j = 0; j < kStrands; ++j) {
      const float code = static_cast<float>(nearest_code((x[i + j] - minimum) * inverse, 15));
      const float off = scale * code + minimum - x[i + j];
      errors[j] += off * off;
    }
  }
  grid.error = 0.0f;
  for (const float error : errors) grid.error += error;
  return grid;
}

// Best of a few ranges inside the extremes: clipping one outlier often costs less than a coarser
// grid for the other 31.
Grid best_grid(const float* x) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kGroup; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  const float step = (high - low) * 0.04f;
  Grid best = try_grid(x, low, high);
  for (int below = 0; below < 3; ++below) {
    for (int above = 0; above < 3; ++above) {
      const Grid grid = try_grid(x, low + step * static_cast<float>(below),
                                 high - step * static_cast<float>(above));
      if (grid.error < best.error) best = grid;
    }
  }
  return best;
}

}  // namespace

bool is_blocks(SourceType type) {
  return type == SourceType::kQ4_0 || type == SourceType::kQ4_1 || type == SourceType::kQ8_0;
}

std::size_t block_bytes(SourceType type) {
  switch (type) {
    case SourceType::kQ4_0:
      return kHalfBytes + 16;
    case SourceType::kQ4_1:
      return 2 * kHalfBytes + 16;
    default:
      return kHalfBytes + 32;
  }
}

Format native_format(SourceType type) {
  switch (type) {
    case SourceType::kQ4_0:
      return Format::kQ4;
    case SourceType::kQ4_1:
      return Format::kQ4Min;
    case SourceType::kQ8_0:
      return Format::kQ8;
    default:
      return Format::kBf16;
  }
}

Group zero_group(Format format) {
  Group group{};
  std::memset(group.codes, format == Format::kQ8 ? 128 : (format == Format::kQ4 ? 8 : 0), kGroup);
  return group;
}

Group read_block(SourceType type, const uint8_t* block) {
  Group group{};
  group.scale = load_u16(block);
  const uint8_t* bytes = block + kHalfBytes;
  if (type == SourceType::kQ4_1) {
    group.minimum = load_u16(bytes);
    bytes += kHalfBytes;
  }
  if (type == SourceType::kQ8_0) {
    for (int i = 0; i < kGroup; ++i) group.codes[i] = static_cast<uint8_t>(bytes[i] ^ 0x80u);
    return group;
  }
  for (int i = 0; i < kGroup / 2; ++i) {
    group.codes[i] = bytes[i] & 15u;
    group.codes[i + kGroup / 2] = bytes[i] >> 4;
  }
  return group;
}

Group quantise_to_q8(const float* x) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(x[i]));
  Group group = zero_group(Format::kQ8);
  group.scale = float_to_half(largest / 127.0f);
  const float scale = half_to_float(group.scale);
  if (!(scale > 0.0f)) return group;
  const float inverse = 1.0f / scale;
  for (int i = 0; i < kGroup; ++i) {
    group.codes[i] = static_cast<uint8_t>(nearest_code(x[i] * inverse + 128.0f, 255));
  }
  return group;
}

Group quantise_to_q4(const float* x) {
  const Grid grid = best_grid(x);
  Group group = zero_group(Format::kQ4Min);
  group.scale = grid.scale;
  group.minimum = grid.minimum;
  const float scale = half_to_float(grid.scale), minimum = half_to_float(grid.minimum);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    group.codes[i] = static_cast<uint8_t>(nearest_code((x[i] - minimum) * inverse, 15));
  }
  return group;
}

}  // namespace trioengine
