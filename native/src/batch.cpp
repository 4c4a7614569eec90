#include "batch.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

namespace trioengine {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

std::string at(const char* array, std::int64_t index) {
  return std::string(array) + "[" + std::to_string(index) + "]";
}

void check_range(const char* array, const int32_t* values, int count, int low, int high) {
  for (int i = 0; i < count; ++i) {
    if (values[i] < low || values[i] >= high) {
      refuse(at(array, i) + " is " + std::to_string(values[i]) + ", not in [" +
             std::to_string(low) + ", " + std::to_string(high) + ")");
    }
  }
}

void check_query_start(const StepView& step) {
  if (step.query_start[0] != 0) refuse("query_start must begin with 0");
  for (int s = 0; s < step.num_seqs; ++s) {
    if (step.query_start[s + 1] <= step.query_start[s]) {
      refuse(at("query_start", s + 1) + " does not rise: every sequence needs a token");
    }
    if (step.query_start[s + 1] > step.num_tokens) {
      refuse(at("query_start", s + 1) + " exceeds the number of tokens");
    }
  }
  if (step.query_start[step.num_seqs] != step.num_tokens) {
    refuse("query_start must end with the number of tokens");
  }
}

// Written so that a NaN fails.
void check_unit(const char* array, const float* values, int count, bool zero_allowed) {
  for (int i = 0; i < count; ++i) {
    const bool above = zero_allowed ? values[i] >= 0.0f : values[i] > 0.0f;
    if (!(above && values[i] <= 1.0f)) {
      refuse(at(array, i) + " is " + std::to_string(values[i]) + ", not a share");
    }
  }
}

void check_starts(const char* array, const int32_t* starts, int rows, int entries) {
  if (starts[0] != 0) refuse(std::string(array) + " must begin with 0");
  for (int i = 0; i < rows; ++i) {
    if (starts[i + 1] < starts[i]) refuse(at(array, i + 1) + " falls");
  }
  if (starts[rows] != entries) refuse(std::string(array) + " must end with the number of entries");
}

// Written so that a NaN fails.
void check_finite(const char* array, const float* values, int count, bool positive) {
  for (int i = 0; i < count; ++i) {
    if (!(std::isfinite(values[i]) && (values[i] > 0.0f || !positive))) {
      refuse(at(array, i) + " is " + std::to_string(values[i]));
    }
  }
}

void check_edits(const StepView& step, int vocab_size) {
  const AllowView& allow = step.edits.allow;
  if (allow.row_masks != nullptr) {
    check_range("allow.row_masks", allow.row_masks, step.num_rows, -1, allow.masks);
    if (allow.width != (vocab_size + 31) / 32) refuse("allow.words do not fit the vocabulary");
  }
  const BiasView& bias = step.edits.bias;
  if (bias.starts != nullptr) {
    check_starts("bias.starts", bias.starts, step.num_rows, bias.entries);
    check_range("bias.token_ids", bias.token_ids, bias.entries, 0, vocab_size);
    check_finite("bias.values", bias.values, bias.entries, false);
  }
  const PenaltiesView& penalties = step.edits.penalties;
  if (penalties.starts != nullptr) {
    check_starts("penalties.starts", penalties.starts, step.num_rows, penalties.entries);
    check_range("penalties.token_ids", penalties.token_ids, penalties.entries, 0, vocab_size);
    check_range("penalties.counts", penalties.counts, penalties.entries, 0, INT32_MAX);
    check_finite("penalties.presence", penalties.presence, step.num_rows, false);
    check_finite("penalties.frequency", penalties.frequency, step.num_rows, false);
    check_finite("penalties.repetition", penalties.repetition, step.num_rows, true);
  }
}

}  // namespace

