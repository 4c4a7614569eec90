#include "row_edits.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace trioengine {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// The first of the largest; a NaN loses.
void find_peak(const LogitsRow& row, int unit) {
  const int first = unit * kUnitColumns, last = first + unit_count(row, unit);
  Peak peak{kMinusInfinity, first};
  for (int id = first; id < last; ++id) {
    if (row.logits[id] > peak.value) peak = {row.logits[id], id};
  }
  row.peaks[unit] = peak;
}

// After the logit of one token has changed. Written so that a NaN makes it look again.
void mend_peak(const LogitsRow& row, int32_t id) {
  const Peak& peak = row.peaks[id / kUnitColumns];
  const float value = row.logits[id];
  const bool stands = row.logits[peak.index] == peak.value;
  const bool first = value < peak.value || (value == peak.value && id >= peak.index);
  if (!(stands && first)) find_peak(row, id / kUnitColumns);
}

void forbid(const LogitsRow& row, const std::vector<int32_t>& token_ids) {
  for (const int32_t id : token_ids) row.logits[id] = kMinusInfinity;
  for (const int32_t id : token_ids) mend_peak(row, id);
}

uint32_t word_at(const uint32_t* words, int width, int index) {
  return index < width ? words[index] : 0;
}

// A unit is two words. Most of a grammar's are all or nothing.
uint64_t unit_bits(const uint32_t* words, int width, int unit) {
  return word_at(words, width, 2 * unit) |
         static_cast<uint64_t>(word_at(words, width, 2 * unit + 1)) << 32;
}

void allow_only(const LogitsRow& row, const uint32_t* words, int width) {
  for (int unit = 0; unit < row.units; ++unit) {
    const int first = unit * kUnitColumns, count = unit_count(row, unit);
    const uint64_t bits = unit_bits(words, width, unit);
    if (bits == ~uint64_t{0}) continue;
    float* logits = row.logits + first;
    if (bits == 0) {
      std::fill(logits, logits + count, kMinusInfinity);
      row.peaks[unit] = {kMinusInfinity, first};
      continue;
    }
    for (int i = 0; i < count; ++i) {
      if ((bits >> i & 1) == 0) logits[i] = kMinusInfinity;
    }
    find_peak(row, unit);
  }
}

void add_bias(const LogitsRow& row, const BiasView& bias, int first, int last) {
  for (int i = first; i < last; ++i) row.logits[bias.token_ids[i]] += bias.values[i];
  for (int i = first; i < last; ++i) mend_peak(row, bias.token_ids[i]);
}

void penalise(const LogitsRow& line, const PenaltiesView& penalties, int row) {
  const float repetition = penalties.repetition[row], presence = penalties.presence[row],
              frequency = penalties.frequency[row];
  const int first = penalties.starts[row], last = penalties.starts[row + 1];
  for (int i = first; i < last; ++i) {
    float& logit = line.logits[penalties.token_ids[i]];
    const int count = penalties.counts[i];
    logit = logit > 0.0f ? logit / repetition : logit * repetition;
    logit -= frequency * static_cast<float>(count);
    if (count > 0) logit -= presence;
  }
  for (int i = first; i < last; ++i) mend_peak(line, penalties.token_ids[i]);
}

bool has_entries(const int32_t* starts, int row) {
  return starts != nullptr && starts[row + 1] > starts[row];
}

}  // namespace

bool EditsView::touch(int row) const { return dense(row) || sparse(row); }

bool EditsView::sparse(int row) const {
  if (has_entries(bias.starts, row) || has_entries(penalties.starts, row)) return true;
  return std::any_of(masks.begin(), masks.end(),
                     [row](const TokenMask& mask) { return mask.row == row; });
}

const uint32_t* EditsView::allowed(int row) const {
  return allow.words + static_cast<std::size_t>(allow.row_masks[row]) *
                           static_cast<std::size_t>(allow.width);
}

// A unit is read only where its peak beats what has been found and is not allowed itself.
Peak EditsView::allowed_peak(int row, const LogitsRow& line) const {
  const uint32_t* words = allowed(row);
  Peak best{kMinusInfinity, 0};
  for (int unit = 0; unit < line.units; ++unit) {
    const Peak& peak = line.peaks[unit];
    if (!(peak.value > best.value)) continue;
    const int first = unit * kUnitColumns, last = first + unit_count(line, unit);
    const uint64_t bits = unit_bits(words, allow.width, unit);
    if ((bits >> (peak.index - first) & 1) != 0) {
      best = peak;
      continue;
    }
    for (int id = first; bits != 0 && id < last; ++id) {
      if ((bits >> (id - first) & 1) != 0 && line.logits[id] > best.value) {
        best = {line.logits[id], id};
      }
    }
  }
  return best;
}

void EditsView::note(int row, const LogitsRow& line, std::vector<OldLogit>* old) const {
  old->clear();
  const auto add = [&](int32_t id) { old->push_back({id, line.logits[id]}); };
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
  for (const OldLogit& each : old) line.logits[each.id] = each.logit;
}

void EditsView::apply(int row, const LogitsRow& line) const {
  if (dense(row)) {
    allow_only(line, allowed(row), allow.width);
  }
  for (const TokenMask& mask : masks) {
    if (mask.row == row) forbid(line, mask.token_ids);
  }
  if (has_entries(bias.starts, row)) {
    add_bias(line, bias, bias.starts[row], bias.starts[row + 1]);
  }
  if (has_entries(penalties.starts, row)) penalise(line, penalties, row);
}

}  // namespace trioengine
