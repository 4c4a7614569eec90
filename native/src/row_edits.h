// What changes the logits of a row before a token is sampled from it: masks, bias, penalties.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "latch.h"

namespace trioengine {

constexpr float kStale = -1.0f;  // instead of the sum of a unit that has changed since

constexpr int kUnitColumns = kHeadUnitPanels * kLanes;

// A row of logits, and what is known of each 64 columns of it. No peak is ever NaN.
struct LogitsRow {
  float* logits;          // of the first unit; null where nothing but the likeliest token is wanted
  std::ptrdiff_t stride;  // from a unit's logits to the next one's
  Peak* peaks;            // [units]: of the tokens that are allowed
  float* sums;            // [units]: likewise, of exp((logit - peak) / temperature)
  AllowedTokens allowed;  // logits of others may be anything
  int vocab_size;
  int units;

  float* unit(int index) const { return logits + index * stride; }
  int unit_count(int index) const {
    const int left = vocab_size - index * kUnitColumns;
    return left < kUnitColumns ? left : kUnitColumns;
  }
  float& at(int32_t id) const { return unit(id / kUnitColumns)[id % kUnitColumns]; }
};

inline uint64_t unit_bits(const LogitsRow& row, int unit) {
  return allowed_bits(row.allowed, unit, row.vocab_size);
}

// Mask of one logits row: these token ids count as -inf.
struct TokenMask {
  int row;
  std::vector<int32_t> token_ids;
};

// Views of the optional arrays of SamplingRows; see engine_proc/runner.py for what they mean.
struct PenaltiesView {
  const float* presence = nullptr;  // [num_rows]; null: no penalties in this step
  const float* frequency = nullptr;
  const float* repetition = nullptr;
  const int32_t* starts = nullptr;  // [num_rows + 1]
  const int32_t* token_ids = nullptr;
  const int32_t* counts = nullptr;
  int entries = 0;
};

struct BiasView {
  const int32_t* starts = nullptr;  // null: no bias in this step
  const int32_t* token_ids = nullptr;
  const float* values = nullptr;
  int entries = 0;
};

struct AllowView {
  const uint32_t* words = nullptr;  // [masks][stride], of which `width` mean something
  const int32_t* row_masks = nullptr;  // [num_rows]; null: no masks in this step
  int masks = 0;
  int width = 0;
  std::ptrdiff_t stride = 0;
  Latch* filled = nullptr;  // the words may not be read before it is open; null: they are there
};

struct OldLogit {
  int32_t id;
  float logit;
};

// Puts back what was noted. Peaks stay as they are.
void restore(const LogitsRow& line, const std::vector<OldLogit>& old);

struct EditsView {
  std::vector<TokenMask> masks;
  AllowView allow;
  BiasView bias;
  PenaltiesView penalties;

  // The mask of a row: all tokens where it has none.
  AllowedTokens allowed(int row) const;
  // Whether those of a row may change a few of its logits.
  bool sparse(int row) const;
  // Notes what `apply` is about to change in a row that may have all tokens; earlier notes are
  // dropped.
  void note(int row, const LogitsRow& line, std::vector<OldLogit>* old) const;
  // Applies those of a row, in this order: masks, bias, penalties; and mends peaks and sums. What
  // is not allowed becomes -inf; peaks and sums are without it already.
  void apply(int row, const LogitsRow& line) const;
};

}  // namespace trioengine
