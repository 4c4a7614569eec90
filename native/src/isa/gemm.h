// Matrix products: row tiles of a unit into scratch, each finished row handed to an epilogue.
//
// An output is summed over its inputs in ascending order by one accumulator (bf16), or group by
// group (quantised), whatever the number of rows and panels in a tile.
#pragma once

#ifdef TRIO_AMX
#include "gemm_amx_quant.h"
#else
#include "gemm_pairs.h"
#endif

namespace trioengine {
namespace {

constexpr int kQuantAhead = 2048;      // bytes, into the L1 cache
constexpr int kQuantFarAhead = 12288;  // into the L2 cache; measured best of 4 to 24 KiB

// Asks for `bytes` of quantised weights in time. Each distance alone is slower: loads from the L2
// cache are not hidden by far, and those from memory not by near prefetches, too few of which fit.
TRIO_INLINE void prefetch_quant(const uint8_t* at, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) {
    prefetch(at + i + kQuantAhead);
    __builtin_prefetch(at + i + kQuantFarAhead, 0, 2);
  }
}

// R rows times one panel of quantised weights.
template <int R, Format F>
void multiply_quant_tile(const Linear& w, int panel, const Acts& x, size_t row, float* out,
                         size_t out_width) {
  const int groups = w.inputs / kGroup;
  const uint8_t* bytes = w.data + static_cast<size_t>(panel) * w.panel_bytes;
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(
      bytes + static_cast<size_t>(groups) * quant_bytes(F));
  const uint16_t* minima = scales + static_cast<size_t>(groups) * kLanes;
  const size_t width = static_cast<size_t>(x.width);
  const int8_t* input = x.quant + row * width;
  const ActScale* input_scales = x.scales + row * width / kGroup;
  constexpr int32_t zero = F == Format::kQ8 ? 128 : (F == Format::kQ4 ? 8 : 0);
  // What a group takes of the panel, its scales and minima included, is asked for with each group.
  constexpr size_t share = quant_bytes(F) + (F == Format::kQ4Min ? 4 : 2) * kLanes;
  const uint8_t* asking = bytes;
  Vf acc[R];
  for (int r = 0; r < R; ++r) acc[r] = vset(0.0f);
  for (int g = 0; g < groups; ++g, bytes += quant_bytes(F)) {
    Vb quads[8];
    for (int v = 0; v < (F == Format::kQ8 ? 8 : 4); ++v) {
      const Vb raw = bload(bytes + v * 64);
      if constexpr (F == Format::kQ8) {
        quads[v] = raw;
      } else {
        quads[2 * v] = blow(raw);
        quads[2 * v + 1] = bhigh(raw);
      }
    }
    if (R <= 2) prefetch_quant(asking + static_cast<size_t>(g) * share, share);
    const Vf scale = vload_half(scales + g * kLanes);
    for (int r = 0; r < R; ++r) {
      const ActScale& s = input_scales[static_cast<size_t>(r) * width / kGroup + static_cast<size_t>(g)];
      const int8_t* q = input + static_cast<size_t>(r) * width + g * kGroup;
      Vi even = iset(-zero * s.sum), odd = iset(0);
      for (int v = 0; v < 8; v += 2) {
        if constexpr (F == Format::kQ8) {
          even = dot_bytes(even, quads[v], bcast_quad(q + 4 * v));
          odd = dot_bytes(odd, quads[v + 1], bcast_quad(q + 4 * v + 4));
        } else {
          even = dot_nibbles(even, quads[v], bcast_quad(q + 4 * v));
          odd = dot_nibbles(odd, quads[v + 1], bcast_quad(q + 4 * v + 4));
        }
      }
      if constexpr (F == Format::kQ4Min) {
        acc[r] = vfma(vload_half(minima + g * kLanes), vset(s.scaled_sum), acc[r]);
      }
      acc[r] = vfma(vmul(scale, vset(s.scale)), itof(iadd(even, odd)), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) vstore(out + static_cast<size_t>(r) * out_width, acc[r]);
}

template <int R, Format F>
void multiply_quant_rows(int rows, const Linear& w, int panel, const Acts& x, size_t row,
                         float* out, size_t out_width) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_quant_rows<R - 1, F>(rows, w, panel, x, row, out, out_width);
  }
  multiply_quant_tile<R, F>(w, panel, x, row, out, out_width);
}

template <Format F, class Epilogue>
void quant_unit(const GemmUnit& u, const Epilogue& epilogue) {
#ifdef TRIO_AMX
  if (u.rows > kFewQuantRows) return quant_tiles_unit<F>(u, epilogue);
#endif
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  for (int done = 0; done < u.rows; done += kQuantRows) {
    const int rows = u.rows - done < kQuantRows ? u.rows - done : kQuantRows;
    const size_t row = static_cast<size_t>(u.row0 + done);
    for (int p = 0; p < u.panels; ++p) {
      multiply_quant_rows<kQuantRows, F>(rows, *u.weight, u.panel0 + p, *u.input, row,
                                         u.scratch + p * kLanes, out_width);
    }
    for (int r = 0; r < rows; ++r) {
      epilogue(u.row0 + done + r, u.scratch + static_cast<size_t>(r) * out_width);
    }
  }
}

// Computes the unit; `epilogue(row, values)` gets each row's u.panels * 16 floats once.
template <class Epilogue>
void gemm(const GemmUnit& u, const Epilogue& epilogue) {
  switch (u.weight->format) {
    case Format::kBf16:
      return plain_unit(u, epilogue);
    case Format::kQ8:
      return quant_unit<Format::kQ8>(u, epilogue);
    case Format::kQ4:
      return quant_unit<Format::kQ4>(u, epilogue);
    case Format::kQ4Min:
      return quant_unit<Format::kQ4Min>(u, epilogue);
  }
}

}  // namespace
}  // namespace trioengine
