#include "step.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "checked_product.h"
#include "numeric.h"

namespace trioengine {
namespace {

constexpr int kPhasesPerLayer = 7;
constexpr int kPhasesPerHead = 3;
constexpr int kRowMultiple = 96;  // of every kernel's row tile
constexpr int kHeadGrain = 8;     // head units claimed at once: there are hundreds
constexpr int kMostTokens = 1 << 20;  // of a step or a block, so that nothing leaves an int

InputForms forms_of(const PackedPtr& weight) {
  InputForms forms;
  forms.add(weight);
  return forms;
}

InputForms forms_of(const Layer& layer) {
  InputForms forms;
  forms.add(layer.query);
  forms.add(layer.key);
  forms.add(layer.value);
  return forms;
}

// How a matrix product is cut into units: blocks of rows times runs of panels.
struct GemmPlan {
  int rows;
  int row_block;
  int row_blocks;
  int panels;
  int unit_panels;
  int panel_units;

  int total() const { return row_blocks * panel_units; }
};

GemmPlan plan_gemm(const KernelTable& kernels, const Linear& w, int rows, int unit_panels,
                   int threads) {
  // A block's activations should stay in the L2 cache while its weights stream past.
  const std::size_t row_bytes = static_cast<std::size_t>(w.inputs) * kernels.plain_bytes;
  const int fitting = static_cast<int>(kernels.row_block_bytes / row_bytes);
  GemmPlan plan;
  plan.rows = rows;
  plan.panels = w.panels;
  plan.unit_panels = unit_panels;
  plan.panel_units = ceil_div(w.panels, unit_panels);
  const int wanted = ceil_div(4 * threads, plan.panel_units);  // blocks that keep all threads busy
  const int block = std::min(fitting, ceil_div(rows, wanted));
  plan.row_block = std::max(block / kRowMultiple, 1) * kRowMultiple;
  plan.row_blocks = ceil_div(rows, plan.row_block);
  return plan;
}

GemmUnit unit_of(const GemmPlan& plan, const Linear& w, const Acts& input, int index,
                 float* scratch) {
  GemmUnit unit;
  unit.weight = &w;
  unit.input = &input;
  unit.row0 = index / plan.panel_units * plan.row_block;
  unit.rows = std::min(plan.row_block, plan.rows - unit.row0);
  unit.panel0 = index % plan.panel_units * plan.unit_panels;
  unit.panels = std::min(plan.unit_panels, plan.panels - unit.panel0);
  unit.scratch = scratch;
  return unit;
}

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
      cache_(checked_product({block_bytes(model_->shape(), options_.block_size),
                              static_cast<std::size_t>(options_.num_blocks)})),
      phases_(static_cast<std::size_t>(
          kPhasesPerLayer * model_->shape().layers +
          kPhasesPerHead * ceil_div(options_.max_tokens, kHeadRows))),
      samplers_(static_cast<std::size_t>(options_.threads), RowSampler(kernels)) {}

KvLayer Runner::kv_layer(std::size_t layer) const {
  const ModelShape& shape = model_->shape();
  const std::size_t layer_bytes = cache_.size() / static_cast<std::size_t>(shape.layers);
  KvLayer kv;
  kv.data = cache_.as<uint16_t>() + layer * (layer_bytes / sizeof(uint16_t));
  kv.kv_heads = shape.kv_heads;
  kv.head_dim = shape.padded_head_dim;
  return kv;
}

// Finds each token's tile of the cache, and cuts the sequences into attention units.
void Runner::prepare(const StepView& step) {
  const int tiles_per_block = options_.block_size / kLanes;
  const int group = model_->shape().heads / model_->shape().kv_heads;
  const int span = std::max(1, kernels_.attention_rows / group);
  spans_.clear();
  for (int s = 0; s < step.num_seqs; ++s) {
    const int first = step.query_start[s], last = step.query_start[s + 1];
    const int32_t* table = step.block_tables + s * step.table_stride;
    for (int t = first; t < last; ++t) {
      const int position = step.positions[t];
      const int within = position % options_.block_size / kLanes;
      const std::size_t at = static_cast<std::size_t>(t);
      space_.tiles[at] = table[position / options_.block_size] * tiles_per_block + within;
      const int filled = std::min(kLanes, last - t);
      space_.fresh[at] = static_cast<uint8_t>(position % kLanes == 0 ? filled : 0);
    }
    for (int t = first; t < last; t += span) spans_.push_back({s, t, std::min(span, last - t)});
  }
  // The longest first: at the end of the phase only short ones are left to balance the threads.
  std::stable_sort(spans_.begin(), spans_.end(), [&](const Span& a, const Span& b) {
    return static_cast<int64_t>(a.tokens) * (step.positions[a.token] + 1) >
           static_cast<int64_t>(b.tokens) * (step.positions[b.token] + 1);
  });
  for (Phase& phase : phases_) phase.reset();
}

// What one thread does in a step. All threads walk through the same phases.
class Runner::Pass {
 public:
  Pass(Runner& runner, const StepView& step, int thread)
      : runner_(runner),
        model_(*runner.model_),
        shape_(model_.shape()),
        kernels_(runner.kernels_),
        space_(runner.space_),
        step_(step),
        thread_(static_cast<std::size_t>(thread)),
        own_(space_.threads[thread_]),
        scratch_(own_.gemm.as<float>()),
        hidden_(space_.hidden.as<float>()) {}

