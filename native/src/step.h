// One forward pass over a flat batch, and the tokens it samples.
//
// Theory of operation
// -------------------
// A step is a sequence of phases that all threads run together (thread_pool.h). Per layer: norm;
// queries, keys and values, rotated and written to the cache as they are computed; attention;
// output projection into the residual; norm; gate and up projection with SwiGLU; down projection
// into the residual. The last layer computes keys and values of all rows, but everything else only
// for those that ask for logits (wanted_rows.h), as does the head, which leaves the likeliest token
// of each 64 columns, so that a greedy row needs no logits in memory.
// The residual stays in float. Nothing in a row's arithmetic depends on other rows, on the number
// of threads or on how a prompt was cut into chunks: the same request gives the same bits.
#pragma once

#include <memory>
#include <vector>

#include "batch.h"
#include "page_toucher.h"
#include "pass.h"
#include "spans.h"
#include "thread_pool.h"
#include "wanted_rows.h"
#include "workspace.h"

namespace trioengine {

struct RunnerOptions {
  int threads = 1;
  int max_tokens = 0;  // of one step
  int num_blocks = 0;
  int block_size = 0;  // a multiple of kLanes
};

class Runner {
 public:
  // Throws std::invalid_argument on a bad option or incomplete model, std::bad_alloc.
  Runner(std::shared_ptr<const Model> model, const KernelTable& kernels,
         const RunnerOptions& options);

  // Throws std::invalid_argument, with nothing changed, where the step is not sound.
  void execute(const StepView& step, const StepOutput& output);

  const Model& model() const { return *model_; }
  const RunnerOptions& options() const { return options_; }
  const char* isa() const { return kernels_.name; }

  // Bytes of the KV cache per block.
  static std::size_t block_bytes(const ModelShape& shape, int block_size);

 private:
  int prepare(const StepView& step);

  std::shared_ptr<const Model> model_;
  const KernelTable& kernels_;
  RunnerOptions options_;
  StepChecker checker_;
  ThreadPool pool_;
  Workspace space_;
  std::size_t block_bytes_;
  HugeBuffer cache_;
  PageToucher toucher_;  // of the cache
  std::vector<Phase> phases_;
  std::vector<RowSampler> samplers_;  // one per thread
  std::vector<AttentionMember> runs_;  // of the step, one for each sequence
  Spans spans_;
  WantedRows wanted_;
  Spans wanted_spans_;
};

}  // namespace trioengine
