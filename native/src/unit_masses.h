// What the 64 columns of each unit of a row weigh together.
#pragma once

#include <cstddef>
#include <vector>

#include "row_edits.h"

namespace trioengine {

// The likeliest token that is allowed; a tie goes to the lower id.
Peak peak_of(const LogitsRow& row);

// One thread's.
class UnitMasses {
 public:
  explicit UnitMasses(const KernelTable& kernels) : kernels_(kernels) {}

  // Takes in a row whose sums are of this factor, and sums what is stale of it; returns the sum of
  // exp((logit - shift) * factor) over all that is allowed.
  double read(const LogitsRow& row, float shift, float factor);
  // Of the row that was read last: the unit's part of it, and its likeliest token's.
  float mass(int unit) const { return masses_[static_cast<std::size_t>(unit)]; }
  float top_weight(int unit) const { return top_weights_[static_cast<std::size_t>(unit)]; }

  // A logit that at least `count` tokens reach: the count-th of the peaks of the units. -inf where
  // there are not so many units.
  float reached_by(const LogitsRow& row, int count);

 private:
  float among_few(const LogitsRow& row, std::size_t count);

  const KernelTable& kernels_;
  std::vector<float> masses_, top_weights_, peaks_;
};

}  // namespace trioengine