  void run(const StepOutput& output) {
    for (std::size_t i = 0; i < model_.layers().size(); ++i) layer(i);
    for (int row = 0; row < step_.num_rows; row += kHeadRows) {
      head(row, std::min(kHeadRows, step_.num_rows - row), output);
    }
  }

 private:
  Phase& next_phase() { return runner_.phases_[phase_++]; }

  float* hidden_row(int row) const {
    return hidden_ + static_cast<std::size_t>(row) * static_cast<std::size_t>(width());
  }

  int width() const { return shape_.hidden_width(); }

  int grain(int rows) const { return std::max(1, rows / (8 * runner_.pool_.size())); }

  void embed_rows(int row, int rows) const {
    kernels_.embed(model_.embedding(), shape_.hidden, step_.token_ids + row, rows,
                   hidden_row(row), width());
  }

  void norm_rows(const float* weight, const Acts& out, int row, int rows) const {
    kernels_.norm(hidden_row(row), width(), shape_.hidden, weight, shape_.eps, rows, out, row);
  }

  // Norms the residual, after looking the tokens up if this is the first norm of the step. A few
  // rows are normed by every thread for itself, which is cheaper than waiting for one another;
  // `embed` then still needs a phase, since the residual is shared.
  Acts norm(const float* weight, InputForms forms, bool embed) {
    const int rows = step_.num_tokens;
    Phase& phase = next_phase();
    const bool own = rows <= kOwnNormRows;
    const Acts out = (own ? own_.normed : space_.normed).view(forms);
    if (embed || !own) {
      phase.run(rows, grain(rows), [&](int row) {
        if (embed) embed_rows(row, 1);
        if (!own) norm_rows(weight, out, row, 1);
      });
    }
    if (own) norm_rows(weight, out, 0, rows);
    return out;
  }

  template <class Unit>
  void gemm(const Linear& w, const Acts& input, int rows, int unit_panels, int grain,
            const Unit& unit) {
    const GemmPlan plan = plan_gemm(kernels_, w, rows, unit_panels, runner_.pool_.size());
    next_phase().run(plan.total(), grain, [&](int index) {
      unit(unit_of(plan, w, input, index, scratch_));
    });
  }

  void layer(std::size_t index) {
    const Layer& layer = model_.layers()[index];
    const KvLayer kv = runner_.kv_layer(index);
    const Acts first = norm(layer.input_norm.data(), forms_of(layer), index == 0);
    heads(layer, kv, first);
    const Acts attended = space_.attended.view(forms_of(layer.output));
    attend(layer, kv, attended);
    add_to_hidden(layer.output->view(), attended);
    const Acts second = norm(layer.post_norm.data(), forms_of(layer.gate_up), false);
    const Acts gated = space_.gated.view(forms_of(layer.down));
    gemm(layer.gate_up->view(), second, step_.num_tokens, 4, 1,
         [&](const GemmUnit& unit) { kernels_.gemm_swiglu(unit, gated); });
    add_to_hidden(layer.down->view(), gated);
  }

  // Wide units where there are many rows to share each block of inputs, narrow ones where there
  // are few units: the threads must come out even.
  void add_to_hidden(const Linear& w, const Acts& input) {
    const int row_blocks = ceil_div(step_.num_tokens, kRowMultiple);
    const int few = 8 * runner_.pool_.size();
    int panels = 8;
    while (panels > 2 && w.panels / panels * row_blocks < few) panels /= 2;
    gemm(w, input, step_.num_tokens, panels, 1,
         [&](const GemmUnit& unit) { kernels_.gemm_add(unit, hidden_, width()); });
  }

