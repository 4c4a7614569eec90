// The likeliest tokens of a row that reach a mass together, and a draw from them.
//
// Theory of operation
// -------------------
// A nucleus may be tens of thousands of tokens, which are not worth sorting to find two of them:
// the last one, and the one that is drawn. Both are "the first in the order of likelihood with
// which so much is reached", so both are searched for by their weight: each probe is one fast pass,
// which sums what weighs more. The few tokens that are left between two probes are
// sorted. Units of 64 tokens none of which weighs enough are never looked at.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "unit_masses.h"

namespace trioengine {

// One thread's.
class Nucleus {
 public:
  explicit Nucleus(const KernelTable& kernels) : kernels_(kernels) {}

  // Inverse CDF in the order of likelihood, equals by id, over the least tokens that reach `mass`
  // together. A token weighs exp((logit - peak) * factor); `units` has read the row like that.
  int32_t draw(const LogitsRow& row, const UnitMasses& units, const Peak& peak, float factor,
               double mass, double uniform);

 private:
  struct Probe {
    float bound;
    double above;  // mass of what weighs more than the bound
  };
  struct Spot {
    float weight;
    int32_t id;
    double reached;  // mass up to this token, itself included
  };
  struct Goal {
    double mass;
    bool passed;  // must be passed, not only reached
    bool met_by(double reached) const { return passed ? reached > mass : reached >= mass; }
  };

  void take_until(const LogitsRow& row, const UnitMasses& units, const Peak& peak, float factor,
                  const Goal& goal);
  double take(const LogitsRow& row, const UnitMasses& units, const Peak& peak, float factor,
              float low, float high);
  int taken() const { return static_cast<int>(units_.size()) * kUnitColumns; }
  Probe probe(float bound);
  std::pair<Probe, Probe> narrow(const Goal& goal);
  Spot locate(const Goal& goal, const Spot& last);
  void find_between(float low, float high);

  const KernelTable& kernels_;
  std::vector<float> weights_;   // of the units taken so far, 0 for what is not allowed
  std::vector<int32_t> units_;   // those
  std::vector<Probe> probes_;
  std::vector<int32_t> places_;
  std::vector<Spot> spots_;
};

}  // namespace trioengine
