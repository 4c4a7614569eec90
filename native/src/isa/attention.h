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

// Which tokens each row sees, and its softmax so far; in vectors, since rows are merged 16 at once.
struct RowStates {
  int begin[kAttentionRows], end[kAttentionRows];
  float maximum[kAttentionRows], total[kAttentionRows];
  float chunk_maximum[kAttentionRows], chunk_total[kAttentionRows];
  float keep[kAttentionRows], take[kAttentionRows];  // factors of what was and of the chunk
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

// Brings what was so far and the chunk to one maximum. 2^0 is 1, so that a chunk without visible
// tokens changes nothing.
TRIO_INLINE void merge_states(RowStates* rows, int num_rows) {
  for (int r = 0; r < num_rows; r += kLanes) {
    const Vf before = vload(rows->maximum + r), chunk = vload(rows->chunk_maximum + r);
    const Vf most = vmax(before, chunk);
    const Vf keep = vexp2<true>(vsub(before, most)), take = vexp2<true>(vsub(chunk, most));
    vstore(rows->maximum + r, most);
    vstore(rows->keep + r, keep);
    vstore(rows->take + r, take);
    const Vf added = vmul(vload(rows->chunk_total + r), take);
    vstore(rows->total + r, vfma(vload(rows->total + r), keep, added));
  }
}

TRIO_INLINE void merge_row(float keep, float take, const float* product, float* sum,
                           int head_dim) {
  const Vf keep_all = vset(keep), take_all = vset(take);
  for (int d = 0; d < head_dim; d += kLanes) {
    vstore(sum + d, vfma(vload(product + d), take_all, vmul(vload(sum + d), keep_all)));
  }
}

TRIO_INLINE TileList tiles_of(const AttentionTask& task, const int32_t* block_table, int kv_head,
                              int chunk, int end) {
  const int first = chunk * kChunkTiles, all = (end + kLanes - 1) / kLanes;
  int block = first / task.tiles_per_block, within = first % task.tiles_per_block;
  TileList list;
  for (; list.count < kChunkTiles && first + list.count < all; ++list.count) {
    const int tile = block_table[block] * task.tiles_per_block + within;
    list.at[list.count] = kv_tile(task.kv, tile, kv_head);
    if (++within == task.tiles_per_block) {
      within = 0;
      ++block;
    }
  }
  return list;
}

// The tiles after those of `chunk`: of the next chunk, or of the thread's next task.
TRIO_INLINE TileList tiles_after(const AttentionTask& task, int chunk, int end) {
  if ((chunk + 1) * kAttentionChunk < end) {
    return tiles_of(task, task.block_table, task.kv_head, chunk + 1, end);
  }
  if (task.next_block_table == nullptr) return {};
  return tiles_of(task, task.next_block_table, task.next_kv_head,
                  task.next_first / kAttentionChunk, task.next_end);
}

void attend_chunk(const ChunkWork& work, int first, float factor, RowStates* rows) {
  const AttentionScratch& s = work.scratch;
  const int dim = work.head_dim, count = work.tiles.count * kLanes;
  score_chunk(work);
  for (int r = 0; r < work.rows; ++r) {
    const int low = rows->begin[r] - first, high = rows->end[r] - first;
    const auto soften = low <= 0 && high >= count ? soften_row<false> : soften_row<true>;
    soften(s.scores + r * kAttentionChunk, s.weights + r * kAttentionChunk, low, high, count,
           factor, rows->chunk_maximum + r, rows->chunk_total + r);
  }
  weigh_chunk(work);
  merge_states(rows, work.rows);
  for (int r = 0; r < work.rows; ++r) {
    merge_row(rows->keep[r], rows->take[r], s.product + r * dim, s.sum + r * dim, dim);
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

// Rows [first_row, first_row + num_rows) of a task: rows are tokens times the heads of the group.
void attend_rows(const AttentionTask& task, int first_row, int num_rows) {
  ChunkWork work;
  work.scratch = carve_scratch(task.scratch, task.kv.head_dim);
  work.rows = num_rows;
  work.head_dim = task.kv.head_dim;
  work.stream = task.tokens == 1;
  RowStates rows;
  for (int r = 0; r < kAttentionRows; ++r) {  // of rows that are not there, too: no stray NaN
    rows.maximum[r] = rows.chunk_maximum[r] = kNever;
    rows.total[r] = rows.chunk_total[r] = 0.0f;
  }
  int begin = 0x7fffffff, end = 0;
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    const int stop = task.position + token + 1;
    const int start = task.window > 0 && stop > task.window ? stop - task.window : 0;
    rows.begin[r] = start;
    rows.end[r] = stop;
    begin = start < begin ? start : begin;
    end = stop > end ? stop : end;
    load_query(task, work.scratch, r, token, head);
  }
  begin_rows(num_rows);
  const int first = begin / kAttentionChunk;
  work.next = tiles_of(task, task.block_table, task.kv_head, first, end);
  for (int chunk = first; chunk * kAttentionChunk < end; ++chunk) {
    work.tiles = work.next;
    work.next = tiles_after(task, chunk, end);
    attend_chunk(work, chunk * kAttentionChunk, task.scale * kLog2E, &rows);
  }
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    store_result(task, work.scratch.sum + r * work.head_dim, rows.total[r], token, head);
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
