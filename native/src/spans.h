// How the attention of a step is cut into units.
//
// Theory of operation
// -------------------
// A unit is a few tokens of one sequence, or the decodes of several sequences that begin with the
// same blocks: those blocks then come from memory once for all of them. Rows meet the chunks of
// their sequence in the same order either way (isa/attention.h), so the bits are the same.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace trioengine {

// One unit for each KV head: some members, next to each other in Spans::members.
struct Span {
  int first;    // member
  int members;
  int shared;   // leading tokens that all members have in the same blocks; 0 for one member
};

class Spans {
 public:
  // Query rows of one tile, query heads per KV head, KV heads, tokens per block, threads.
  Spans(int tile_rows, int group, int kv_heads, int block_size, int threads);

  // Cuts runs of consecutive tokens, whose keys and values the cache holds by then.
  void cut(const std::vector<AttentionMember>& runs);

  const std::vector<Span>& all() const { return spans_; }
  const AttentionMember* members(const Span& span) const {
    return members_.data() + span.first;
  }

 private:
  void cut_run(const AttentionMember& run);
  void cut_decodes();
  void add_family(std::size_t first, std::size_t count, int shared);
  int shared_tokens(const AttentionMember& a, const AttentionMember& b) const;
  std::int64_t cost(const Span& span) const;

  int tokens_at_once_;
  int most_members_;
  int wanted_units_;
  int block_size_;
  std::vector<Span> spans_;
  std::vector<AttentionMember> members_;
  std::vector<AttentionMember> decodes_;
  std::vector<int> shared_;  // of each decode with the one before it
};

}  // namespace trioengine
