// The table itself; the last thing that an instruction set's translation unit includes.
#pragma once

#include "attention.h"
#include "epilogues.h"
#include "logits.h"

namespace trioengine {
namespace {

#ifdef TRIO_AMX
constexpr int kBlockRows = 512, kRowMultiple = 32;
#else
constexpr int kBlockRows = 1 << 20, kRowMultiple = 96;  // bytes alone decide; 4, 6 and 12 rows fit
unsigned enter() { return 0; }
void leave(unsigned) {}
#endif

constexpr KernelTable make_table(const char* name, size_t row_block_bytes) {
  KernelTable table{};
  table.name = name;
  table.plain_bytes = sizeof(Plain);
  table.row_block_bytes = row_block_bytes;
  table.most_block_rows = kBlockRows;
  table.row_multiple = kRowMultiple;
  table.attention_rows = kRowsAtOnce;
  table.enter = enter;
  table.leave = leave;
  table.embed = embed;
  table.norm = norm;
  table.gemm_store = gemm_store;
  table.gemm_add = gemm_add;
  table.gemm_swiglu = gemm_swiglu;
  table.gemm_head = gemm_head;
  table.gemm_logits = gemm_logits;
  table.attention = attention;
  table.exp_row = exp_row;
  table.exp_unit = exp_unit;
  table.masses_before = masses_before;
  table.sum_unit = sum_unit;
  table.reaching = reaching;
  return table;
}

}  // namespace
}  // namespace trioengine
