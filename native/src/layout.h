// How weights, activations and the KV cache lie in memory: the same for every instruction set.
//
// Theory of operation
// -------------------
// A *panel* is 16 output columns of a weight matrix. Within a panel, inputs come in pairs:
// element (k, n) of a bf16 panel is at [k / 2][n][k % 2]. One 64-byte row of that is an operand of
// vdpbf16ps, 16 rows are an AMX tile, and without bf16 instructions a shift and a mask give the
// two float vectors. Each output therefore sums over its inputs in one fixed order, whatever the
// number of rows computed at once: results do not depend on the batch.
//
// A *tile* of the KV cache is 16 tokens of one KV head, keys first, then values. Keys are stored
// like a weight panel with tokens for columns ([dim / 2][token][2]), values with dimensions for
// columns ([token / 2][dim][2]), so attention is two small matrix products of the same kind.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trioengine {

constexpr int kLanes = 16;   // columns of a panel, tokens of a KV tile
constexpr int kGroup = 32;   // inputs that share a quantisation scale; inputs are padded to it
constexpr int kSpareRows = 32;  // rows past the end of an activation buffer that may be read

enum class Format : int {
  kBf16 = 0,
  kQ8 = 1,     // scale * (byte - 128), a scale per column and group
  kQ4 = 2,     // scale * (nibble - 8)
  kQ4Min = 3,  // scale * nibble + minimum
};

static constexpr size_t quant_bytes(Format format) { return format == Format::kQ8 ? 512 : 256; }

// One packed weight matrix. A quantised panel is all its groups of weights, then all its scales
// (16 halves a group), then for kQ4Min all its minima.
//
// Weights of a group: vector v of 64 bytes holds for each column 4 consecutive inputs, 4v..4v+3
// (kQ8); with nibbles, vector v holds inputs 8v..8v+3 low and 8v+4..8v+7 high.
struct Linear {
  Format format = Format::kBf16;
  int outputs = 0;         // columns that mean something; the last panel may hold fewer than 16
  int panels = 0;
  int inputs = 0;          // a multiple of kGroup, zero-padded
  const uint8_t* data = nullptr;
  size_t panel_bytes = 0;
  const float* bias = nullptr;  // [panels * kLanes] or null
};

static inline size_t panel_bytes(Format format, int inputs) {
  const size_t groups = static_cast<size_t>(inputs / kGroup);
  if (format == Format::kBf16) return groups * kGroup * kLanes * 2;
  const size_t scales = groups * kLanes * 2 * (format == Format::kQ4Min ? 2 : 1);
  return (groups * quant_bytes(format) + scales + 63) / 64 * 64;
}

// The scale of 32 quantised activations, with what zero points and minima of weights multiply.
struct ActScale {
  float scale;
  float scaled_sum;  // scale * sum
  int32_t sum;       // of the 32 signed bytes
  int32_t unused;
};

// Rows of activations, in the forms that the matrices reading them want. `plain` is bf16 where the
// instruction set multiplies bf16, else float. Columns past the real width are zero.
struct Acts {
  void* plain = nullptr;   // [rows][width], null if not wanted
  int8_t* quant = nullptr;  // [rows][width], null if not wanted
  ActScale* scales = nullptr;  // [rows][width / kGroup]
  int width = 0;           // a multiple of kGroup
};

// One layer of the KV cache, which is bf16 [num_tiles][layers][kv_heads][2][kLanes * head_dim]. All
// layers of a tile lie together, so that a cache that grows touches its memory page by page: with
// layers apart, every one of them would come to a new huge page in the same step.
struct KvLayer {
  uint16_t* data = nullptr;  // of this layer, in the first tile
  std::size_t stride = 0;    // elements from one tile to the next
  int head_dim = 0;          // padded to kGroup
};

static inline size_t kv_half(const KvLayer& kv) {
  return static_cast<size_t>(kLanes) * static_cast<size_t>(kv.head_dim);
}

static inline uint16_t* kv_tile(const KvLayer& kv, int tile, int head) {
  return kv.data + static_cast<size_t>(tile) * kv.stride + static_cast<size_t>(head) * 2 * kv_half(kv);
}

}  // namespace trioengine
