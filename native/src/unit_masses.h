// What the 64 columns of each unit of a row weigh together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "row_edits.h"

namespace trioengine {

// The likeliest token that is allowed; a tie goes to the lower id.
Peak peak_of(const LogitsRow& row);

constexpr int32_t kNoToken = -1;  // where no logit is above -inf

constexpr std::size_t kFoundAhead = 4;  // units that are looked at lie far apart in memory

inline void fetch_unit(const LogitsRow& row, int unit) {
  constexpr int kLineFloats = 16;
  const float* logits = row.unit(unit);
  const int count = row.unit_count(unit);
  for (int i = 0; i < count; i += kLineFloats) __builtin_prefetch(logits + i);
}

// One thread's.
class UnitMasses {
 public:
  explicit UnitMasses(const KernelTable& kernels) : kernels_(kernels) {}

  // Takes in a row whose sums are of this factor, and sums what is stale of it; returns the sum of
  // exp((logit - shift) * factor) over all that is allowed.
  double read(const LogitsRow& row, float shift, float factor);
  // A unit's part of the sum of the row that was read last.
  float& mass(int unit) { return masses_[static_cast<std::size_t>(unit)]; }

  // A logit that at least `count` tokens reach: the count-th of the peaks of the units. -inf where
  // there are not so many units.
  float reached_by(const LogitsRow& row, int count);
  // Calls take(logit, id) for each token that is allowed and reaches a threshold, in order of ids.
  template <class Take>
  void each_reaching(const LogitsRow& row, float threshold, const Take& take);

 private:
  float among_few(const LogitsRow& row, std::size_t count);
  void find_reaching(const LogitsRow& row, float threshold);

  const KernelTable& kernels_;
  std::vector<float> masses_, top_weights_, peaks_;
  std::vector<int32_t> found_;  // units
};

template <class Take>
void UnitMasses::each_reaching(const LogitsRow& row, float threshold, const Take& take) {
  find_reaching(row, threshold);
  for (std::size_t i = 0; i < found_.size(); ++i) {
    if (i + kFoundAhead < found_.size()) fetch_unit(row, found_[i + kFoundAhead]);
    const int unit = found_[i];
    const float* logits = row.unit(unit);
    uint64_t bits = kernels_.reaching(logits, unit_bits(row, unit), threshold);
    for (; bits != 0; bits &= bits - 1) {
      const int column = __builtin_ctzll(bits);
      take(logits[column], unit * kUnitColumns + column);
    }
  }
}

}  // namespace trioengine
