// A draw from the likeliest tokens of a row that reach a mass together.
//
// Theory of operation
// -------------------
// A nucleus may be tens of thousands of tokens, which are not worth sorting, nor even searching for
// the last one of them. So a token is drawn from the whole row, and stays if what ranks before it
// has not reached the mass yet: that is what being in the nucleus means. Otherwise nothing behind
// it is in there either, and the next draw is from what ranks before it. The first draw stays as
// often as the nucleus has of the row's mass.
// Source: rejection sampling with a pivot, as in FlashInfer (Ye et al. 2025, arXiv:2501.01005).
//
// What ranks before a token is summed unit by unit. A unit none of whose tokens does is never
// looked at, and none is any more once the others cannot reach the mass whatever it holds.
#pragma once

#include <cstdint>
#include <vector>

#include "unit_masses.h"

namespace trioengine {

// One thread's.
class Nucleus {
 public:
  explicit Nucleus(const KernelTable& kernels) : kernels_(kernels), units_(kernels) {}

  // Draws from the least tokens that have `share` of the mass of a row together, all where it is 1.
  // A token weighs exp((logit - peak) * factor), of which the row's sums are.
  int32_t draw(const LogitsRow& row, const Peak& peak, float factor, float share, double uniform);

 private:
  int32_t draw_before(const LogitsRow& row, const RankedToken& end, float shift, float factor,
                      double target);
  double mass_before(const LogitsRow& row, const RankedToken& token, float shift, float factor,
                     double enough);
  double keep_reaching(const LogitsRow& row, const RankedToken& token);

  const KernelTable& kernels_;
  UnitMasses units_;
  std::vector<int32_t> left_;    // units that have a token before the one in question
  std::vector<float> weights_;   // of one unit, or masses of a few
};

}  // namespace trioengine
