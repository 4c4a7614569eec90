// Matrix products of bf16 weights on AMX tiles. A 16 x 32 tile of activations times one panel's
// 32 x 16 weights; a row's sum does not depend on the other rows of its tile.
//
// TDPBF16PS sums the even and the odd products of its 32 inputs apart, each by fused multiply-add
// from 0, adds the two, and adds that to the accumulator, with denormals as zero. AVX-512 does the
// same to the bit (a test compares them), and reads memory faster than tile loads, of which few are
// in flight at once: so a handful of rows, whose cost is reading the weights, is computed with it.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, TDPBF16PS.
#pragma once

#include "fetcher.h"
#include "math.h"

namespace trioengine {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// GCC's tile loads and configurations do not tell the compiler that they read memory: without this,
// stores to what they read could be moved past them.
TRIO_INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

TRIO_INLINE void load_config(const TileConfig& config) {
  settle_memory();
  _tile_loadconfig(&config);
}

// Tiles 0..3 accumulate, 4 and 5 hold activations, 6 and 7 weights: all 16 rows of 64 bytes.
TRIO_INLINE void configure_gemm_tiles() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = 64;
    config.rows[t] = 16;
  }
  load_config(config);
}

constexpr size_t kTileBytes = 1024;
constexpr int kWholeSteps = 20;  // up to 640 inputs at once, else 384 (measured)
constexpr int kBlockSteps = 12;
constexpr int kPrefetchAhead = 2048;  // bytes; measured best between 1 and 4 KiB

// The even and the odd element of each bf16 pair, as float.
TRIO_INLINE Vf even_half(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
TRIO_INLINE Vf odd_half(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
}

// What TDPBF16PS adds to R rows' accumulators of C panels for `pairs` pairs of inputs. Panel c is
// at weights + c * panel_step bytes, its pairs pair_step bytes apart; row r at x + r * width.
template <int R, int C, bool kPrefetch>
TRIO_INLINE void add_products(Vf (&acc)[R][C], const uint8_t* weights, size_t panel_step,
                              size_t pair_step, int pairs, const uint16_t* x, size_t width) {
  Vf even[R][C], odd[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) even[r][c] = odd[r][c] = vset(0.0f);
  }
  for (int k = 0; k < pairs; ++k) {
    Vf weight_even[C], weight_odd[C];
    for (int c = 0; c < C; ++c) {
      const uint8_t* p = weights + static_cast<size_t>(c) * panel_step +
                         static_cast<size_t>(k) * pair_step;
      const __m512i raw = _mm512_loadu_si512(p);
      weight_even[c] = even_half(raw);
      weight_odd[c] = odd_half(raw);
      if (kPrefetch) prefetch(p + kPrefetchAhead);
    }
    for (int r = 0; r < R; ++r) {
      const InputPair pair = bcast_pair(x + static_cast<size_t>(r) * width + 2 * k);
      const Vf x_even = even_half(pair.raw), x_odd = odd_half(pair.raw);
      for (int c = 0; c < C; ++c) {
        even[r][c] = vfma(weight_even[c], x_even, even[r][c]);
        odd[r][c] = vfma(weight_odd[c], x_odd, odd[r][c]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) acc[r][c] = vadd(acc[r][c], vadd(even[r][c], odd[r][c]));
  }
}

constexpr int kFewRows = 4;

// R rows times C panels without tiles.
template <int R, int C>
void multiply_few(const Linear& w, int panel, const uint16_t* x, size_t width, float* out,
                  size_t out_width) {
  const uint8_t* base = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  Vf acc[R][C];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
  }
  for (int k = 0; k < w.inputs; k += kGroup) {
    add_products<R, C, true>(acc, base + static_cast<size_t>(k) * kLanes * 2, w.panel_bytes, 64,
                             kGroup / 2, x + k, width);
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      vstore(out + static_cast<size_t>(r) * out_width + c * kLanes, acc[r][c]);
    }
  }
}

