#include "spans.h"

#include <algorithm>

#include "numeric.h"

namespace trioengine {

Spans::Spans(int tile_rows, int group, int kv_heads, int block_size, int threads)
    : tokens_at_once_(std::max(1, tile_rows / group)),
      most_members_(tile_rows / group),
      wanted_units_(ceil_div(2 * threads, kv_heads)),
      block_size_(block_size) {}

void Spans::cut(const std::vector<AttentionMember>& runs) {
  spans_.clear();
  members_.clear();
  decodes_.clear();
  for (const AttentionMember& run : runs) cut_run(run);
  cut_decodes();
  // The longest first: at the end of the phase only short ones are left to balance the threads.
  std::stable_sort(spans_.begin(), spans_.end(),
                   [this](const Span& a, const Span& b) { return cost(a) > cost(b); });
}

void Spans::cut_run(const AttentionMember& run) {
  if (run.tokens == 1) {
    decodes_.push_back(run);
    return;
  }
  for (int t = 0; t < run.tokens; t += tokens_at_once_) {
    spans_.push_back({static_cast<int>(members_.size()), 1, 0});
    members_.push_back({run.block_table, run.token + t, std::min(tokens_at_once_, run.tokens - t),
                        run.position + t});
  }
}

// Leading tokens in common blocks, whole chunks only, that both see.
int Spans::shared_tokens(const AttentionMember& a, const AttentionMember& b) const {
  const int most = std::min(a.position, b.position);
  const int blocks = most / block_size_;
  int same = 0;
  while (same < blocks && a.block_table[same] == b.block_table[same]) ++same;
  return same * block_size_ / kAttentionChunk * kAttentionChunk;
}

// Brings decodes with the same first blocks next to each other, and makes a family of each run
// that shares as much throughout. One that shares more with the next than with the run before it
// begins a new family.
void Spans::cut_decodes() {
  std::stable_sort(decodes_.begin(), decodes_.end(),
                   [this](const AttentionMember& a, const AttentionMember& b) {
                     const int blocks = std::min(a.position, b.position) / block_size_ + 1;
                     return std::lexicographical_compare(a.block_table, a.block_table + blocks,
                                                         b.block_table, b.block_table + blocks);
                   });
  const std::size_t count = decodes_.size();
  shared_.assign(count + 1, 0);  // nothing is shared with what is not there
  for (std::size_t i = 1; i < count && most_members_ > 1; ++i) {
    shared_[i] = shared_tokens(decodes_[i - 1], decodes_[i]);
  }
  for (std::size_t i = 0; i < count;) {
    const int shared = shared_[i + 1];
    std::size_t end = i + 1;
    while (end < count && shared > 0 && shared_[end] == shared && shared_[end + 1] <= shared) ++end;
    add_family(i, end - i, end - i > 1 ? shared : 0);
    i = end;
  }
}

// As few units as the rows of a tile allow, but enough for all threads.
void Spans::add_family(std::size_t first, std::size_t count, int shared) {
  const int all = static_cast<int>(count);
  const int parts = count == 1 ? 1
                               : std::max(ceil_div(all, most_members_),
                                          std::min(all / 2, wanted_units_));
  int at = 0;
  for (int part = 0; part < parts; ++part) {
    const int end = all * (part + 1) / parts;
    spans_.push_back({static_cast<int>(members_.size()), end - at, end - at > 1 ? shared : 0});
    for (; at < end; ++at) members_.push_back(decodes_[first + static_cast<std::size_t>(at)]);
  }
}

std::int64_t Spans::cost(const Span& span) const {
  std::int64_t sum = span.shared;
  for (int i = 0; i < span.members; ++i) {
    const AttentionMember& member = members(span)[i];
    sum += static_cast<std::int64_t>(member.tokens) * (member.position + 1) - span.shared;
  }
  return sum;
}

}  // namespace trioengine
