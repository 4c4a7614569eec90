#include "workspace.h"

#include <algorithm>

#include "numeric.h"

namespace trioengine {
namespace {

constexpr int kLineBytes = 64;

InputForms forms_of_model(const Model& model) {
  InputForms forms;
  for (const Layer& layer : model.layers()) {
    for (const PackedPtr& w :
         {layer.query, layer.key, layer.value, layer.output, layer.gate_up, layer.down}) {
      forms.add(w);
    }
  }
  forms.add(model.head_weight());
  return forms;
}

}  // namespace

ActsBuffer::ActsBuffer(int rows, int width, std::size_t plain_bytes, InputForms forms)
    : width_(width) {
  const std::size_t values =
      static_cast<std::size_t>(rows + kSpareRows) * static_cast<std::size_t>(width);
  if (forms.plain) plain_ = HugeBuffer(values * plain_bytes);
  if (forms.quant) {
    quant_ = HugeBuffer(values);
    scales_ = HugeBuffer(values / kGroup * sizeof(ActScale));
  }
}

Acts ActsBuffer::view(InputForms forms) const {
  Acts acts;
  acts.width = width_;
  if (forms.plain) acts.plain = plain_.as<void>();
  if (forms.quant) {
    acts.quant = quant_.as<int8_t>();
    acts.scales = scales_.as<ActScale>();
  }
  return acts;
}

UnitNotes::UnitNotes(int rows, int units)
    : units_(static_cast<std::size_t>(round_up(units, kLineBytes / sizeof(float)))),
      row_bytes_((units_ * 2 * (sizeof(Peak) + sizeof(float)) / kLineBytes | 1) * kLineBytes),
      notes_(row_bytes_ * static_cast<std::size_t>(rows)) {}

UnitNotes::Row UnitNotes::row(int index) const {
  uint8_t* const begin = notes_.as<uint8_t>() + row_bytes_ * static_cast<std::size_t>(index);
  Peak* const peaks = reinterpret_cast<Peak*>(begin);
  float* const sums = reinterpret_cast<float*>(peaks + 2 * units_);
  return {peaks, peaks + units_, sums, sums + units_};
}

Workspace::Workspace(const Model& model, const KernelTable& kernels, int num_threads,
                     int max_tokens) {
  const ModelShape& shape = model.shape();
  const InputForms forms = forms_of_model(model);
  const std::size_t rows = static_cast<std::size_t>(max_tokens);
  const int width = shape.hidden_width(), query_width = shape.query_width();
  hidden = HugeBuffer(rows * static_cast<std::size_t>(width) * sizeof(float));
  wanted = HugeBuffer(hidden.size());
  queries = HugeBuffer(rows * static_cast<std::size_t>(query_width) * kernels.plain_bytes);
  normed = ActsBuffer(max_tokens, width, kernels.plain_bytes, forms);
  attended = ActsBuffer(max_tokens, query_width, kernels.plain_bytes, forms);
  gated = ActsBuffer(max_tokens, shape.intermediate, kernels.plain_bytes, forms);
  head_input = ActsBuffer(kHeadRows, width, kernels.plain_bytes, forms);
  const int units = ceil_div(model.head().panels, kHeadUnitPanels);
  notes = UnitNotes(kHeadRows, units);
  logits = HugeBuffer(static_cast<std::size_t>(kHeadRows) * static_cast<std::size_t>(units) *
                      kHeadUnitPanels * kLanes * sizeof(float));
  tiles.resize(rows);
  fresh.resize(rows);
  const int widest = std::max(shape.padded_head_dim / kLanes, kMostUnitPanels);
  const int quant_inputs =
      forms.quant ? std::max({width, query_width, shape.intermediate}) : 0;
  threads.resize(static_cast<std::size_t>(num_threads));
  for (ThreadSpace& space : threads) {
    space.gemm = HugeBuffer(gemm_scratch_floats(widest, quant_inputs) * sizeof(float));
    space.attention = HugeBuffer(attention_scratch_bytes(shape.padded_head_dim));
    space.normed = ActsBuffer(kOwnNormRows, width, kernels.plain_bytes, forms);
  }
}

}  // namespace trioengine
