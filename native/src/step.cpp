#include "step.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
#include <utility>

#include "checked_product.h"
#include "numeric.h"
#include "pass.h"

namespace trioengine {
namespace {

// Of the cache: what the first dozens of requests take, and supplied within a second on slow hosts.
constexpr std::size_t kTouchedEarly = std::size_t{128} << 20;
constexpr int kMostTokens = 1 << 20;  // of a step or a block, so that nothing leaves an int

StepLimits limits_of(const Model& model, const RunnerOptions& options) {
  return {options.max_tokens, model.shape().positions, model.shape().vocab, options.num_blocks,
          options.block_size};
}

const RunnerOptions& checked(const RunnerOptions& options) {
  if (options.threads < 1 || options.threads > 1024) {
    throw std::invalid_argument("threads must be in [1, 1024]");
  }
  if (options.max_tokens < 1 || options.max_tokens > kMostTokens) {
    throw std::invalid_argument("max_tokens must be in [1, " + std::to_string(kMostTokens) + "]");
  }
  if (options.num_blocks < 1) throw std::invalid_argument("num_blocks must be at least 1");
  if (options.block_size < 1 || options.block_size > kMostTokens ||
      options.block_size % kLanes != 0) {
    throw std::invalid_argument("block_size must be a multiple of 16, got " +
                                std::to_string(options.block_size));
  }
  if (options.num_blocks > INT_MAX / (options.block_size / kLanes)) {
    throw std::invalid_argument("too many blocks of this size");  // tiles are counted in an int
  }
  return options;
}

const std::shared_ptr<const Model>& checked(const std::shared_ptr<const Model>& model) {
  model->check_complete();
  return model;
}

}  // namespace

std::size_t Runner::block_bytes(const ModelShape& shape, int block_size) {
  return checked_product({static_cast<std::size_t>(shape.layers),
                          static_cast<std::size_t>(shape.kv_heads), 2,
                          static_cast<std::size_t>(block_size),
                          static_cast<std::size_t>(shape.padded_head_dim), sizeof(uint16_t)});
}

Runner::Runner(std::shared_ptr<const Model> model, const KernelTable& kernels,
               const RunnerOptions& options)
    : model_(checked(model)),
      kernels_(kernels),
      options_(checked(options)),
      checker_(limits_of(*model_, options_)),
      pool_(options_.threads),
      space_(*model_, kernels, options_.threads, options_.max_tokens),
      block_bytes_(block_bytes(model_->shape(), options_.block_size)),
      cache_(checked_product({block_bytes_, static_cast<std::size_t>(options_.num_blocks)})),
      toucher_(cache_, kTouchedEarly),
      phases_(static_cast<std::size_t>(
          Pass::kPhasesPerLayer * model_->shape().layers + Pass::kPhasesToNarrow +
          Pass::kPhasesPerHead * ceil_div(options_.max_tokens, kHeadRows))),
      samplers_(static_cast<std::size_t>(options_.threads), RowSampler(kernels)),
      spans_(kernels.attention_rows, model_->shape().heads / model_->shape().kv_heads,
             model_->shape().kv_heads, options_.block_size, options_.threads),
      wanted_(options_.max_tokens),
      wanted_spans_(spans_) {}

// Finds each token's tile of the cache, and cuts the sequences into attention units. Returns how
// many blocks from the first on, where handing out begins, are in use at least.
int Runner::prepare(const StepView& step) {
  const int tiles_per_block = options_.block_size / kLanes;
  int highest = 0;
  runs_.clear();
  for (int s = 0; s < step.num_seqs; ++s) {
    const int first = step.query_start[s], last = step.query_start[s + 1];
    const int32_t* table = step.block_tables + s * step.table_stride;
    runs_.push_back({table, first, last - first, step.positions[first]});
    for (int t = first; t < last; ++t) {
      const int position = step.positions[t];
      const int within = position % options_.block_size / kLanes;
      const std::size_t at = static_cast<std::size_t>(t);
      const int block = table[position / options_.block_size];
      highest = std::max(highest, block);
      space_.tiles[at] = block * tiles_per_block + within;
      const int filled = std::min(kLanes, last - t);
      space_.fresh[at] = static_cast<uint8_t>(position % kLanes == 0 ? filled : 0);
    }
  }
  spans_.cut(runs_);
  wanted_.find(step);
  if (wanted_.count() < step.num_tokens) wanted_spans_.cut(wanted_.runs());
  for (Phase& phase : phases_) phase.reset();
  return highest + 1;
}

void Runner::execute(const StepView& step, const StepOutput& output) {
  checker_.check(step);
  const int blocks = prepare(step);
  const RowsView all{step.num_tokens, space_.hidden.as<float>(), step.positions, &spans_};
  const RowsView wanted{wanted_.count(), space_.wanted.as<float>(), wanted_.positions(),
                        &wanted_spans_};
  const bool narrow = wanted.count < all.count;
  const StepState state{*model_,
                        kernels_,
                        space_,
                        phases_,
                        samplers_,
                        all,
                        narrow ? wanted : all,
                        narrow ? &wanted_ : nullptr,
                        cache_.as<uint16_t>(),
                        options_.block_size / kLanes,
                        pool_.size()};
  toucher_.begin_step(static_cast<std::size_t>(blocks) * block_bytes_);
  pool_.run([&](int thread) {
    const unsigned before = kernels_.enter();
    Pass(state, step, thread).run(output);
    kernels_.leave(before);
  });
  toucher_.end_step();
}

}  // namespace trioengine
