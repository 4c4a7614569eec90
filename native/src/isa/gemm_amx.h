// Matrix products of bf16 weights on AMX tiles. A 16 x 32 tile of activations times one panel's
// 32 x 16 weights; a row's sum does not depend on the other rows of its tile.
#pragma once

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

// Tiles 0..3 accumulate, 4 and 5 hold activations, 6 and 7 weights: all 16 rows of 64 bytes.
TRIO_INLINE void configure_gemm_tiles() {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = 64;
    config.rows[t] = 16;
  }
  _tile_loadconfig(&config);
}

constexpr size_t kTileBytes = 1024;

// GCC's tile loads do not tell the compiler that they read memory: without this, stores to what
// they read could be moved past them.
TRIO_INLINE void settle_memory() { __asm__ volatile("" ::: "memory"); }

// 32 rows times 2 panels.
TRIO_INLINE void amx_32x2(const uint8_t* w0, const uint8_t* w1, int steps, const uint16_t* x,
                          size_t width, float* out, size_t out_width) {
  const long stride = static_cast<long>(width * 2), out_stride = static_cast<long>(out_width * 4);
  const uint16_t* lower = x + 16 * width;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int k = 0; k < steps; ++k) {
    _tile_loadd(4, x + k * kGroup, stride);
    _tile_loadd(6, w0 + static_cast<size_t>(k) * kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, w1 + static_cast<size_t>(k) * kTileBytes, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + k * kGroup, stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, out_stride);
  _tile_stored(1, out + 16, out_stride);
  _tile_stored(2, out + 16 * out_width, out_stride);
  _tile_stored(3, out + 16 * out_width + 16, out_stride);
}

// 16 rows times 4 panels: for batches so small that weights come from memory, four streams of it.
TRIO_INLINE void amx_16x4(const uint8_t* w, size_t panel_bytes, int steps, const uint16_t* x,
                          size_t width, float* out, size_t out_width) {
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

// Up to 32 rows of the unit, all panels. Rows past the last one are computed from whatever lies
// there (kSpareRows) and ignored.
TRIO_INLINE void amx_rows(const GemmUnit& u, const uint16_t* x, int rows) {
  const Linear& w = *u.weight;
  const size_t width = static_cast<size_t>(u.input->width);
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  const int steps = w.inputs / kGroup;
  const uint8_t* base = w.data + static_cast<size_t>(u.panel0) * w.panel_bytes;
  int p = 0;
  if (rows > 16) {
    for (; p + 2 <= u.panels; p += 2) {
      const uint8_t* at = base + static_cast<size_t>(p) * w.panel_bytes;
      amx_32x2(at, at + w.panel_bytes, steps, x, width, u.scratch + p * kLanes, out_width);
    }
  } else {
    for (; p + 4 <= u.panels; p += 4) {
      amx_16x4(base + static_cast<size_t>(p) * w.panel_bytes, w.panel_bytes, steps, x, width,
               u.scratch + p * kLanes, out_width);
    }
  }
  for (; p < u.panels; ++p) {
    for (int r = 0; r < rows; r += 16) {
      amx_16x1(base + static_cast<size_t>(p) * w.panel_bytes, steps,
               x + static_cast<size_t>(r) * width, width,
               u.scratch + static_cast<size_t>(r) * out_width + p * kLanes, out_width);
    }
  }
}

template <class Epilogue>
void plain_unit(const GemmUnit& u, const Epilogue& epilogue) {
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  configure_gemm_tiles();
  settle_memory();
  for (int done = 0; done < u.rows; done += kMaxRowTile) {
    const int rows = u.rows - done < kMaxRowTile ? u.rows - done : kMaxRowTile;
    const uint16_t* x = static_cast<const uint16_t*>(u.input->plain) +
                        static_cast<size_t>(u.row0 + done) * static_cast<size_t>(u.input->width);
    amx_rows(u, x, rows);
    for (int r = 0; r < rows; ++r) {
      epilogue(u.row0 + done + r, u.scratch + static_cast<size_t>(r) * out_width);
    }
  }
}

}  // namespace
}  // namespace trioengine
