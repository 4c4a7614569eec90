#include "row_edits.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace trioengine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The first of the largest; a NaN loses.
void find_peak(const LogitsRow& row, int unit) {
  const float* logits = row.unit(unit);
  const int first = unit * kUnitColumns, count = row.unit_count(unit);
  Peak peak{kMinusInfinity, first};
  for (int i = 0; i < count; ++i) {
    if (logits[i] > peak.value) peak = {logits[i], first + i};
  }
  row.peaks[unit] = peak;
}

// After the logit of one token has changed. Written so that a NaN makes it look again.
void mend(const LogitsRow& row, int32_t id) {
  const Peak& peak = row.peaks[id / kUnitColumns];
  row.sums[id / kUnitColumns] = kStale;
  const float value = row.at(id);
  const bool stands = row.at(peak.index) == peak.value;
  const bool first = value < peak.value || (value == peak.value && id >= peak.index);
  if (!(stands && first)) find_peak(row, id / kUnitColumns);
}

void forbid(const LogitsRow& row, const std::vector<int32_t>& token_ids) {
  for (const int32_t id : token_ids) row.at(id) = kMinusInfinity;
  for (const int32_t id : token_ids) mend(row, id);
}

void forbid_others(const LogitsRow& row) {
  for (int unit = 0; unit < row.units; ++unit) {
    float* logits = row.unit(unit);
    const int count = row.unit_count(unit);
    uint64_t bits = unit_bits(row, unit);
    if (bits == ~uint64_t{0}) continue;
    for (int i = 0; i < count; ++i, bits >>= 1) {
      logits[i] = (bits & 1) != 0 ? logits[i] : kMinusInfinity;
    }
  }
}

void add_bias(const LogitsRow& row, const BiasView& bias, int first, int last) {
  for (int i = first; i < last; ++i) row.at(bias.token_ids[i]) += bias.values[i];
  for (int i = first; i < last; ++i) mend(row, bias.token_ids[i]);
}

void penalise(const LogitsRow& line, const PenaltiesView& penalties, int row) {
  const float repetition = penalties.repetition[row], presence = penalties.presence[row],
              frequency = penalties.frequency[row];
  const int first = penalties.starts[row], last = penalties.starts[row + 1];
  for (int i = first; i < last; ++i) {
    float& logit = line.at(penalties.token_ids[i]);
    const int count = penalties.counts[i];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    logit -= frequency * static_cast<float>(count);
    if (count > 0) logit -= presence;
  }
  for (int i = first; i < last; ++i) mend(line, penalties.token_ids[i]);
}

bool has_entries(const int32_t* starts, int row) {
  return starts != nullptr && starts[row + 1] > starts[row];
}

}  // namespace

bool EditsView::sparse(int row) const {
  if (has_entries(bias.starts, row) || has_entries(penalties.starts, row)) return true;
  return std::any_of(masks.begin(), masks.end(),
                     [row](const TokenMask& mask) { return mask.row == row; });
}

AllowedTokens EditsView::allowed(int row) const {
  if (allow.row_masks == nullptr || allow.row_masks[row] < 0) return {};
  return {allow.words + allow.row_masks[row] * allow.stride, allow.width};
}

void EditsView::note(int row, const LogitsRow& line, std::vector<OldLogit>* old) const {
  old->clear();
  const auto add = [&](int32_t id) { old->push_back({id, line.at(id)}); };
  for (const TokenMask& mask : masks) {
    if (mask.row == row) std::for_each(mask.token_ids.begin(), mask.token_ids.end(), add);
  }
  if (has_entries(bias.starts, row)) {
    std::for_each(bias.token_ids + bias.starts[row], bias.token_ids + bias.starts[row + 1], add);
  }
  if (has_entries(penalties.starts, row)) {
    std::for_each(penalties.token_ids + penalties.starts[row],
                  penalties.token_ids + penalties.starts[row + 1], add);
  }
}

void restore(const LogitsRow& line, const std::vector<OldLogit>& old) {
  for (const OldLogit& each : old) line.at(each.id) = each.logit;
}

void EditsView::apply(int row, const LogitsRow& line) const {
  if (line.allowed.words != nullptr) forbid_others(line);
  for (const TokenMask& mask : masks) {
    if (mask.row == row) forbid(line, mask.token_ids);
  }
  if (has_entries(bias.starts, row)) {
    add_bias(line, bias, bias.starts[row], bias.starts[row + 1]);
  }
  if (has_entries(penalties.starts, row)) penalise(line, penalties, row);
}

}  // namespace trioengine
