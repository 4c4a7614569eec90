// Attention of a few query rows over one sequence's blocks, one KV head.
//
// Theory of operation
// -------------------
// Tokens are taken in chunks of 128, counted from position 0. A chunk is computed by itself: its
// scores, its own maximum, its exponentials, their sum, their product with the values; chunks are
// then merged in order. What a row gets from a chunk depends on the row and the chunk alone, and a
// chunk in which a row sees nothing changes no bit of the row, so rows can be tiled at will: one
// token alone, many tokens of a prefill, or rows of several sequences that share their first
// blocks.
// Source: online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867, merged chunk by chunk.
#pragma once

#include "math.h"

namespace trioengine {
namespace {

constexpr int kChunkTiles = kAttentionChunk / kLanes;

// The working memory of one tile of rows, carved from AttentionTask::scratch.
struct AttentionScratch {
  Plain* queries;  // [rows][head_dim]
  float* scores;   // [rows][kAttentionChunk]
  Plain* weights;  // [rows][kAttentionChunk]
  float* product;  // [rows][head_dim]
  float* sum;      // [rows][head_dim]
};

TRIO_INLINE AttentionScratch carve_scratch(void* memory, int head_dim) {
  const size_t dim = static_cast<size_t>(head_dim) * kAttentionRows;
  const size_t chunk = static_cast<size_t>(kAttentionChunk) * kAttentionRows;
  float* at = static_cast<float*>(memory);
  AttentionScratch s;
  s.sum = at;
  s.product = at + dim;
  s.scores = at + 2 * dim;
  s.queries = reinterpret_cast<Plain*>(at + 2 * dim + chunk);
  s.weights = reinterpret_cast<Plain*>(at + 3 * dim + chunk);
  return s;
}

// One row of a tile: which tokens it sees, and its softmax so far.
struct RowState {
  int begin, end;
  float maximum, total;
};

#ifndef TRIO_AMX
template <int R>
void score_rows(const AttentionScratch& s, const uint16_t* const* tiles, int num_tiles,
                int head_dim) {
  for (int t = 0; t < num_tiles; ++t) {
    Vf acc[R];
    for (int r = 0; r < R; ++r) acc[r] = vset(0.0f);
    const uint16_t* keys = tiles[t];
    const uint16_t* values = keys + kLanes * head_dim;
    for (int d = 0; d < head_dim / 2; ++d) {
      const WeightPair pair = load_pair(keys + d * 2 * kLanes);
      prefetch(values + d * 2 * kLanes);
      for (int r = 0; r < R; ++r) {
        acc[r] = dot_pair(acc[r], pair, bcast_pair(s.queries + r * head_dim + 2 * d));
      }
    }
    for (int r = 0; r < R; ++r) vstore(s.scores + r * kAttentionChunk + t * kLanes, acc[r]);
  }
}

template <int R, int W>
TRIO_INLINE void weigh_columns(const AttentionScratch& s, const uint16_t* const* tiles,
                               int num_tiles, int head_dim, int column) {
  Vf acc[R][W];
  for (int r = 0; r < R; ++r) {
    for (int w = 0; w < W; ++w) acc[r][w] = vset(0.0f);
  }
  for (int t = 0; t < num_tiles; ++t) {
    const uint16_t* values = tiles[t] + kLanes * head_dim + column * 2;
    for (int pair = 0; pair < kLanes / 2; ++pair) {
      WeightPair v[W];
      for (int w = 0; w < W; ++w) v[w] = load_pair(values + pair * 2 * head_dim + w * 2 * kLanes);
      for (int r = 0; r < R; ++r) {
        const InputPair p = bcast_pair(s.weights + r * kAttentionChunk + t * kLanes + 2 * pair);
        for (int w = 0; w < W; ++w) acc[r][w] = dot_pair(acc[r][w], v[w], p);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int w = 0; w < W; ++w) vstore(s.product + r * head_dim + column + w * kLanes, acc[r][w]);
  }
}

template <int R>
void weigh_rows(const AttentionScratch& s, const uint16_t* const* tiles, int num_tiles,
                int head_dim) {
  constexpr int kWide = R * 2 <= kTileRows * kTilePanels ? 2 : 1;
  for (int column = 0; column < head_dim; column += kWide * kLanes) {
    weigh_columns<R, kWide>(s, tiles, num_tiles, head_dim, column);
  }
}

template <int R>
void score(int rows, const AttentionScratch& s, const uint16_t* const* tiles, int num_tiles,
           int head_dim) {
  if constexpr (R > 1) {
    if (rows < R) return score<R - 1>(rows, s, tiles, num_tiles, head_dim);
  }
  score_rows<R>(s, tiles, num_tiles, head_dim);
}

template <int R>
void weigh(int rows, const AttentionScratch& s, const uint16_t* const* tiles, int num_tiles,
           int head_dim) {
  if constexpr (R > 1) {
    if (rows < R) return weigh<R - 1>(rows, s, tiles, num_tiles, head_dim);
  }
  weigh_rows<R>(s, tiles, num_tiles, head_dim);
}

TRIO_INLINE void begin_rows(int) {}
TRIO_INLINE void score_chunk(int rows, const AttentionScratch& s, const uint16_t* const* tiles,
                             int num_tiles, int head_dim) {
  score<kAttentionTile>(rows, s, tiles, num_tiles, head_dim);
}
TRIO_INLINE void weigh_chunk(int rows, const AttentionScratch& s, const uint16_t* const* tiles,
                             int num_tiles, int head_dim) {
  weigh<kAttentionTile>(rows, s, tiles, num_tiles, head_dim);
}
constexpr int kRowsAtOnce = kAttentionTile;
#else
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

TRIO_INLINE void score_chunk(int, const AttentionScratch& s, const uint16_t* const* tiles,
                             int num_tiles, int head_dim) {
  settle_memory();
  const long stride = head_dim * 2;
  int t = 0;
  for (; t + 4 <= num_tiles; t += 4) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < head_dim; d += kGroup) {
      _tile_loadd(4, s.queries + d, stride);
      _tile_loadd(5, tiles[t] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, tiles[t + 1] + d * kLanes, 64);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, tiles[t + 2] + d * kLanes, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, tiles[t + 3] + d * kLanes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* out = s.scores + t * kLanes;
    _tile_stored(0, out, kAttentionChunk * 4);
    _tile_stored(1, out + 16, kAttentionChunk * 4);
    _tile_stored(2, out + 32, kAttentionChunk * 4);
    _tile_stored(3, out + 48, kAttentionChunk * 4);
  }
  for (; t < num_tiles; ++t) {
    _tile_zero(0);
    for (int d = 0; d < head_dim; d += kGroup) {
      _tile_loadd(4, s.queries + d, stride);
      _tile_loadd(5, tiles[t] + d * kLanes, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, s.scores + t * kLanes, kAttentionChunk * 4);
  }
}

TRIO_INLINE void weigh_chunk(int, const AttentionScratch& s, const uint16_t* const* tiles,
                             int num_tiles, int head_dim) {
  settle_memory();
  const long value_stride = head_dim * 4, product_stride = head_dim * 4;
  int column = 0;
  for (; column + 64 <= head_dim; column += 64) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < num_tiles; ++t) {
      const uint16_t* values = tiles[t] + kLanes * head_dim + column * 2;
      _tile_loadd(6, s.weights + t * kLanes, kAttentionChunk * 2);
      _tile_loadd(7, values, value_stride);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, values + 32, value_stride);
      _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(7, values + 64, value_stride);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, values + 96, value_stride);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, s.product + column, product_stride);
    _tile_stored(1, s.product + column + 16, product_stride);
    _tile_stored(2, s.product + column + 32, product_stride);
    _tile_stored(3, s.product + column + 48, product_stride);
  }
  for (; column < head_dim; column += kLanes) {
    _tile_zero(0);
    for (int t = 0; t < num_tiles; ++t) {
      _tile_loadd(6, s.weights + t * kLanes, kAttentionChunk * 2);
      _tile_loadd(7, tiles[t] + kLanes * head_dim + column * 2, value_stride);
      _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, s.product + column, product_stride);
  }
}
#endif

