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

#include <utility>

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
  }
  for (int t = count; t < kChunkTiles; ++t) parts[t] = vset(0.0f);
  for (int t = 0; t < kChunkTiles; t += 2) {
    vstore_plains(weights + t * kLanes, parts[t], parts[t + 1]);
  }
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

// The tiles of one chunk, as far as the stretch goes.
TRIO_INLINE TileList tiles_of(const AttentionTask& task, const Stretch& stretch, int chunk) {
  const int first = chunk * kChunkTiles, all = (stretch.end + kLanes - 1) / kLanes;
  int block = first / task.tiles_per_block, within = first % task.tiles_per_block;
  TileList list;
  for (; list.count < kChunkTiles && first + list.count < all; ++list.count) {
    const int tile = stretch.block_table[block] * task.tiles_per_block + within;
    list.at[list.count] = kv_tile(task.kv, tile, stretch.kv_head);
    if (++within == task.tiles_per_block) {
      within = 0;
      ++block;
    }
  }
  return list;
}

// The tiles after those of `chunk`: of the next chunk, or of what comes next.
TRIO_INLINE TileList tiles_after(const AttentionTask& task, const Stretch& stretch,
                                 const Stretch& next, int chunk) {
  if ((chunk + 1) * kAttentionChunk < stretch.end) return tiles_of(task, stretch, chunk + 1);
  if (next.block_table == nullptr) return {};
  return tiles_of(task, next, next.begin / kAttentionChunk);
}

// Turns the scores of a chunk into weights, a few rows at a time. They become the other weights:
// the products of the chunk before still need theirs.
class Softening {
 public:
  Softening(const ChunkWork& work, float factor, RowStates* rows)
      : work_(work), factor_(factor), rows_(rows), row_(work.rows) {}

  void start(const TileList& tiles, int chunk) {
    row_ = 0;
    tiles_ = tiles.count;
    first_ = chunk * kAttentionChunk;
  }

  inline __attribute__((always_inline)) void steps(int count) {
    const int stop = row_ + count < work_.rows ? row_ + count : work_.rows;
    for (; row_ < stop; ++row_) soften(row_);
  }

  void finish() { steps(work_.rows); }

 private:
  inline __attribute__((always_inline)) void soften(int row) const {
    const AttentionScratch& s = work_.scratch;
    const int low = rows_->begin[row] - first_, high = rows_->end[row] - first_;
    const auto soften =
        low <= 0 && high >= kAttentionChunk ? soften_row<false> : soften_row<true>;
    soften(s.scores + row * kAttentionChunk, s.other_weights + row * kAttentionChunk, low, high,
           tiles_, factor_, rows_->chunk_maximum + row, rows_->chunk_total + row);
  }

  const ChunkWork& work_;
  const float factor_;
  RowStates* const rows_;
  int row_, tiles_ = 0, first_ = 0;
};

// Adds the product of a chunk to the sums, a few rows at a time.
class Merging {
 public:
  Merging(const ChunkWork& work, const RowStates& rows)
      : work_(work), rows_(rows), row_(work.rows) {}

  void start() { row_ = 0; }

  inline __attribute__((always_inline)) void steps(int count) {
    const int dim = work_.head_dim;
    const int stop = row_ + count < work_.rows ? row_ + count : work_.rows;
    for (; row_ < stop; ++row_) {
      merge_row(rows_.keep[row_], rows_.take[row_], work_.scratch.product + row_ * dim,
                work_.scratch.sum + row_ * dim, dim);
    }
  }

  void finish() { steps(work_.rows); }

 private:
  const ChunkWork& work_;
  const RowStates& rows_;
  int row_;
};

// All chunks of a stretch. Matrix products and what is done row by row go on at the same time, each
// on its own units: the scores of the next chunk are computed while the product of the last one is
// added to the sums, and become weights while the values of this one are weighed. What is stored for
// a matrix product thus also has time to arrive in the cache, from which alone tiles are loaded.
void attend_chunks(ChunkWork work, const AttentionTask& task, const Stretch& stretch,
                   const Stretch& after, RowStates* rows) {
  int chunk = stretch.begin / kAttentionChunk;
  TileList tiles = tiles_of(task, stretch, chunk);
  Softening softening(work, task.scale * kLog2E, rows);
  Merging merging(work, *rows);
  score_chunk(work, tiles, &merging);
  softening.start(tiles, chunk);
  softening.finish();
  for (bool last = false; !last; ++chunk) {
    const TileList next = tiles_after(task, stretch, after, chunk);
    last = (chunk + 1) * kAttentionChunk >= stretch.end;
    std::swap(work.scratch.weights, work.scratch.other_weights);
    if (!last) score_chunk(work, next, &merging);
    merging.finish();
    merge_states(rows, work.rows);
    if (!last) softening.start(next, chunk + 1);
    weigh_chunk(work, tiles, last ? next : tiles_after(task, stretch, after, chunk + 1), &softening);
    softening.finish();
    merging.start();
    tiles = next;
  }
  merging.finish();
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
    store_acts(task.output, static_cast<size_t>(token), column + static_cast<size_t>(d),
               vmul(vload(sum + d), inverse), vmul(vload(sum + d + kLanes), inverse));
  }
}

