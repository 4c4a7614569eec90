// How a matrix product is cut into the units that threads claim.
#pragma once

#include "kernels.h"

namespace trioengine {

// Blocks of rows times runs of panels; units are numbered run by run within a block.
struct GemmPlan {
  const Linear* weight;
  const Acts* input;
  int rows;
  int row_block;
  int row_blocks;
  int unit_panels;
  int panel_units;

  int total() const { return row_blocks * panel_units; }
  // `scratch` is for gemm_scratch_floats(unit_panels, …) floats.
  GemmUnit unit(int index, float* scratch) const;
  // The weights of a unit, nothing where there is no such unit.
  Ahead weights(int index) const;
};

// `unit_panels` panels a unit, and blocks of rows that keep `threads` threads busy.
GemmPlan plan_gemm(const KernelTable& kernels, const Linear& weight, const Acts& input, int rows,
                   int unit_panels, int threads);

// Panels of a unit where nothing else decides: wide ones where there are many rows to share each
// block of inputs, narrow ones where there are few units, since the threads must come out even.
int balanced_panels(const Linear& weight, int rows, int threads);

}  // namespace trioengine
