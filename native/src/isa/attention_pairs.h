// Scores and weighted values of one chunk with vectors: pairs of dimensions, pairs of tokens.
#pragma once

#include "attention_chunk.h"

namespace trioengine {
namespace {

// R rows against U tiles of keys, starting with tile `first`.
template <int R, int U>
TRIO_INLINE void score_tiles(const ChunkWork& work, const TileList& list, int first) {
  const int dim = work.head_dim;
  const uint16_t* const* tiles = list.at + first;
  Vf acc[R][U];
  TRIO_UNROLL
  for (int r = 0; r < R; ++r) {
    TRIO_UNROLL
    for (int u = 0; u < U; ++u) acc[r][u] = vset(0.0f);
  }
  for (int d = 0; d < dim / 2; ++d) {
    WeightPair keys[U];
    TRIO_UNROLL
    for (int u = 0; u < U; ++u) {
      keys[u] = load_pair(tiles[u] + d * 2 * kLanes);
      if (work.stream) prefetch(tiles[u] + (kLanes * dim + d * 2 * kLanes));  // its values
    }
    TRIO_UNROLL
    for (int r = 0; r < R; ++r) {
      const InputPair query = bcast_pair(work.scratch.queries + r * dim + 2 * d);
      TRIO_UNROLL
      for (int u = 0; u < U; ++u) acc[r][u] = dot_pair(acc[r][u], keys[u], query);
    }
  }
  TRIO_UNROLL
  for (int r = 0; r < R; ++r) {
    TRIO_UNROLL
    for (int u = 0; u < U; ++u) {
      vstore(work.scratch.scores + r * kAttentionChunk + (first + u) * kLanes, acc[r][u]);
    }
  }
}

template <int R>
void score_rows(const ChunkWork& work, const TileList& tiles) {
  constexpr int kTilesAtOnce = R * 2 <= kTileRows * kTilePanels ? 2 : 1;
  int t = 0;
  for (; t + kTilesAtOnce <= tiles.count; t += kTilesAtOnce) {
    score_tiles<R, kTilesAtOnce>(work, tiles, t);
  }
  for (; t < tiles.count; ++t) score_tiles<R, 1>(work, tiles, t);
}

// R rows times W * 16 columns of the values.
template <int R, int W>
void weigh_columns(const ChunkWork& work, const TileList& tiles, const TileList& ahead,
                   int column) {
  const int dim = work.head_dim;
  Vf acc[R][W];
  TRIO_UNROLL
  for (int r = 0; r < R; ++r) {
    TRIO_UNROLL
    for (int w = 0; w < W; ++w) acc[r][w] = vset(0.0f);
  }
  for (int t = 0; t < tiles.count; ++t) {
    if (work.stream && column == 0 && t < ahead.count) prefetch_half(ahead.at[t], dim);
    const uint16_t* values = tiles.at[t] + kLanes * dim + column * 2;
    for (int pair = 0; pair < kLanes / 2; ++pair) {
      WeightPair v[W];
      TRIO_UNROLL
      for (int w = 0; w < W; ++w) v[w] = load_pair(values + pair * 2 * dim + w * 2 * kLanes);
      TRIO_UNROLL
      for (int r = 0; r < R; ++r) {
        const InputPair p =
            bcast_pair(work.scratch.weights + r * kAttentionChunk + t * kLanes + 2 * pair);
        TRIO_UNROLL
        for (int w = 0; w < W; ++w) acc[r][w] = dot_pair(acc[r][w], v[w], p);
      }
    }
  }
  TRIO_UNROLL
  for (int r = 0; r < R; ++r) {
    TRIO_UNROLL
    for (int w = 0; w < W; ++w) {
      vstore(work.scratch.product + r * dim + column + w * kLanes, acc[r][w]);
    }
  }
}

template <int R>
void weigh_rows(const ChunkWork& work, const TileList& tiles, const TileList& ahead) {
  constexpr int kRegisters = kTileRows * kTilePanels;
  constexpr int kWide = R * 4 <= kRegisters ? 4 : (R * 2 <= kRegisters ? 2 : 1);
  constexpr int kNarrow = kWide < 2 ? kWide : 2;  // head_dim is a multiple of 32
  int column = 0;
  for (; column + kWide * kLanes <= work.head_dim; column += kWide * kLanes) {
    weigh_columns<R, kWide>(work, tiles, ahead, column);
  }
  for (; column < work.head_dim; column += kNarrow * kLanes) {
    weigh_columns<R, kNarrow>(work, tiles, ahead, column);
  }
}

template <int R>
void score(const ChunkWork& work, const TileList& tiles) {
  if constexpr (R > 1) {
    if (work.rows < R) return score<R - 1>(work, tiles);
  }
  score_rows<R>(work, tiles);
}

template <int R>
void weigh(const ChunkWork& work, const TileList& tiles, const TileList& ahead) {
  if constexpr (R > 1) {
    if (work.rows < R) return weigh<R - 1>(work, tiles, ahead);
  }
  weigh_rows<R>(work, tiles, ahead);
}

constexpr int kRowsAtOnce = kAttentionTile;
TRIO_INLINE void begin_rows(int) {}
template <class Beside>
TRIO_INLINE void score_chunk(const ChunkWork& work, const TileList& tiles, Beside*) {
  score<kAttentionTile>(work, tiles);
}
template <class Beside>
TRIO_INLINE void weigh_chunk(const ChunkWork& work, const TileList& tiles, const TileList& ahead,
                             Beside*) {
  weigh<kAttentionTile>(work, tiles, ahead);
}

}  // namespace
}  // namespace trioengine