  // Queries, keys and values: a unit is one head of a block of rows.
  void heads(const Layer& layer, const KvLayer& kv, const Acts& input) {
    const int panels = shape_.padded_head_dim / kLanes, threads = runner_.pool_.size();
    const int kv_heads = shape_.kv_heads, all = shape_.heads + 2 * kv_heads;
    GemmPlan plan = plan_gemm(kernels_, layer.query->view(), step_.num_tokens, panels, threads);
    plan.panel_units = 1;  // the head is chosen here
    HeadTask task = head_task(layer, kv);
    next_phase().run(plan.row_blocks * all, 1, [&](int index) {
      int head = index % all;
      const Linear* w = &layer.query->view();
      task.kind = HeadKind::kQuery;
      task.norm = layer.query_norm.empty() ? nullptr : layer.query_norm.data();
      if (head >= shape_.heads) {
        head -= shape_.heads;
        task.kind = head < kv_heads ? HeadKind::kKey : HeadKind::kValue;
        w = head < kv_heads ? &layer.key->view() : &layer.value->view();
        task.norm = layer.key_norm.empty() ? nullptr : layer.key_norm.data();
        head %= kv_heads;
      }
      task.head = head;
      GemmUnit unit = unit_of(plan, *w, input, index / all, scratch_);
      unit.panel0 = head * panels;
      unit.panels = panels;
      kernels_.gemm_head(unit, task);
      if (task.kind == HeadKind::kValue) clear_unused(kv, head, unit.row0, unit.rows);
    });
  }

  HeadTask head_task(const Layer& layer, const KvLayer& kv) const {
    HeadTask task{};
    task.real_dim = shape_.head_dim;
    task.eps = shape_.eps;
    task.cos = layer.rotate ? model_.cos() : nullptr;
    task.sin = layer.rotate ? model_.sin() : nullptr;
    task.positions = step_.positions;
    task.tiles = space_.tiles.data();
    task.queries = space_.queries.as<void>();
    task.query_width = shape_.query_width();
    task.kv = kv;
    return task;
  }

  // A tile that is begun and not filled in this step may hold what its former owner left there.
  // Attention gives those tokens weight 0, but 0 times a NaN is a NaN: no request may do that to
  // another.
  void clear_unused(const KvLayer& kv, int head, int row0, int rows) const {
    const int dim = kv.head_dim;
    for (int row = row0; row < row0 + rows; ++row) {
      const int filled = space_.fresh[static_cast<std::size_t>(row)];
      if (filled == 0 || filled == kLanes) continue;
      uint16_t* values =
          kv_tile(kv, space_.tiles[static_cast<std::size_t>(row)], head) + kv_half(kv);
      uint16_t* pair = values + (filled / 2) * 2 * dim;
      if (filled % 2 != 0) {
        for (int d = 0; d < dim; ++d) pair[2 * d + 1] = 0;
        pair += 2 * dim;
      }
      std::memset(pair, 0, static_cast<std::size_t>(values + kLanes * dim - pair) * sizeof *pair);
    }
  }

  void attend(const Layer& layer, const KvLayer& kv, const Acts& output) {
    const int kv_heads = shape_.kv_heads;
    AttentionTask task{};
    task.query_width = shape_.query_width();
    task.output = output;
    task.group = shape_.heads / kv_heads;
    task.window = layer.window;
    task.scale = shape_.attention_scale;
    task.tiles_per_block = runner_.options_.block_size / kLanes;
    task.kv = kv;
    task.scratch = own_.attention.as<void>();
    const int units = static_cast<int>(runner_.spans_.size()) * kv_heads;
    // Several units at once where there are many: then most know what comes next.
    const int grain = std::clamp(units / (8 * runner_.pool_.size()), 1, 4 * kv_heads);
    next_phase().run(units, grain, [&](int index) {
      const Span& span = runner_.spans_[static_cast<std::size_t>(index / kv_heads)];
      task.queries = space_.queries.as<uint8_t>() + static_cast<std::size_t>(span.token) *
                                                        static_cast<std::size_t>(task.query_width) *
                                                        kernels_.plain_bytes;
      task.out_row = span.token;
      task.tokens = span.tokens;
      task.position = step_.positions[span.token];
      task.kv_head = index % kv_heads;
      task.block_table = table_of(span);
      look_ahead(&task, index + 1, units);
      kernels_.attention(task);
    });
  }

  const int32_t* table_of(const Span& span) const {
    return step_.block_tables + span.sequence * step_.table_stride;
  }

  void look_ahead(AttentionTask* task, int index, int units) const {
    task->next_block_table = nullptr;
    if (index >= units) return;
    const Span& span = runner_.spans_[static_cast<std::size_t>(index / shape_.kv_heads)];
    const int position = step_.positions[span.token];
    task->next_block_table = table_of(span);
    task->next_kv_head = index % shape_.kv_heads;
    task->next_first = task->window > 0 ? std::max(0, position + 1 - task->window) : 0;
    task->next_end = position + span.tokens;
  }