// Also of rows that are not there: no stray NaN.
TRIO_INLINE void clear_states(RowStates* rows) {
  for (int r = 0; r < kAttentionRows; ++r) {
    rows->maximum[r] = rows->chunk_maximum[r] = kNever;
    rows->total[r] = rows->chunk_total[r] = 0.0f;
  }
}

// Rows [first_row, first_row + num_rows) of a member: rows are tokens times the heads of the group.
void attend_rows(const AttentionTask& task, const AttentionMember& member, int first_row,
                 int num_rows, const Stretch& after) {
  const ChunkWork work{carve_scratch(task.scratch, task.kv.head_dim), num_rows, task.kv.head_dim,
                       member.tokens == 1};
  RowStates rows;
  clear_states(&rows);
  Stretch stretch{member.block_table, task.kv_head, 0x7fffffff, 0};
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    const int stop = member.position + token + 1;
    const int start = task.window > 0 && stop > task.window ? stop - task.window : 0;
    rows.begin[r] = start;
    rows.end[r] = stop;
    stretch.begin = start < stretch.begin ? start : stretch.begin;
    stretch.end = stop > stretch.end ? stop : stretch.end;
    load_query(task, work.scratch, r, member.token + token, head);
  }
  begin_rows(num_rows);
  attend_chunks(work, task, stretch, after, &rows);
  for (int r = 0; r < num_rows; ++r) {
    const int token = (first_row + r) / task.group, head = (first_row + r) % task.group;
    store_result(task, work.scratch.sum + r * work.head_dim, rows.total[r], member.token + token,
                 head);
  }
}

// What a member attends to by itself, after the shared chunks.
TRIO_INLINE Stretch own_stretch(const AttentionTask& task, int member) {
  if (member >= task.num_members) return task.next;
  const AttentionMember& m = task.members[member];
  return {m.block_table, task.kv_head, task.shared, m.position + 1};
}

// Goes on with one member, whose rows begin with row `first` of the shared work.
void finish_member(const ChunkWork& shared, const RowStates& states, const AttentionTask& task,
                   int member, int first) {
  const AttentionMember& m = task.members[member];
  const int dim = shared.head_dim;
  ChunkWork work = shared;
  work.rows = task.group;
  work.stream = true;
  work.scratch.queries += first * dim;
  work.scratch.sum += first * dim;
  RowStates rows;
  clear_states(&rows);
  for (int r = 0; r < task.group; ++r) {
    rows.maximum[r] = states.maximum[first + r];
    rows.total[r] = states.total[first + r];
    rows.begin[r] = 0;
    rows.end[r] = m.position + 1;
  }
  begin_rows(task.group);
  attend_chunks(work, task, own_stretch(task, member), own_stretch(task, member + 1), &rows);
  for (int r = 0; r < task.group; ++r) {
    store_result(task, work.scratch.sum + r * dim, rows.total[r], m.token, r);
  }
}

// Several members: the chunks that they share meet all rows at once, then each goes on by itself.
void attend_together(const AttentionTask& task) {
  const ChunkWork work{carve_scratch(task.scratch, task.kv.head_dim), task.num_members * task.group,
                       task.kv.head_dim, true};
  RowStates rows;
  clear_states(&rows);
  for (int r = 0; r < work.rows; ++r) {
    rows.begin[r] = 0;
    rows.end[r] = task.shared;
    load_query(task, work.scratch, r, task.members[r / task.group].token, r % task.group);
  }
  begin_rows(work.rows);
  attend_chunks(work, task, {task.members[0].block_table, task.kv_head, 0, task.shared},
                own_stretch(task, 0), &rows);
  for (int m = 0; m < task.num_members; ++m) finish_member(work, rows, task, m, m * task.group);
}

// Whether every member sees the whole of what they share. (With a window the others must not: they
// would meet chunks that they would not meet alone.)
TRIO_INLINE bool sees_shared(const AttentionTask& task) {
  if (task.shared == 0) return false;
  for (int m = 0; m < task.num_members; ++m) {
    if (task.window > 0 && task.members[m].position >= task.window) return false;
  }
  return true;
}

void attention(const AttentionTask& task) {
  if (sees_shared(task)) return attend_together(task);
  for (int m = 0; m < task.num_members; ++m) {
    const int rows = task.members[m].tokens * task.group;
    for (int r = 0; r < rows; r += kRowsAtOnce) {
      attend_rows(task, task.members[m], r, rows - r < kRowsAtOnce ? rows - r : kRowsAtOnce,
                  task.next);
    }
  }
}

}  // namespace
}  // namespace trioengine
