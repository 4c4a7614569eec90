// Matrix products of quantised weights on AMX tiles: many rows at once.
//
// The weights of a unit are unpacked once to signed bytes, with their scales as floats, into memory
// that stays in the L2 cache. TDPBSSD then makes the integer sums of a group of 32 inputs for 16 rows
// and 16 columns, which vectors scale and add up, group by group, in the order and with the
// operations of multiply_quant_tile: integers are exact, so the bits are the same.
#pragma once

#include "gemm_amx.h"

namespace trioengine {
namespace {

constexpr int kFewQuantRows = 5;  // up to so many, unpacking the weights does not pay (measured)
constexpr int kDotFloats = kLanes * kLanes;  // of one tile of sums
constexpr int kPairsHeld = 2;                // pairs of groups whose sums are in memory

// A group of one panel: 8 rows of 64 signed bytes (4 inputs of each column), scales, minima.
constexpr size_t kUnpackedGroup = kUnpackedFloats * sizeof(float);
constexpr size_t kUnpackedScales = 512;

// Tiles 0 and 1 take sums, 4 and 5 hold activations (16 rows of 32 bytes), 6 and 7 weights.
TRIO_INLINE void configure_quant_tiles() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = t == 4 || t == 5 ? kGroup : 64;
    config.rows[t] = t < 6 ? 16 : kGroup / 4;
  }
  load_config(config);
}

template <Format F>
TRIO_INLINE void unpack_group(const uint8_t* from, uint8_t* to) {
  if constexpr (F == Format::kQ8) {
    const __m512i offset = _mm512_set1_epi8(-128);
    for (int v = 0; v < 8; ++v) {
      const __m512i codes = _mm512_loadu_si512(from + v * 64);
      _mm512_storeu_si512(to + v * 64, _mm512_xor_si512(codes, offset));
    }
  } else {
    const __m512i zero = _mm512_set1_epi8(F == Format::kQ4 ? 8 : 0);
    for (int v = 0; v < 4; ++v) {
      const Vb raw = bload(from + v * 64);
      _mm512_storeu_si512(to + v * 128, _mm512_sub_epi8(blow(raw), zero));
      _mm512_storeu_si512(to + v * 128 + 64, _mm512_sub_epi8(bhigh(raw), zero));
    }
  }
}

template <Format F>
void unpack_panel(const Linear& w, int panel, uint8_t* to) {
  const int groups = w.inputs / kGroup;
  const uint8_t* bytes = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(
      bytes + static_cast<size_t>(groups) * quant_bytes(F));
  const uint16_t* minima = scales + static_cast<size_t>(groups) * kLanes;
  for (int g = 0; g < groups; ++g, bytes += quant_bytes(F), to += kUnpackedGroup) {
    for (size_t i = 0; i < quant_bytes(F); i += 64) prefetch(bytes + i + kPrefetchAhead);
    unpack_group<F>(bytes, to);
    float* floats = reinterpret_cast<float*>(to + kUnpackedScales);
    vstore(floats, vload_half(scales + g * kLanes));
    if (F == Format::kQ4Min) vstore(floats + kLanes, vload_half(minima + g * kLanes));
  }
}

// 16 rows of integer sums, scaled and added to the rows' accumulators. The rows' scales are `stride`
// apart.
template <bool kMinima>
TRIO_INLINE void add_group(Vf (&acc)[kLanes], const int32_t* dots, const uint8_t* unpacked,
                           const ActScale* inputs, size_t stride) {
  const float* floats = reinterpret_cast<const float*>(unpacked + kUnpackedScales);
  const Vf scale = vload(floats), minimum = kMinima ? vload(floats + kLanes) : vset(0.0f);
  for (int r = 0; r < kLanes; ++r) {
    const ActScale& s = inputs[static_cast<size_t>(r) * stride];
    if (kMinima) acc[r] = vfma(minimum, vset(s.scaled_sum), acc[r]);
    const Vf sum = itof(_mm512_loadu_si512(dots + r * kLanes));
    acc[r] = vfma(vmul(scale, vset(s.scale)), sum, acc[r]);
  }
}

// Makes the integer sums of pairs of groups, one pair a step: all groups of a panel, all panels, all
// tiles of 16 rows. Of an odd number of groups the last one's partner is what lies behind it.
struct PairSums {
  const uint8_t* unpacked;
  const int8_t* x;
  int groups, panels, tiles;
  size_t width;
  int32_t* dots;  // kPairsHeld pairs, filled in turn
  int group = 0, panel = 0, made = 0;

