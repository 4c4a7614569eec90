// One step as it comes from Python, and the check that makes it safe to compute.
#pragma once

#include <cstdint>
#include <vector>

#include "huge_buffer.h"
#include "row_edits.h"

namespace trioengine {

// Views of the arrays of a StepBatch; see engine_proc/runner.py for what they mean.
struct StepView {
  int num_tokens = 0;
  int num_seqs = 0;
  int num_rows = 0;
  int max_blocks = 0;
  const int32_t* token_ids = nullptr;
  const int32_t* positions = nullptr;
  const int32_t* query_start = nullptr;
  const int32_t* seq_lens = nullptr;
  const int32_t* block_tables = nullptr;
  std::int64_t table_stride = 0;  // elements from one sequence's blocks to the next one's
  const int32_t* logits_rows = nullptr;
  const float* temperature = nullptr;
  const float* top_p = nullptr;
  const int32_t* top_k = nullptr;
  const float* min_p = nullptr;
  const uint64_t* seeds = nullptr;
  const int64_t* sample_positions = nullptr;
  EditsView edits;
  const int32_t* logprobs_k = nullptr;  // null: no row of this step wants any
  const int32_t* targets = nullptr;     // null: every row samples
};

// Throws std::invalid_argument where a parameter of a row, or a mask, makes no sense.
void check_sampling(const StepView& step, int vocab_size);

struct StepLimits {
  int max_tokens = 0;
  int max_positions = 0;
  int vocab_size = 0;
  int num_blocks = 0;
  int block_size = 0;
};

// Checks steps. Keeps one stamp per block, to see that no two sequences write the same block.
class StepChecker {
 public:
  explicit StepChecker(const StepLimits& limits);
  // Throws std::invalid_argument naming the array and the offending value.
  void check(const StepView& step);

 private:
  void check_sequence(const StepView& step, int sequence);
  void check_blocks(const StepView& step, int sequence);

  StepLimits limits_;
  HugeBuffer stamps_;  // uint32 [num_blocks]
  uint32_t stamp_ = 0;
};

}  // namespace trioengine
