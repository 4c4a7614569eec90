// Scores and weighted values of one chunk on AMX tiles. (For the few rows of a decode, vectors as in
// gemm_amx.h would give the same bits; they were measured, and are a fifth slower here.)
#pragma once

#include "attention_chunk.h"
#include "gemm_amx.h"

namespace trioengine {
namespace {

constexpr int kRowsAtOnce = kAttentionRows;

// Tiles 0..3 accumulate; 4 queries, 5 keys; 6 softmax weights of 16 tokens, 7 their values.
TRIO_INLINE void begin_rows(int rows) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.column_bytes[t] = t == 6 ? 32 : 64;
    config.rows[t] = static_cast<uint8_t>(t == 5 ? 16 : (t == 7 ? 8 : rows));
  }
  _tile_loadconfig(&config);
}

TRIO_INLINE void score_tiles_amx(const ChunkWork& work) {
  const int dim = work.head_dim;
  const long stride = dim * 2;
  const uint16_t* const* tiles = work.tiles.at;
  int t = 0;
  for (; t + 4 <= work.tiles.count; t += 4) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < dim; d += kGroup) {
      _tile_loadd(4, work.scratch.queries + d, stride);
      _tile_loadd(5, tiles[t] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, tiles[t + 1] + d * kLanes, 64);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, tiles[t + 2] + d * kLanes, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, tiles[t + 3] + d * kLanes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* out = work.scratch.scores + t * kLanes;
    _tile_stored(0, out, kAttentionChunk * 4);
    _tile_stored(1, out + 16, kAttentionChunk * 4);
    _tile_stored(2, out + 32, kAttentionChunk * 4);
    _tile_stored(3, out + 48, kAttentionChunk * 4);
  }
  for (; t < work.tiles.count; ++t) {
    _tile_zero(0);
    for (int d = 0; d < dim; d += kGroup) {
      _tile_loadd(4, work.scratch.queries + d, stride);
      _tile_loadd(5, tiles[t] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, work.scratch.scores + t * kLanes, kAttentionChunk * 4);
  }
}

TRIO_INLINE void weigh_tiles_amx(const ChunkWork& work) {
  const int dim = work.head_dim;
  const long stride = dim * 4;
  const AttentionScratch& s = work.scratch;
  int column = 0;
  for (; column + 64 <= dim; column += 64) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < work.tiles.count; ++t) {
      const uint16_t* values = work.tiles.at[t] + kLanes * dim + column * 2;
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
    for (int t = 0; t < work.tiles.count; ++t) {
      _tile_loadd(6, s.weights + t * kLanes, kAttentionChunk * 2);
      _tile_loadd(7, work.tiles.at[t] + kLanes * dim + column * 2, stride);
      _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, s.product + column, stride);
  }
}

TRIO_INLINE void score_chunk(const ChunkWork& work) {
  if (work.stream) {
    for (int t = 0; t < work.tiles.count; ++t) {
      prefetch_half(work.tiles.at[t] + kLanes * work.head_dim, work.head_dim);
    }
  }
  settle_memory();
  score_tiles_amx(work);
}

TRIO_INLINE void weigh_chunk(const ChunkWork& work) {
  if (work.stream) {
    for (int t = 0; t < work.next.count; ++t) prefetch_half(work.next.at[t], work.head_dim);
  }
  settle_memory();
  weigh_tiles_amx(work);
}

}  // namespace
}  // namespace trioengine
