#include "gemm_plan.h"

#include <algorithm>

#include "numeric.h"

namespace trioengine {
namespace {

constexpr int kFewRows = 96;  // that are not worth several blocks

}  // namespace

GemmUnit GemmPlan::unit(int index, float* scratch) const {
  GemmUnit unit;
  unit.weight = weight;
  unit.input = input;
  unit.row0 = index / panel_units * row_block;
  unit.rows = std::min(row_block, rows - unit.row0);
  unit.panel0 = index % panel_units * unit_panels;
  unit.panels = std::min(unit_panels, weight->panels - unit.panel0);
  unit.scratch = scratch;
  return unit;
}

Ahead GemmPlan::weights(int index) const {
  if (index >= total()) return {};
  const int panel = index % panel_units * unit_panels;
  const int panels = std::min(unit_panels, weight->panels - panel);
  const uint8_t* at = weight->data + static_cast<std::size_t>(panel) * weight->panel_bytes;
  return {at, at + static_cast<std::size_t>(panels) * weight->panel_bytes};
}

GemmPlan plan_gemm(const KernelTable& kernels, const Linear& weight, const Acts& input, int rows,
                   int unit_panels, int threads) {
  // A block's activations should stay in the L2 cache while its weights stream past.
  const std::size_t row_bytes = static_cast<std::size_t>(weight.inputs) * kernels.plain_bytes;
  const int fitting = static_cast<int>(kernels.row_block_bytes / row_bytes);
  GemmPlan plan;
  plan.weight = &weight;
  plan.input = &input;
  plan.rows = rows;
  plan.unit_panels = unit_panels;
  plan.panel_units = ceil_div(weight.panels, unit_panels);
  const int wanted = ceil_div(4 * threads, plan.panel_units);  // blocks that keep all threads busy
  const int most = std::min({fitting, kernels.most_block_rows, ceil_div(rows, wanted)});
  const int blocks = ceil_div(rows, std::max(most, kFewRows));
  plan.row_block = round_up(ceil_div(rows, blocks), kernels.row_multiple);
  plan.row_blocks = ceil_div(rows, plan.row_block);
  return plan;
}

int balanced_panels(const Linear& weight, int rows, int threads) {
  const int row_blocks = ceil_div(rows, kFewRows);
  const int few = 8 * threads;
  int panels = 8;
  while (panels > 2 && weight.panels / panels * row_blocks < few) panels /= 2;
  return panels;
}

}  // namespace trioengine
