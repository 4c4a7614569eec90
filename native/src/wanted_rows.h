// The rows of a step whose logits are asked for. Once the last layer has written its keys and
// values, nothing else of the other rows matters.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.h"
#include "kernels.h"

namespace trioengine {

class WantedRows {
 public:
  explicit WantedRows(int max_tokens) : places_(static_cast<std::size_t>(max_tokens)) {}

  // Takes a step that was checked, and has no more tokens than that.
  void find(const StepView& step);

  int count() const { return static_cast<int>(tokens_.size()); }
  // [count] tokens of the step, rising.
  const int32_t* tokens() const { return tokens_.data(); }
  // [count] of these tokens in their sequences.
  const int32_t* positions() const { return positions_.data(); }
  // Where a token that is wanted is among them.
  int place(int token) const { return places_[static_cast<std::size_t>(token)]; }
  // The tokens, as runs of one sequence without a gap; AttentionMember::token is a place.
  const std::vector<AttentionMember>& runs() const { return runs_; }

 private:
  void add_sequence(const StepView& step, int sequence);

  std::vector<int32_t> places_;  // [max_tokens]; -1 where none is wanted
  std::vector<int32_t> tokens_, positions_;
  std::vector<AttentionMember> runs_;
};

}  // namespace trioengine