template <int R>
void few_rows(const GemmUnit& u, const uint16_t* x, int rows) {
  if constexpr (R > 1) {
    if (rows < R) return few_rows<R - 1>(u, x, rows);
  }
  constexpr int kWide = R <= 2 ? 4 : 2;
  const size_t width = static_cast<size_t>(u.input->width);
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  int p = 0;
  for (; p + kWide <= u.panels; p += kWide) {
    multiply_few<R, kWide>(*u.weight, u.panel0 + p, x, width, u.scratch + p * kLanes, out_width);
  }
  for (; p < u.panels; ++p) {
    multiply_few<R, 1>(*u.weight, u.panel0 + p, x, width, u.scratch + p * kLanes, out_width);
  }
}

// Rows whose product is finished and whose epilogue is not: it runs row by row between the steps of
// the next tile, since the tile unit leaves the vector units idle for 16 cycles a product.
template <class Epilogue>
class Pending {
 public:
  Pending(const Epilogue& epilogue, size_t width) : epilogue_(epilogue), width_(width) {}

  // Takes over `rows` rows of values, `row` the first.
  void start(int row, int rows, const float* values) {
    row_ = row;
    end_ = row + rows;
    values_ = values;
  }

  inline __attribute__((always_inline)) void step() {
    if (row_ == end_) return;
    epilogue_(row_++, values_);
    values_ += width_;
  }

  void finish() {
    while (row_ != end_) step();
  }

 private:
  const Epilogue& epilogue_;
  size_t width_;
  const float* values_ = nullptr;
  int row_ = 0, end_ = 0;
};

// 32 rows times 2 panels, `steps` groups of inputs from x and the panels on, added to `out` unless
// they are the first. Weights are loaded past the L1 cache, which they would sweep clean of
// activations.
template <class Epilogue>
TRIO_INLINE void amx_32x2(const uint8_t* w0, const uint8_t* w1, int steps, const uint16_t* x,
                          size_t width, float* out, size_t out_width, bool first,
                          Fetcher* fetcher, Pending<Epilogue>* pending) {
  const long stride = static_cast<long>(width * 2), out_stride = static_cast<long>(out_width * 4);
  const uint16_t* lower = x + 16 * width;
  float* below = out + 16 * out_width;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, out, out_stride);
    _tile_loadd(1, out + 16, out_stride);
    _tile_loadd(2, below, out_stride);
    _tile_loadd(3, below + 16, out_stride);
  }
  for (int k = 0; k < steps; ++k) {
    const size_t at = static_cast<size_t>(k) * kTileBytes;
    _tile_loadd(4, x + k * kGroup, stride);
    _tile_stream_loadd(6, w0 + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, w1 + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + k * kGroup, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    fetcher->step();
    pending->step();
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + 16, out_stride);
  _tile_stored(2, below, out_stride);
  _tile_stored(3, below + 16, out_stride);
}

// Up to 16 rows weights pass faster where nothing but the products asks for them (measured).
TRIO_INLINE Ahead ahead_of(const GemmUnit& u) { return u.rows > 16 ? u.ahead : Ahead{}; }

// 16 rows times 4 panels: for batches so small that weights come from memory, four streams of it.
TRIO_INLINE void amx_16x4(const uint8_t* w, size_t panel_bytes, int steps, const uint16_t* x,
                          size_t width, float* out, size_t out_width, Fetcher* fetcher) {
  const long stride = static_cast<long>(width * 2), out_stride = static_cast<long>(out_width * 4);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < steps; ++k) {
    const uint8_t* at = w + static_cast<size_t>(k) * kTileBytes;
    _tile_loadd(4, x + k * kGroup, stride);
    _tile_loadd(5, at, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, at + panel_bytes, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, at + 2 * panel_bytes, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, at + 3 * panel_bytes, 64);
    _tile_dpbf16ps(3, 4, 5);
    fetcher->step();
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + 16, out_stride);
  _tile_stored(2, out + 32, out_stride);
  _tile_stored(3, out + 48, out_stride);
}