  int32_t* pair(int number) const { return dots + number % kPairsHeld * 2 * kDotFloats; }

  inline __attribute__((always_inline)) void step() {
    if (tiles == 0) return;
    const uint8_t* at = unpacked + static_cast<size_t>(panel * groups + group) * kUnpackedGroup;
    const int8_t* rows = x + group * kGroup;
    const long stride = static_cast<long>(width);
    int32_t* const to = pair(made++);
    _tile_zero(0);
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, at, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_zero(1);
    _tile_loadd(5, rows + kGroup, stride);
    _tile_loadd(7, at + kUnpackedGroup, 64);
    _tile_dpbssd(1, 5, 7);
    _tile_stored(0, to, 64);
    _tile_stored(1, to + kDotFloats, 64);
    advance();
  }

  inline __attribute__((always_inline)) void advance() {
    if ((group += 2) < groups) return;
    group = 0;
    if (++panel < panels) return;
    panel = 0;
    x += kLanes * width;
    --tiles;
  }
};

// 16 rows times one unpacked panel. The sums of the next pair are made before those of pair *pair are
// added: what a tile has stored takes a while to arrive where vectors load it.
template <bool kMinima>
TRIO_INLINE void multiply_quant_16(const uint8_t* unpacked, const ActScale* scales, float* out,
                                   size_t out_width, int* pair, PairSums* sums, Fetcher* fetcher) {
  const int groups = sums->groups;
  const size_t scale_stride = sums->width / kGroup;
  Vf acc[kLanes];
  for (int r = 0; r < kLanes; ++r) acc[r] = vset(0.0f);
  for (int g = 0; g < groups; g += 2, unpacked += 2 * kUnpackedGroup) {
    sums->step();
    fetcher->step();
    const int32_t* dots = sums->pair((*pair)++);
    add_group<kMinima>(acc, dots, unpacked, scales + g, scale_stride);
    if (g + 1 == groups) break;
    add_group<kMinima>(acc, dots + kDotFloats, unpacked + kUnpackedGroup, scales + g + 1,
                       scale_stride);
  }
  for (int r = 0; r < kLanes; ++r) vstore(out + static_cast<size_t>(r) * out_width, acc[r]);
}

// Rows past the last one are computed from whatever lies there (kSpareRows) and ignored.
template <Format F, class Epilogue>
void quant_tiles_unit(const GemmUnit& u, const Epilogue& epilogue) {
  const Linear& w = *u.weight;
  const int groups = w.inputs / kGroup;
  const size_t width = static_cast<size_t>(u.input->width);
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  const size_t panel_bytes = static_cast<size_t>(groups) * kUnpackedGroup;
  int32_t* const dots = reinterpret_cast<int32_t*>(u.scratch + kMaxRowTile * out_width);
  uint8_t* const unpacked = reinterpret_cast<uint8_t*>(dots + kPairsHeld * 2 * kDotFloats);
  for (int p = 0; p < u.panels; ++p) {
    unpack_panel<F>(w, u.panel0 + p, unpacked + static_cast<size_t>(p) * panel_bytes);
  }
  configure_quant_tiles();
  const int tiles = ceil_div(u.rows, kLanes);
  Fetcher fetcher(ahead_of(u), tiles * u.panels * ceil_div(groups, 2));
  const int8_t* const x = u.input->quant + static_cast<size_t>(u.row0) * width;
  PairSums sums{unpacked, x, groups, u.panels, tiles, width, dots};
  int pair = 0;
  settle_memory();
  sums.step();
  for (int done = 0; done < u.rows; done += kLanes) {
    const size_t row = static_cast<size_t>(u.row0 + done);
    settle_memory();
    for (int p = 0; p < u.panels; ++p) {
      multiply_quant_16<F == Format::kQ4Min>(
          unpacked + static_cast<size_t>(p) * panel_bytes,
          u.input->scales + row * width / kGroup, u.scratch + p * kLanes, out_width, &pair, &sums,
          &fetcher);
    }
    const int rows = u.rows - done < kLanes ? u.rows - done : kLanes;
    for (int r = 0; r < rows; ++r) {
      epilogue(u.row0 + done + r, u.scratch + static_cast<size_t>(r) * out_width);
    }
  }
}

}  // namespace
}  // namespace trioengine