// Softmax of one row within a chunk: scores become weights, relative to the chunk's maximum.
TRIO_INLINE void soften_row(const float* scores, Plain* weights, int low, int high, int count,
                            float scale, float* maximum, float* total) {
  const Vf never = vset(kNever), factor = vset(scale);
  Vf most = never;
  for (int i = 0; i < count; i += kLanes) {
    most = vmax(vkeep(vmul(vload(scores + i), factor), low - i, high - i, never), most);
  }
  *maximum = vmaximum(most);
  const Vf shift = vset(*maximum);
  Vf sum = vset(0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const Vf e = vexp(vsub(vmul(vload(scores + i), factor), shift));
    const Vf kept = vkeep(e, low - i, high - i, vset(0.0f));
    sum = vadd(sum, kept);
    vstore_plain(weights + i, kept);
  }
  *total = vsum(sum);
}

// e^x of one number, by the same arithmetic as the vectors.
TRIO_INLINE float exp_scalar(float x) {
  float lanes[kLanes];
  vstore(lanes, vexp(vset(x)));
  return lanes[0];
}

TRIO_INLINE void merge_row(RowState* row, float maximum, float total, const float* product,
                           float* sum, int head_dim) {
  const float most = row->maximum > maximum ? row->maximum : maximum;
  const float keep = exp_scalar(row->maximum - most), take = exp_scalar(maximum - most);
  const Vf keep_all = vset(keep), take_all = vset(take);
  for (int d = 0; d < head_dim; d += kLanes) {
    vstore(sum + d, vfma(vload(product + d), take_all, vmul(vload(sum + d), keep_all)));
  }
  row->total = row->total * keep + total * take;
  row->maximum = most;
}