TRIO_INLINE void amx_16x1(const uint8_t* w, int steps, const uint16_t* x, size_t width, float* out,
                          size_t out_width) {
  _tile_zero(0);
  for (int k = 0; k < steps; ++k) {
    _tile_loadd(4, x + k * kGroup, static_cast<long>(width * 2));
    _tile_loadd(6, w + static_cast<size_t>(k) * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
  }
  _tile_stored(0, out, static_cast<long>(out_width * 4));
}

// Up to 32 rows of the unit, all panels, to `out`. Rows past the last one are computed from whatever
// lies there (kSpareRows) and ignored.
template <class Epilogue>
TRIO_INLINE void amx_rows(const GemmUnit& u, const uint16_t* x, int rows, float* out,
                          Fetcher* fetcher, Pending<Epilogue>* pending) {
  const Linear& w = *u.weight;
  const size_t width = static_cast<size_t>(u.input->width);
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  const int steps = w.inputs / kGroup;
  const uint8_t* base = w.data + static_cast<size_t>(u.panel0) * w.panel_bytes;
  const int pairs_end = u.panels / 2 * 2;
  int p = 0;
  if (rows > 16) {
    // A block of inputs of 32 rows fits the L1 cache and meets all panels before the next block.
    const int block = steps <= kWholeSteps ? steps : kBlockSteps;
    for (int k = 0; k < steps; k += block) {
      const uint8_t* at = base + static_cast<size_t>(k) * kTileBytes;
      const int count = steps - k < block ? steps - k : block;
      for (p = 0; p < pairs_end; p += 2) {
        const uint8_t* left = at + static_cast<size_t>(p) * w.panel_bytes;
        amx_32x2(left, left + w.panel_bytes, count, x + k * kGroup, width,
                 out + p * kLanes, out_width, k == 0, fetcher, pending);
      }
    }
  } else {
    for (; p + 4 <= u.panels; p += 4) {
      amx_16x4(base + static_cast<size_t>(p) * w.panel_bytes, w.panel_bytes, steps, x, width,
               out + p * kLanes, out_width, fetcher);
    }
  }
  for (; p < u.panels; ++p) {
    for (int r = 0; r < rows; r += 16) {
      amx_16x1(base + static_cast<size_t>(p) * w.panel_bytes, steps,
               x + static_cast<size_t>(r) * width, width,
               out + static_cast<size_t>(r) * out_width + p * kLanes, out_width);
    }
  }
}

// Steps of a unit, of its 32-row tiles times pairs of panels, or 16-row tiles times fours.
TRIO_INLINE int steps_of(const GemmUnit& u) {
  const int tiles = (u.rows + kMaxRowTile - 1) / kMaxRowTile;
  const int runs = u.rows <= 16 ? u.panels / 4 : tiles * (u.panels / 2);
  return (runs > 0 ? runs : 1) * (u.weight->inputs / kGroup);
}

template <class Epilogue>
void plain_unit(const GemmUnit& u, const Epilogue& epilogue) {
  const size_t width = static_cast<size_t>(u.input->width);
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  const uint16_t* x =
      static_cast<const uint16_t*>(u.input->plain) + static_cast<size_t>(u.row0) * width;
  if (u.rows > kFewRows) configure_gemm_tiles();
  settle_memory();
  Fetcher fetcher(ahead_of(u), steps_of(u));
  Pending<Epilogue> pending(epilogue, out_width);
  float* out = u.scratch;
  float* other = out + kMaxRowTile * out_width;
  for (int done = 0; done < u.rows; done += kMaxRowTile, x += kMaxRowTile * width) {
    const int rows = u.rows - done < kMaxRowTile ? u.rows - done : kMaxRowTile;
    if (u.rows <= kFewRows) {
      few_rows<kFewRows>(u, x, rows);
    } else {
      amx_rows(u, x, rows, out, &fetcher, &pending);
    }
    pending.finish();
    pending.start(u.row0 + done, rows, out);
    float* const finished = out;
    out = other;
    other = finished;
  }
  pending.finish();
}

}  // namespace
}  // namespace trioengine
