#include "row_logprobs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace trioengine {
void LogprobsReader::read(const LogitsRow& row, int count, int32_t* top_ids, float* top) {
  normaliser_ = normaliser(row);
  collect(row, count < 1 ? std::numeric_limits<float>::infinity()
                         : masses_.reached_by(row, count));
  const std::size_t most = static_cast<std::size_t>(count), found = candidates_.size();
  std::partial_sort(candidates_.begin(),
                    candidates_.begin() + static_cast<std::ptrdiff_t>(std::min(most, found)),
                    candidates_.end(), [](const Candidate& a, const Candidate& b) {
                      return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
                    });
  for (std::size_t i = 0; i < most; ++i) {
    top_ids[i] = i < found ? candidates_[i].id : -1;
    top[i] = i < found ? logprob(candidates_[i].logit) : kLeastLogprob;
  }
}

// log(sum(exp(logits))); not a number where the row holds one, or an infinity that is not masked.
double LogprobsReader::normaliser(const LogitsRow& row) {
  const Peak peak = peak_of(row);
  return static_cast<double>(peak.value) + std::log(masses_.read(row, peak.value, 1.0f));
}

// Written so that whatever is no number becomes the least.
float LogprobsReader::logprob(float logit) const {
  const float value = static_cast<float>(static_cast<double>(logit) - normaliser_);
  return value >= kLeastLogprob ? std::min(value, 0.0f) : kLeastLogprob;
}

// Units whose likeliest token is no likelier need no look.
int32_t LogprobsReader::rank(const LogitsRow& row, float logit) const {
  int32_t likelier = 0;
  for (int unit = 0; unit < row.units; ++unit) {
    if (!(row.peaks[unit].value > logit)) continue;
    const float* logits = row.unit(unit);
    const int count = row.unit_count(unit);
    for (int i = 0; i < count; ++i) likelier += logits[i] > logit ? 1 : 0;
  }
  return likelier + 1;
}

void LogprobsReader::collect(const LogitsRow& row, float threshold) {
  candidates_.clear();
  if (threshold == std::numeric_limits<float>::infinity()) return;
  masses_.each_reaching(row, threshold, [this](float logit, int32_t id) {
    candidates_.push_back({logit, id});
  });
}

}  // namespace trioengine
