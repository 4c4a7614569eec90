// What is done with a row of a matrix product while it is still in the L1 cache.
#pragma once

#include "rows.h"

namespace trioengine {
namespace {

TRIO_INLINE Vf bias_at(const float* bias, int column) {
  return bias != nullptr ? vload(bias + column) : vset(0.0f);
}

constexpr int kRowsAhead = 8;  // lines of a row that will be written are asked for so much earlier

TRIO_INLINE void prefetch_row(const void* row, size_t row_bytes, int bytes) {
  const char* ahead = static_cast<const char*>(row) + kRowsAhead * row_bytes;
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 1);
}

void gemm_store(const GemmUnit& u, float* out, int out_width) {
  const int column = u.panel0 * kLanes;
  gemm(u, [&](int row, const float* values) {
    float* to = out + static_cast<size_t>(row) * static_cast<size_t>(out_width) + column;
    for (int i = 0; i < u.panels * kLanes; i += kLanes) {
      vstore(to + i, vadd(vload(values + i), bias_at(u.weight->bias, column + i)));
    }
  });
}

void gemm_add(const GemmUnit& u, float* hidden, int hidden_width) {
  const int column = u.panel0 * kLanes;
  gemm(u, [&](int row, const float* values) {
    float* to = hidden + static_cast<size_t>(row) * static_cast<size_t>(hidden_width) + column;
    prefetch_row(to, static_cast<size_t>(hidden_width) * 4, u.panels * kLanes * 4);
    for (int i = 0; i < u.panels * kLanes; i += kLanes) {
      const Vf biased = vadd(vload(values + i), bias_at(u.weight->bias, column + i));
      vstore(to + i, vadd(vload(to + i), biased));
    }
  });
}

// Panels come as gate, up, gate, up: 4 of them make one group of 32 activations.
void gemm_swiglu(const GemmUnit& u, const Acts& out) {
  const float* bias = u.weight->bias;
  gemm(u, [&](int row, const float* values) {
    for (int p = 0; p < u.panels; p += 4) {
      Vf made[2];
      for (int half = 0; half < 2; ++half) {
        const int i = (p + 2 * half) * kLanes, column = u.panel0 * kLanes + i;
        const Vf gate = vadd(vload(values + i), bias_at(bias, column));
        const Vf up = vadd(vload(values + i + kLanes), bias_at(bias, column + kLanes));
        made[half] = vmul(vsilu(gate), up);
      }
      store_acts(out, static_cast<size_t>(row), static_cast<size_t>((u.panel0 + p) / 4) * kGroup,
                 made[0], made[1]);
    }
  });
}

TRIO_INLINE void norm_head(float* head, const HeadTask& task, int dim) {
  const Vf factor = vset(inverse_rms(head, dim, task.real_dim, task.eps));
  for (int i = 0; i < dim; i += kLanes) {
    vstore(head + i, vmul(vmul(vload(head + i), factor), vload(task.norm + i)));
  }
}

// Rotates dimension i of the first half with dimension i of the second.
TRIO_INLINE void rotate_head(float* head, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    const Vf a = vload(head + i), b = vload(head + half + i);
    const Vf c = vload(cos + i), s = vload(sin + i);
    vstore(head + i, vfnma(b, s, vmul(a, c)));
    vstore(head + half + i, vfma(a, s, vmul(b, c)));
  }
}

TRIO_INLINE void write_key(const float* head, const HeadTask& task, int row, int dim) {
  uint16_t rounded[kMaxHeadDim];
  for (int i = 0; i < dim; i += kLanes) vstore_bf16(rounded + i, vload(head + i));
  uint16_t* keys = kv_tile(task.kv, task.tiles[row], task.head) +
                   2 * (task.positions[row] % kLanes);
  for (int i = 0; i < dim / 2; ++i) std::memcpy(keys + i * 2 * kLanes, rounded + 2 * i, 4);
}

TRIO_INLINE void write_value(const float* head, const HeadTask& task, int row, int dim) {
  uint16_t rounded[kMaxHeadDim];
  for (int i = 0; i < dim; i += kLanes) vstore_bf16(rounded + i, vload(head + i));
  const int slot = task.positions[row] % kLanes;
  uint16_t* values = kv_tile(task.kv, task.tiles[row], task.head) + kv_half(task.kv) +
                     (slot / 2) * 2 * dim + slot % 2;
  for (int i = 0; i < dim; ++i) values[2 * i] = rounded[i];
}

constexpr int kDecodedRows = 64;

// Asks for the cache lines that a few decoded tokens will be written to: each token's key has its
// own 2 KiB, scattered over as many lines as there are pairs of dimensions. Stores that miss wait
// for one another; these do not.
TRIO_INLINE void prefetch_tiles(const GemmUnit& u, const HeadTask& task) {
  const int dim = task.kv.head_dim;
  if (u.rows > kDecodedRows || task.kind == HeadKind::kQuery) return;
  for (int row = u.row0; row < u.row0 + u.rows; ++row) {
    const uint16_t* tile = kv_tile(task.kv, task.tiles[row], task.head);
    const int slot = task.positions[row] % kLanes;
    if (task.kind == HeadKind::kKey) {
      for (int i = 0; i < dim / 2; ++i) prefetch(tile + i * 2 * kLanes);
      continue;
    }
    // The first token of a tile clears the rest of it.
    const uint16_t* values = tile + kv_half(task.kv) + (slot / 2) * 2 * dim;
    const int lines = (slot == 0 ? kLanes / 2 : 1) * dim / 16;
    for (int i = 0; i < lines; ++i) prefetch(values + i * 32);
  }
}

void gemm_head(const GemmUnit& u, const HeadTask& task) {
  const int dim = task.kv.head_dim, column = u.panel0 * kLanes;
  prefetch_tiles(u, task);
  gemm(u, [&](int row, const float* values) {
    float head[kMaxHeadDim];
    for (int i = 0; i < dim; i += kLanes) {
      vstore(head + i, vadd(vload(values + i), bias_at(u.weight->bias, column + i)));
    }
    if (task.kind == HeadKind::kValue) return write_value(head, task, row, dim);
    if (task.norm != nullptr) norm_head(head, task, dim);
    if (task.cos != nullptr) {
      const size_t at = static_cast<size_t>(task.positions[row]) * static_cast<size_t>(dim / 2);
      rotate_head(head, task.cos + at, task.sin + at, dim / 2);
    }
    if (task.kind == HeadKind::kKey) return write_key(head, task, row, dim);
    Plain* to = static_cast<Plain*>(task.queries) +
                static_cast<size_t>(row) * static_cast<size_t>(task.query_width) +
                static_cast<size_t>(task.head) * static_cast<size_t>(dim);
    for (int i = 0; i < dim; i += kLanes) vstore_plain(to + i, vload(head + i));
  });
}

}  // namespace
}  // namespace trioengine
