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

#ifdef TRIO_AMX
#include "attention_amx.h"
#else
#include "attention_pairs.h"
#endif

namespace trioengine {
namespace {

// One row of a tile: which tokens it sees, and its softmax so far.
struct RowState {
  int begin, end;
  float maximum, total;
};

// Softmax of one row within a chunk: scores become weights, relative to the chunk's maximum.
// `factor` turns scores into exponents of 2. Tokens outside [low, high) get weight 0.
template <bool kMasked>
TRIO_INLINE void soften_row(const float* scores, Plain* weights, int low, int high, int count,
                            float factor, float* maximum, float* total) {
  const Vf never = vset(kNever), scale = vset(factor);
  Vf most = never;
  for (int i = 0; i < count; i += kLanes) {
    Vf x = vload(scores + i);
    if (kMasked) x = vkeep(x, low - i, high - i, never);
    most = vmax(x, most);
  }
  *maximum = vmaximum(most) * factor;
  const Vf shift = vset(*maximum);
  Vf sum = vset(0.0f);
  for (int i = 0; i < count; i += kLanes) {
    Vf weight = vexp2<kExactWeights>(vfms(vload(scores + i), scale, shift));
    if (kMasked) weight = vkeep(weight, low - i, high - i, vset(0.0f));
    sum = vadd(sum, weight);
    vstore_plain(weights + i, weight);
  }
  *total = vsum(sum);
}

// 2^x of one number; 1 for 0, so that a chunk without visible tokens changes nothing.
TRIO_INLINE float exp2_scalar(float x) {
  float lanes[kLanes];
  vstore(lanes, vexp2<true>(vset(x)));
  return lanes[0];
}

TRIO_INLINE void merge_row(RowState* row, float maximum, float total, const float* product,
                           float* sum, int head_dim) {
  const float most = row->maximum > maximum ? row->maximum : maximum;
  const float keep = exp2_scalar(row->maximum - most), take = exp2_scalar(maximum - most);
  const Vf keep_all = vset(keep), take_all = vset(take);
  for (int d = 0; d < head_dim; d += kLanes) {
    vstore(sum + d, vfma(vload(product + d), take_all, vmul(vload(sum + d), keep_all)));
  }
  row->total = row->total * keep + total * take;
  row->maximum = most;
}

TRIO_INLINE TileList tiles_of(const AttentionTask& task, int chunk, int end) {
  const int first = chunk * kChunkTiles, all = (end + kLanes - 1) / kLanes;
  TileList list;
  for (; list.count < kChunkTiles && first + list.count < all; ++list.count) {
    const int index = first + list.count;
    const int block = task.block_table[index / task.tiles_per_block];
    const int tile = block * task.tiles_per_block + index % task.tiles_per_block;
    list.at[list.count] = kv_tile(task.kv, tile, task.kv_head);
  }
  return list;
}

void attend_chunk(const ChunkWork& work, int first, float factor, RowState* rows) {
  const AttentionScratch& s = work.scratch;
  const int dim = work.head_dim, count = work.tiles.count * kLanes;
  score_chunk(work);
  float maxima[kAttentionRows], totals[kAttentionRows];
  for (int r = 0; r < work.rows; ++r) {
    const int low = rows[r].begin - first, high = rows[r].end - first;
    const auto soften = low <= 0 && high >= count ? soften_row<false> : soften_row<true>;
    soften(s.scores + r * kAttentionChunk, s.weights + r * kAttentionChunk, low, high, count,
           factor, maxima + r, totals + r);
  }
  weigh_chunk(work);
  for (int r = 0; r < work.rows; ++r) {
    merge_row(rows + r, maxima[r], totals[r], s.product + r * dim, s.sum + r * dim, dim);
  }
}

TRIO_INLINE void load_query(const AttentionTask& task, const AttentionScratch& s, int row,
                            int token, int head) {
  const int dim = task.kv.head_dim;
  const Plain* query =
      static_cast<const Plain*>(task.queries) +
      static_cast<size_t>(token) * static_cast<size_t>(task.query_width) +
      static_cast<size_t>(task.kv_head * task.group + head) * static_cast<size_t>(dim);
  std::memcpy(s.queries + row * dim, query, static_cast<size_t>(dim) * sizeof(Plain));
  for (int d = 0; d < dim; d += kLanes) vstore(s.sum + row * dim + d, vset(0.0f));
}

TRIO_INLINE void store_result(const AttentionTask& task, const float* sum, float total, int token,
                              int head) {
  const int dim = task.kv.head_dim;
  const Vf inverse = vset(1.0f / total);
  const size_t column =
      static_cast<size_t>(task.kv_head * task.group + head) * static_cast<size_t>(dim);
  for (int d = 0; d < dim; d += kGroup) {
    store_acts(task.output, static_cast<size_t>(task.out_row + token),
               column + static_cast<size_t>(d), vmul(vload(sum + d), inverse),
               vmul(vload(sum + d + kLanes), inverse));
  }
}

void attend_rows(const AttentionTask& task, int first_row, int num_rows) {
  ChunkWork work;
  work.scratch = carve_scratch(task.scratch, task.kv.head_dim);
  work.rows = num_rows;
  work.head_dim = task.kv.head_dim;
  work.stream = task.tokens == 1;
  RowState rows[kAttentionRows];
  int begin = 0x7fffffff, end = 0;
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    const int stop = task.position + token + 1;
    const int start = task.window > 0 && stop > task.window ? stop - task.window : 0;
    rows[r] = {start, stop, kNever, 0.0f};
    begin = start < begin ? start : begin;
    end = stop > end ? stop : end;
    load_query(task, work.scratch, r, token, head);
  }
  begin_rows(num_rows);
  const int first = begin / kAttentionChunk;
  work.next = tiles_of(task, first, end);
  for (int chunk = first; chunk * kAttentionChunk < end; ++chunk) {
    work.tiles = work.next;
    work.next = tiles_of(task, chunk + 1, end);
    attend_chunk(work, chunk * kAttentionChunk, task.scale * kLog2E, rows);
  }
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    store_result(task, work.scratch.sum + r * work.head_dim, rows[r].total, token, head);
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
