#include "wanted_rows.h"

#include <algorithm>

namespace trioengine {

void WantedRows::find(const StepView& step) {
  tokens_.clear();
  positions_.clear();
  runs_.clear();
  std::fill_n(places_.begin(), step.num_tokens, -1);
  for (int i = 0; i < step.num_rows; ++i) {
    places_[static_cast<std::size_t>(step.logits_rows[i])] = 0;
  }
  for (int s = 0; s < step.num_seqs; ++s) add_sequence(step, s);
}

void WantedRows::add_sequence(const StepView& step, int sequence) {
  const int32_t* table = step.block_tables + sequence * step.table_stride;
  bool within = false;
  for (int t = step.query_start[sequence]; t < step.query_start[sequence + 1]; ++t) {
    int32_t& place = places_[static_cast<std::size_t>(t)];
    const bool wanted = place >= 0;
    if (wanted) {
      place = count();
      if (!within) runs_.push_back({table, place, 0, step.positions[t]});
      ++runs_.back().tokens;
      tokens_.push_back(t);
      positions_.push_back(step.positions[t]);
    }
    within = wanted;
  }
}

}  // namespace trioengine
