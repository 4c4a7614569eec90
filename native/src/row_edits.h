// What changes the logits of a row before a token is sampled from it: masks, bias, penalties.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace trioengine {

// A row of logits with the largest of each 64 columns beside it. No peak is ever NaN.
struct LogitsRow {
  float* logits;  // [vocab_size]; null where nothing but the likeliest token is asked for
  Peak* peaks;    // [units]
  int vocab_size;
  int units;
};

constexpr int kUnitColumns = kHeadUnitPanels * kLanes;

inline int unit_count(const LogitsRow& row, int unit) {
  const int left = row.vocab_size - unit * kUnitColumns;
  return left < kUnitColumns ? left : kUnitColumns;
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
  const uint32_t* words = nullptr;  // [masks][width]
  const int32_t* row_masks = nullptr;  // [num_rows]; null: no masks in this step
  int masks = 0;
  int width = 0;
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

  // Whether a row has any.
  bool touch(int row) const;
  // Whether those of a row may change most of it.
  bool dense(int row) const { return allow.row_masks != nullptr && allow.row_masks[row] >= 0; }
  // Whether those of a row may change a few of its logits.
  bool sparse(int row) const;
  // The peak of what the mask of a dense row allows, -inf if that is nothing. Changes nothing.
  Peak allowed_peak(int row, const LogitsRow& line) const;
  // Notes what `apply` is about to change in a row without dense ones; earlier notes are dropped.
  void note(int row, const LogitsRow& line, std::vector<OldLogit>* old) const;
  // Applies those of a row, in this order: masks, bias, penalties; and mends the peaks.
  void apply(int row, const LogitsRow& line) const;

 private:
  const uint32_t* allowed(int row) const;
};

}  // namespace trioengine
