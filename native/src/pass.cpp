#include "pass.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "numeric.h"

namespace trioengine {
namespace {

constexpr int kSwigluPanels = 4;  // gate, up, gate, up: one group of 32 activations

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

}  // namespace

Pass::Pass(const StepState& state, const StepView& step, int thread)
    : state_(state),
      model_(state.model),
      shape_(model_.shape()),
      kernels_(state.kernels),
      space_(state.space),
      step_(step),
      thread_(thread),
      own_(space_.threads[static_cast<std::size_t>(thread)]),
      scratch_(own_.gemm.as<float>()),
      rows_(state.all) {}

// Between layers a thread holds nothing that others wait for, so it lets go first whoever is in line
// for its core, the server above all, which has just been sent tokens. Taken away in the middle of a
// unit, it would keep all others waiting at the end of the phase.
void Pass::run(const StepOutput& output) {
  for (std::size_t i = 0; i < model_.layers().size(); ++i) {
    std::this_thread::yield();
    layer(i);
  }
  for (int row = 0; row < step_.num_rows; row += kHeadRows) {
    head(row, std::min(kHeadRows, step_.num_rows - row), output);
  }
}

float* Pass::hidden_row(int row) const {
  return rows_.hidden + static_cast<std::size_t>(row) * static_cast<std::size_t>(width());
}

KvLayer Pass::kv_layer(std::size_t layer) const {
  const std::size_t tile = static_cast<std::size_t>(shape_.kv_heads) * 2 * kLanes *
                           static_cast<std::size_t>(shape_.padded_head_dim);
  return {state_.cache + layer * tile, static_cast<std::size_t>(shape_.layers) * tile,
          shape_.padded_head_dim};
}

// The last layer goes on, once its keys and values are written, with the wanted rows alone.
void Pass::layer(std::size_t index) {
  const Layer& layer = model_.layers()[index];
  const KvLayer kv = kv_layer(index);
  const bool narrow = state_.wanted != nullptr && index + 1 == model_.layers().size();
  const int all = shape_.heads + 2 * shape_.kv_heads;
  const Acts input = norm(layer.input_norm.data(), forms_of(layer),
                          index == 0 ? Origin::kTokens : Origin::kResidual);
  heads(layer, kv, input, narrow ? shape_.heads : 0, all);
  if (narrow) {
    rows_ = state_.last;
    if (rows_.count == 0) return;
    const Acts wanted =
        norm(layer.input_norm.data(), forms_of(layer.query), Origin::kAllRows);
    heads(layer, kv, wanted, 0, shape_.heads);
  }
  attention_and_mlp(layer, kv);
}

// What a layer does with its queries.
void Pass::attention_and_mlp(const Layer& layer, const KvLayer& kv) {
  const Acts attended = space_.attended.view(forms_of(layer.output));
  attend(layer, kv, attended);
  add_to_hidden(layer.output->view(), attended);
  const Acts normed =
      norm(layer.post_norm.data(), forms_of(layer.gate_up), Origin::kResidual);
  const Acts gated = space_.gated.view(forms_of(layer.down));
  gemm(plan_gemm(kernels_, layer.gate_up->view(), normed, rows_.count, kSwigluPanels,
                 state_.threads),
       1, [&](const GemmUnit& unit) { kernels_.gemm_swiglu(unit, gated); });
  add_to_hidden(layer.down->view(), gated);
}

// Norms the residual, after fetching its rows from elsewhere where a part of the step begins. A few
// rows are normed by every thread for itself, which is cheaper than waiting for one another; what is
// fetched still needs a phase, since the residual is shared.
Acts Pass::norm(const float* weight, InputForms forms, Origin origin) {
  const int rows = rows_.count;
  Phase& phase = next_phase();
  const bool own = rows <= kOwnNormRows;
  const Acts out = (own ? own_.normed : space_.normed).view(forms);
  if (origin != Origin::kResidual || !own) {
    phase.run_ranges(thread_, state_.threads, rows, [&](int row) {
      fetch_row(origin, row);
      if (!own) norm_rows(weight, out, row, 1);
    });
  }
  if (own) norm_rows(weight, out, 0, rows);
  return out;
}

void Pass::fetch_row(Origin origin, int row) const {
  if (origin == Origin::kTokens) {
    kernels_.embed(model_.embedding(), shape_.hidden, step_.token_ids + row, 1, hidden_row(row),
                   width());
  } else if (origin == Origin::kAllRows) {
    const float* from = state_.all.hidden + static_cast<std::size_t>(state_.wanted->tokens()[row]) *
                                                static_cast<std::size_t>(width());
    std::copy_n(from, width(), hidden_row(row));
  }
}

void Pass::norm_rows(const float* weight, const Acts& out, int row, int rows) const {
  kernels_.norm(hidden_row(row), width(), shape_.hidden, weight, shape_.eps, rows, out, row);
}

void Pass::add_to_hidden(const Linear& w, const Acts& input) {
  const int panels = balanced_panels(w, rows_.count, state_.threads);
  gemm(plan_gemm(kernels_, w, input, rows_.count, panels, state_.threads), 1,
       [&](const GemmUnit& unit) { kernels_.gemm_add(unit, rows_.hidden, width()); });
}

// Some of the queries, keys and values, in this order: a unit is one head of a block of rows.
void Pass::heads(const Layer& layer, const KvLayer& kv, const Acts& input, int begin, int end) {
  const int panels = shape_.padded_head_dim / kLanes;
  const int kv_heads = shape_.kv_heads, count = end - begin;
  const auto plan_of = [&](const PackedPtr& weight) {
    return plan_gemm(kernels_, weight->view(), input, rows_.count, panels, state_.threads);
  };
  const GemmPlan plans[] = {plan_of(layer.query), plan_of(layer.key), plan_of(layer.value)};
  // All three have the inputs and so the blocks of rows of the queries.
  const int row_blocks = plans[0].row_blocks;
  const auto kind_of = [&](int* head) {
    if (*head < shape_.heads) return HeadKind::kQuery;
    *head -= shape_.heads;
    if (*head < kv_heads) return HeadKind::kKey;
    *head -= kv_heads;
    return HeadKind::kValue;
  };
  HeadTask task = head_task(layer, kv);
  claim(apart(plans[0]), row_blocks * count, 1, [&](int index, int after) {
    task.head = begin + index % count;
    task.kind = kind_of(&task.head);
    const std::vector<float>& norm =
        task.kind == HeadKind::kQuery ? layer.query_norm : layer.key_norm;
    task.norm = norm.empty() ? nullptr : norm.data();
    const GemmPlan& plan = plans[static_cast<int>(task.kind)];
    GemmUnit unit = plan.unit(task.head, scratch_);
    unit.row0 = index / count * plans[0].row_block;
    unit.rows = std::min(plans[0].row_block, rows_.count - unit.row0);
    int next = begin + after % count;
    const HeadKind next_kind = kind_of(&next);
    if (after < row_blocks * count) {
      unit.ahead = plans[static_cast<int>(next_kind)].weights(next);
    }
    kernels_.gemm_head(unit, task);
    if (task.kind == HeadKind::kValue) clear_unused(kv, task.head, unit.row0, unit.rows);
  });
}

HeadTask Pass::head_task(const Layer& layer, const KvLayer& kv) const {
  HeadTask task{};
  task.real_dim = shape_.head_dim;
  task.eps = shape_.eps;
  task.cos = layer.rotate ? model_.cos() : nullptr;
  task.sin = layer.rotate ? model_.sin() : nullptr;
  task.positions = rows_.positions;
  task.tiles = space_.tiles.data();
  task.queries = space_.queries.as<void>();
  task.query_width = shape_.query_width();
  task.kv = kv;
  return task;
}

// A tile that is begun and not filled in this step may hold what its former owner left there.
// Attention gives those tokens weight 0, but 0 times a NaN is a NaN: no request may do that to
// another.
void Pass::clear_unused(const KvLayer& kv, int head, int row0, int rows) const {
  const int dim = kv.head_dim;
  for (int row = row0; row < row0 + rows; ++row) {
    const int filled = space_.fresh[static_cast<std::size_t>(row)];
    if (filled == 0 || filled == kLanes) continue;
    uint16_t* values = kv_tile(kv, space_.tiles[static_cast<std::size_t>(row)], head) + kv_half(kv);
    uint16_t* pair = values + (filled / 2) * 2 * dim;
    if (filled % 2 != 0) {
      for (int d = 0; d < dim; ++d) pair[2 * d + 1] = 0;
      pair += 2 * dim;
    }
    std::memset(pair, 0, static_cast<std::size_t>(values + kLanes * dim - pair) * sizeof *pair);
  }
}

void Pass::attend(const Layer& layer, const KvLayer& kv, const Acts& output) {
  const int kv_heads = shape_.kv_heads;
  AttentionTask task{};
  task.queries = space_.queries.as<void>();
  task.query_width = shape_.query_width();
  task.output = output;
  task.group = shape_.heads / kv_heads;
  task.window = layer.window;
  task.scale = shape_.attention_scale;
  task.tiles_per_block = state_.tiles_per_block;
  task.kv = kv;
  task.scratch = own_.attention.as<void>();
  const int units = static_cast<int>(rows_.spans->all().size()) * kv_heads;
  // Several units at once where there are many: then most know what comes next.
  const int grain = std::clamp(units / (8 * state_.threads), 1, 4 * kv_heads);
  next_phase().run(units, grain, [&](int index) {
    const Span& span = rows_.spans->all()[static_cast<std::size_t>(index / kv_heads)];
    task.members = rows_.spans->members(span);
    task.num_members = span.members;
    task.shared = span.shared;
    task.kv_head = index % kv_heads;
    task.next = stretch_of(index + 1, units, layer.window);
    kernels_.attention(task);
  });
}

// What a unit attends to first.
Stretch Pass::stretch_of(int unit, int units, int window) const {
  if (unit >= units) return {};
  const Span& span = rows_.spans->all()[static_cast<std::size_t>(unit / shape_.kv_heads)];
  const AttentionMember& member = *rows_.spans->members(span);
  const int first = window > 0 ? std::max(0, member.position + 1 - window) : 0;
  return {member.block_table, unit % shape_.kv_heads, first, member.position + member.tokens};
}

}  // namespace trioengine