  // Logits rows [first, first + rows): final norm, head, tokens.
  void head(int first, int rows, const StepOutput& output) {
    const Linear& w = model_.head();
    const Acts input = space_.head_input.view(forms_of(model_.head_weight()));
    next_phase().run(rows, 1, [&](int row) {
      kernels_.norm(hidden_row(step_.logits_rows[first + row]), width(), shape_.hidden,
                    model_.final_norm(), shape_.eps, 1, input, row);
    });
    float* full[kHeadRows];
    for (int row = 0; row < rows; ++row) full[row] = full_logits(first + row, row, output.logits);
    LogitsTask task{space_.peaks.data(), ceil_div(w.panels, kHeadUnitPanels), full};
    gemm(w, input, rows, kHeadUnitPanels, kHeadGrain,
         [&](const GemmUnit& unit) { kernels_.gemm_logits(unit, task); });
    next_phase().run(rows, 1, [&](int row) {
      const LogitsRow line{full[row], space_.peaks.data() + static_cast<std::size_t>(row) *
                                                                static_cast<std::size_t>(task.units),
                           shape_.vocab, task.units};
      output.tokens[first + row] = pick(first + row, line, output);
    });
  }

  // Where the logits of a row go; null where its peaks are enough.
  float* full_logits(int row, int slot, float* logits) const {
    if (logits != nullptr) {
      return logits + static_cast<std::size_t>(row) * static_cast<std::size_t>(shape_.vocab);
    }
    if (step_.temperature[row] == 0.0f && !wants_logprobs(row) && !step_.edits.touch(row)) {
      return nullptr;
    }
    return space_.logits.as<float>() + static_cast<std::size_t>(slot) *
                                           static_cast<std::size_t>(model_.head().panels) * kLanes;
  }

  bool wants_logprobs(int row) const {
    return step_.logprobs_k != nullptr && step_.logprobs_k[row] >= 0;
  }

  // The token of a row, and its logprobs where they are wanted: those of the model's own logits,
  // which therefore outlive what sampling does to them.
  int32_t pick(int row, const LogitsRow& line, const StepOutput& output) const {
    RowSampler& own = runner_.samplers_[thread_];
    const bool told = wants_logprobs(row);
    const std::size_t top = static_cast<std::size_t>(row) *
                            static_cast<std::size_t>(output.logprobs.width);
    if (told) {
      own.logprobs.read(line, step_.logprobs_k[row], output.logprobs.top_ids + top,
                        output.logprobs.top + top);
    }
    const int32_t target = step_.targets != nullptr ? step_.targets[row] : -1;
    const int32_t token =
        target >= 0 ? target : sample_edited(row, line, told || output.logits != nullptr);
    if (told && token >= 0) {
      output.logprobs.chosen[row] = own.logprobs.logprob(line.logits[token]);
      output.logprobs.ranks[row] = own.logprobs.rank(line, line.logits[token]);
    }
    return token;
  }

  // Leaves the logits as they were if they are to be kept, the peaks in any case not.
  int32_t sample_edited(int row, LogitsRow line, bool keep) const {
    RowSampler& own = runner_.samplers_[thread_];
    if (!step_.edits.touch(row)) return sample(row, line);
    const bool copied = keep && step_.edits.dense(row);
    if (copied) {
      own.edited.assign(line.logits, line.logits + shape_.vocab);
      line.logits = own.edited.data();
    } else if (keep) {
      step_.edits.note(row, line, &own.old);
    }
    step_.edits.apply(row, line);
    const int32_t token = sample(row, line);
    if (keep && !copied) restore(line, own.old);
    return token;
  }

  int32_t sample(int row, const LogitsRow& line) const {
    if (step_.temperature[row] == 0.0f) return Sampler::likeliest(line);
    const SamplingParams params{step_.temperature[row], step_.top_p[row], step_.top_k[row],
                                step_.min_p[row],
                                uniform_of(step_.seeds[row], step_.sample_positions[row])};
    return runner_.samplers_[thread_].sampler.sample(line, params);
  }

  Runner& runner_;
  const Model& model_;
  const ModelShape& shape_;
  const KernelTable& kernels_;
  Workspace& space_;
  const StepView& step_;
  const std::size_t thread_;
  const ThreadSpace& own_;
  float* const scratch_;
  float* const hidden_;
  std::size_t phase_ = 0;
};

void Runner::execute(const StepView& step, const StepOutput& output) {
  checker_.check(step);
  prepare(step);
  pool_.run([&](int thread) {
    const unsigned before = kernels_.enter();
    Pass(*this, step, thread).run(output);
    kernels_.leave(before);
  });
}

}  // namespace trioengine