void attend_chunk(const AttentionTask& task, const AttentionScratch& s, int chunk, int last_end,
                  RowState* rows, int num_rows) {
  const int first = chunk * kAttentionChunk;
  const int left = (last_end - first + kLanes - 1) / kLanes;
  const int num_tiles = left < kChunkTiles ? left : kChunkTiles;
  const uint16_t* tiles[kChunkTiles];
  for (int t = 0; t < num_tiles; ++t) {
    const int index = first / kLanes + t;
    const int block = task.block_table[index / task.tiles_per_block];
    const int tile = block * task.tiles_per_block + index % task.tiles_per_block;
    tiles[t] = kv_tile(task.kv, tile, task.kv_head);
  }
  const int dim = task.kv.head_dim, count = num_tiles * kLanes;
  score_chunk(num_rows, s, tiles, num_tiles, dim);
  float maxima[kAttentionRows], totals[kAttentionRows];
  for (int r = 0; r < num_rows; ++r) {
    soften_row(s.scores + r * kAttentionChunk, s.weights + r * kAttentionChunk,
               rows[r].begin - first, rows[r].end - first, count, task.scale, maxima + r,
               totals + r);
  }
  weigh_chunk(num_rows, s, tiles, num_tiles, dim);
  for (int r = 0; r < num_rows; ++r) {
    merge_row(rows + r, maxima[r], totals[r], s.product + r * dim, s.sum + r * dim, dim);
  }
}

void attend_rows(const AttentionTask& task, int first_row, int num_rows) {
  const int dim = task.kv.head_dim;
  const AttentionScratch s = carve_scratch(task.scratch, dim);
  RowState rows[kAttentionRows];
  int begin = 0x7fffffff, end = 0;
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    const int stop = task.position + token + 1;
    const int start = task.window > 0 && stop > task.window ? stop - task.window : 0;
    rows[r] = {start, stop, kNever, 0.0f};
    begin = start < begin ? start : begin;
    end = stop > end ? stop : end;
    const Plain* query = static_cast<const Plain*>(task.queries) +
                         static_cast<size_t>(token) * static_cast<size_t>(task.query_width) +
                         static_cast<size_t>(task.kv_head * task.group + head) *
                             static_cast<size_t>(dim);
    std::memcpy(s.queries + r * dim, query, static_cast<size_t>(dim) * sizeof(Plain));
    for (int d = 0; d < dim; d += kLanes) vstore(s.sum + r * dim + d, vset(0.0f));
  }
  begin_rows(num_rows);
  for (int chunk = begin / kAttentionChunk; chunk * kAttentionChunk < end; ++chunk) {
    attend_chunk(task, s, chunk, end, rows, num_rows);
  }
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    const Vf inverse = vset(1.0f / rows[r].total);
    const size_t column = static_cast<size_t>(task.kv_head * task.group + head) *
                          static_cast<size_t>(dim);
    for (int d = 0; d < dim; d += kGroup) {
      const float* sum = s.sum + r * dim + d;
      store_acts(task.output, static_cast<size_t>(task.out_row + token),
                 column + static_cast<size_t>(d), vmul(vload(sum), inverse),
                 vmul(vload(sum + kLanes), inverse));
    }
  }
}

void attention(const AttentionTask& task) {
  const int rows = task.tokens * task.group;
  for (int r = 0; r < rows; r += kRowsAtOnce) {
    attend_rows(task, r, rows - r < kRowsAtOnce ? rows - r : kRowsAtOnce);
  }
}

}  // namespace
}  // namespace trioengine
