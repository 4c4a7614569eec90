// Scores and weighted values of one chunk on AMX tiles. (For the few rows of a decode, vectors as in
// gemm_amx.h would give the same bits; they were measured, and are a fifth slower here.)
#pragma once

#include "attention_chunk.h"
#include "gemm_amx.h"

namespace trioengine {
namespace {

constexpr int kRowsAtOnce = kAttentionRows;
constexpr int kHalfRows = 16;  // of one tile of queries

TRIO_INLINE void configure(const uint8_t (&rows)[8], const uint8_t (&column_bytes)[8]) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = rows[t];
    config.column_bytes[t] = column_bytes[t];
  }
  load_config(config);
}

// Up to 16 rows. Tiles 0..3 accumulate; 4 queries, 5 keys; 6 weights of 16 tokens, 7 their values.
TRIO_INLINE void begin_rows(int rows) {
  if (rows > kHalfRows) return;  // scores and values then need a configuration each
  const uint8_t n = static_cast<uint8_t>(rows);
  configure({n, n, n, n, n, 16, n, 8}, {64, 64, 64, 64, 64, 64, 32, 64});
}

TRIO_INLINE void score_tiles_amx(const ChunkWork& work, const TileList& tiles) {
  const int dim = work.head_dim;
  const long stride = dim * 2;
  int t = 0;
  for (; t + 4 <= tiles.count; t += 4) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < dim; d += kGroup) {
      _tile_loadd(4, work.scratch.queries + d, stride);
      _tile_loadd(5, tiles.at[t] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, tiles.at[t + 1] + d * kLanes, 64);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, tiles.at[t + 2] + d * kLanes, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, tiles.at[t + 3] + d * kLanes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* out = work.scratch.scores + t * kLanes;
    _tile_stored(0, out, kAttentionChunk * 4);
    _tile_stored(1, out + 16, kAttentionChunk * 4);
    _tile_stored(2, out + 32, kAttentionChunk * 4);
    _tile_stored(3, out + 48, kAttentionChunk * 4);
  }
  for (; t < tiles.count; ++t) {
    _tile_zero(0);
    for (int d = 0; d < dim; d += kGroup) {
      _tile_loadd(4, work.scratch.queries + d, stride);
      _tile_loadd(5, tiles.at[t] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, work.scratch.scores + t * kLanes, kAttentionChunk * 4);
  }
}

TRIO_INLINE void weigh_tiles_amx(const ChunkWork& work, const TileList& tiles) {
  const int dim = work.head_dim;
  const long stride = dim * 4;
  const AttentionScratch& s = work.scratch;
  int column = 0;
  for (; column + 64 <= dim; column += 64) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < tiles.count; ++t) {
      const uint16_t* values = tiles.at[t] + kLanes * dim + column * 2;
      _tile_loadd(6, s.weights + t * kLanes, kAttentionChunk * 2);
      _tile_loadd(7, values, stride);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, values + 32, stride);
      _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(7, values + 64, stride);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, values + 96, stride);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, s.product + column, stride);
    _tile_stored(1, s.product + column + 16, stride);
    _tile_stored(2, s.product + column + 32, stride);
    _tile_stored(3, s.product + column + 48, stride);
  }
  for (; column < dim; column += kLanes) {
    _tile_zero(0);
    for (int t = 0; t < tiles.count; ++t) {
      _tile_loadd(6, s.weights + t * kLanes, kAttentionChunk * 2);
      _tile_loadd(7, tiles.at[t] + kLanes * dim + column * 2, stride);
      _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, s.product + column, stride);
  }
}

// 17 to 32 rows, for prefills: every tile of keys and values serves two tiles of rows. Tiles 0..3
// accumulate (upper rows times two tiles, lower rows times two), 4 and 5 are the rows, 6 and 7 keys.
template <class Beside>
TRIO_INLINE void score_two_halves(const ChunkWork& work, const TileList& tiles, Beside* beside) {
  const int dim = work.head_dim;
  const long stride = dim * 2;
  const uint8_t lower = static_cast<uint8_t>(work.rows - kHalfRows);
  configure({16, 16, lower, lower, 16, lower, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
  for (int t = 0; t < tiles.count; t += 2) {
    // An odd last tile is taken twice: its second column of scores is never read.
    const uint16_t* left = tiles.at[t];
    const uint16_t* right = tiles.at[t + 1 < tiles.count ? t + 1 : t];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < dim; d += kGroup) {
      _tile_loadd(4, work.scratch.queries + d, stride);
      _tile_loadd(6, left + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + d * kLanes, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, work.scratch.queries + kHalfRows * dim + d, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      beside->steps(4);
    }
    float* out = work.scratch.scores + t * kLanes;
    float* below = out + kHalfRows * kAttentionChunk;
    _tile_stored(0, out, kAttentionChunk * 4);
    _tile_stored(1, out + 16, kAttentionChunk * 4);
    _tile_stored(2, below, kAttentionChunk * 4);
    _tile_stored(3, below + 16, kAttentionChunk * 4);
  }
}

template <class Beside>
TRIO_INLINE void weigh_two_halves(const ChunkWork& work, const TileList& tiles, Beside* beside) {
  const int dim = work.head_dim;
  const long stride = dim * 4;
  const AttentionScratch& s = work.scratch;
  const uint8_t lower = static_cast<uint8_t>(work.rows - kHalfRows);
  configure({16, 16, lower, lower, 16, lower, 8, 8}, {64, 64, 64, 64, 32, 32, 64, 64});
  for (int column = 0; column < dim; column += 2 * kLanes) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < tiles.count; ++t) {
      const uint16_t* values = tiles.at[t] + kLanes * dim + column * 2;
      _tile_loadd(4, s.weights + t * kLanes, kAttentionChunk * 2);
      _tile_loadd(6, values, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, values + 32, stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, s.weights + kHalfRows * kAttentionChunk + t * kLanes, kAttentionChunk * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      beside->steps(2);
    }
    float* out = s.product + column;
    _tile_stored(0, out, stride);
    _tile_stored(1, out + 16, stride);
    _tile_stored(2, out + kHalfRows * dim, stride);
    _tile_stored(3, out + kHalfRows * dim + 16, stride);
  }
}

// As prefetch_half, into the L2 cache: tiles are loaded from there as fast, and it holds more than is
// on its way. (64 decodes take 0.98 of the time.)
TRIO_INLINE void fetch_half(const uint16_t* half, int head_dim) {
  for (int i = 0; i < head_dim * kLanes; i += 32) __builtin_prefetch(half + i, 0, 2);
}

// `beside` is work for the vector units, which tiles leave idle.
template <class Beside>
TRIO_INLINE void score_chunk(const ChunkWork& work, const TileList& tiles, Beside* beside) {
  if (work.stream) {
    for (int t = 0; t < tiles.count; ++t) {
      fetch_half(tiles.at[t] + kLanes * work.head_dim, work.head_dim);
    }
  }
  settle_memory();
  if (work.rows > kHalfRows) return score_two_halves(work, tiles, beside);
  score_tiles_amx(work, tiles);
}

template <class Beside>
TRIO_INLINE void weigh_chunk(const ChunkWork& work, const TileList& tiles, const TileList& ahead,
                             Beside* beside) {
  if (work.stream) {
    for (int t = 0; t < ahead.count; ++t) fetch_half(ahead.at[t], work.head_dim);
  }
  settle_memory();
  if (work.rows > kHalfRows) return weigh_two_halves(work, tiles, beside);
  weigh_tiles_amx(work, tiles);
}

}  // namespace
}  // namespace trioengine
