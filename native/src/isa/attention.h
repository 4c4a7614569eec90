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

// Sums of a chunk are added in this order whatever the number of its tiles; absent ones are 0.
TRIO_INLINE float sum_tiles(const Vf (&sums)[kChunkTiles]) {
  static_assert(kChunkTiles == 8, "the tree has 8 leaves");
  const Vf left = vadd(vadd(sums[0], sums[1]), vadd(sums[2], sums[3]));
  const Vf right = vadd(vadd(sums[4], sums[5]), vadd(sums[6], sums[7]));
  return vsum(vadd(left, right));
}

// Softmax of one row within a chunk: scores become weights, relative to the chunk's maximum.
// `factor` turns scores into exponents of 2. With kMasked, tokens outside [low, high) get weight 0;
// without, there are kChunkTiles tiles, and the loops are unrolled.
template <bool kMasked>
TRIO_INLINE void soften_row(const float* scores, Plain* weights, int low, int high, int tiles,
                            float factor, float* maximum, float* total) {
  const Vf never = vset(kNever), scale = vset(factor);
  const int count = kMasked ? tiles : kChunkTiles;
  Vf parts[kChunkTiles];
  for (int t = 0; t < count; ++t) {
    parts[t] = vload(scores + t * kLanes);
    if (kMasked) parts[t] = vkeep(parts[t], low - t * kLanes, high - t * kLanes, never);
  }
  Vf most = parts[0], other = parts[count > 1 ? 1 : 0];
  for (int t = 2; t < count; ++t) {
    Vf& strand = t % 2 == 0 ? most : other;
    strand = vmax(parts[t], strand);
  }
  *maximum = vmaximum(vmax(most, other)) * factor;
  const Vf shift = vset(*maximum);
  for (int t = 0; t < count; ++t) {
    parts[t] = vexp2<kExactWeights>(vfms(parts[t], scale, shift));
    if (kMasked) parts[t] = vkeep(parts[t], low - t * kLanes, high - t * kLanes, vset(0.0f));
    vstore_plain(weights + t * kLanes, parts[t]);
  }
  for (int t = count; t < kChunkTiles; ++t) parts[t] = vset(0.0f);
  *total = sum_tiles(parts);
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

TRIO_INLINE void soften_chunk(const ChunkWork& work, const TileList& tiles, int first,
                              float factor, RowStates* rows) {
  const AttentionScratch& s = work.scratch;
  for (int r = 0; r < work.rows; ++r) {
    const int low = rows->begin[r] - first, high = rows->end[r] - first;
    const auto soften =
        low <= 0 && high >= kAttentionChunk ? soften_row<false> : soften_row<true>;
    soften(s.scores + r * kAttentionChunk, s.weights + r * kAttentionChunk, low, high,
           tiles.count, factor, rows->chunk_maximum + r, rows->chunk_total + r);
  }
}

TRIO_INLINE void merge_chunk(const ChunkWork& work, RowStates* rows) {
  const int dim = work.head_dim;
  merge_states(rows, work.rows);
  for (int r = 0; r < work.rows; ++r) {
    merge_row(rows->keep[r], rows->take[r], work.scratch.product + r * dim,
              work.scratch.sum + r * dim, dim);
  }
}

// Chunks from that of token `begin` to that before `end`. The scores of a chunk are computed before
// the values of the one before it are weighed: what is stored for a matrix product then has time
// to arrive in the cache, from which alone tiles are loaded.
void attend_chunks(const ChunkWork& work, const AttentionTask& task, int begin, int end,
                   RowStates* rows) {
  const float factor = task.scale * kLog2E;
  int chunk = begin / kAttentionChunk;
  TileList tiles = tiles_of(task, task.block_table, task.kv_head, chunk, end);
  TileList next = tiles_after(task, chunk, end);
  score_chunk(work, tiles);
  soften_chunk(work, tiles, chunk * kAttentionChunk, factor, rows);
  for (; (chunk + 1) * kAttentionChunk < end; ++chunk) {
    score_chunk(work, next);
    const TileList ahead = tiles_after(task, chunk + 1, end);
    weigh_chunk(work, tiles, ahead);
    merge_chunk(work, rows);
    soften_chunk(work, next, (chunk + 1) * kAttentionChunk, factor, rows);
    tiles = next;
    next = ahead;
  }
  weigh_chunk(work, tiles, next);
  merge_chunk(work, rows);
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
  attend_chunks(work, task, begin, end, &rows);
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
