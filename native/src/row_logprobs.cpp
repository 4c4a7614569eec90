#include "row_logprobs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>

namespace trioengine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

}  // namespace

void LogprobsReader::read(const LogitsRow& row, int count, int32_t* top_ids, float* top) {
  peaks_.resize(static_cast<std::size_t>(row.units));
  for (int u = 0; u < row.units; ++u) peaks_[static_cast<std::size_t>(u)] = row.peaks[u].value;
  normaliser_ = normaliser(row);
  collect(row, bound(row, count));
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
  Peak peak = row.peaks[0];
  for (int u = 1; u < row.units; ++u) {
    if (row.peaks[u].value > peak.value) peak = row.peaks[u];
  }
  values_.resize(static_cast<std::size_t>(row.units));
  kernels_.exp_sums(row.logits, row.vocab_size, peak.value, 1.0f, values_.data());
  double total = 0.0;
  for (const float sum : values_) total += sum;
  return static_cast<double>(peak.value) + std::log(total);
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
    if (!(peaks_[static_cast<std::size_t>(unit)] > logit)) continue;
    const float* logits = row.logits + unit * kUnitColumns;
    const int count = unit_count(row, unit);
    for (int i = 0; i < count; ++i) likelier += logits[i] > logit ? 1 : 0;
  }
  return likelier + 1;
}

// A logit that at least `count` tokens reach, where there are so many: the count-th of the peaks.
float LogprobsReader::bound(const LogitsRow& row, int count) {
  if (count < 1) return std::numeric_limits<float>::infinity();
  if (count > row.units) return kMinusInfinity;
  values_.resize(static_cast<std::size_t>(row.units));
  for (int u = 0; u < row.units; ++u) values_[static_cast<std::size_t>(u)] = row.peaks[u].value;
  const auto kth = values_.begin() + (count - 1);
  std::nth_element(values_.begin(), kth, values_.end(), std::greater<float>());
  return *kth;
}

void LogprobsReader::collect(const LogitsRow& row, float threshold) {
  candidates_.clear();
  if (threshold == std::numeric_limits<float>::infinity()) return;
  for (int unit = 0; unit < row.units; ++unit) {
    if (row.peaks[unit].value < threshold) continue;
    const int first = unit * kUnitColumns, last = first + unit_count(row, unit);
    for (int id = first; id < last; ++id) {
      if (row.logits[id] >= threshold) candidates_.push_back({row.logits[id], id});
    }
  }
}

}  // namespace trioengine