void check_sampling(const StepView& step, int vocab_size) {
  for (int i = 0; i < step.num_rows; ++i) {
    if (!(step.temperature[i] >= 0.0f && std::isfinite(step.temperature[i]))) {
      refuse(at("temperature", i) + " must be finite and at least 0");
    }
    if (step.top_k[i] < 0) refuse(at("top_k", i) + " is negative");
  }
  check_unit("top_p", step.top_p, step.num_rows, false);
  check_unit("min_p", step.min_p, step.num_rows, true);
  check_edits(step, vocab_size);
  if (step.targets != nullptr) {
    check_range("targets", step.targets, step.num_rows, -1, vocab_size);
  }
  if (step.logprobs_k != nullptr) {
    check_range("logprobs_k", step.logprobs_k, step.num_rows, -1, vocab_size + 1);
  }
  for (const TokenMask& mask : step.edits.masks) {
    if (mask.row < 0 || mask.row >= step.num_rows) {
      refuse("masked_token_ids: row " + std::to_string(mask.row) + " is not in [0, " +
             std::to_string(step.num_rows) + ")");
    }
    check_range("masked_token_ids", mask.token_ids.data(),
                static_cast<int>(mask.token_ids.size()), 0, vocab_size);
  }
}

StepChecker::StepChecker(const StepLimits& limits)
    : limits_(limits), stamps_(static_cast<std::size_t>(limits.num_blocks) * sizeof(uint32_t)) {}

void StepChecker::check(const StepView& step) {
  if (step.num_tokens < 1) refuse("a step needs at least one token");
  if (step.num_tokens > limits_.max_tokens) {
    refuse("a step of " + std::to_string(step.num_tokens) + " tokens exceeds the limit of " +
           std::to_string(limits_.max_tokens));
  }
  if (step.num_rows > limits_.max_tokens) {
    refuse(std::to_string(step.num_rows) + " logits rows exceed the limit of " +
           std::to_string(limits_.max_tokens));
  }
  check_query_start(step);
  check_range("token_ids", step.token_ids, step.num_tokens, 0, limits_.vocab_size);
  check_range("logits_rows", step.logits_rows, step.num_rows, 0, step.num_tokens);
  check_sampling(step, limits_.vocab_size);
  if (++stamp_ == 0) {  // wrapped: forget the stamps of four billion steps ago
    std::memset(stamps_.as<void>(), 0, stamps_.size());
    stamp_ = 1;
  }
  for (int s = 0; s < step.num_seqs; ++s) {
    check_sequence(step, s);
    check_blocks(step, s);
  }
}

void StepChecker::check_sequence(const StepView& step, int sequence) {
  const int first = step.query_start[sequence], last = step.query_start[sequence + 1] - 1;
  const std::int64_t start = step.positions[first];
  if (start < 0) refuse(at("positions", first) + " is negative");
  for (int t = first; t <= last; ++t) {
    if (step.positions[t] != start + (t - first)) {
      refuse(at("positions", t) + " does not follow its predecessor");
    }
  }
  if (step.positions[last] >= limits_.max_positions) {
    refuse(at("positions", last) + " is " + std::to_string(step.positions[last]) +
           ", not below " + std::to_string(limits_.max_positions));
  }
  if (step.seq_lens[sequence] != step.positions[last] + 1) {
    refuse(at("seq_lens", sequence) + " is not the last position + 1");
  }
}

void StepChecker::check_blocks(const StepView& step, int sequence) {
  const int blocks = (step.seq_lens[sequence] + limits_.block_size - 1) / limits_.block_size;
  if (blocks > step.max_blocks) {
    refuse(at("block_tables", sequence) + " holds " + std::to_string(step.max_blocks) +
           " blocks of the " + std::to_string(blocks) + " needed");
  }
  const int32_t* table = step.block_tables + sequence * step.table_stride;
  check_range("block_tables", table, blocks, 0, limits_.num_blocks);
  const int first_written = step.positions[step.query_start[sequence]] / limits_.block_size;
  for (int b = first_written; b < blocks; ++b) {
    uint32_t& stamp = stamps_.as<uint32_t>()[table[b]];
    if (stamp == stamp_) {
      refuse("block " + std::to_string(table[b]) + " is written by two sequences, or twice");
    }
    stamp = stamp_;
  }
}

}  // namespace trioengine
