// Matrix products of bf16 weights with vectors: pairs of inputs, tiles of sums in registers.
#pragma once

#include "fetcher.h"
#include "math.h"

namespace trioengine {
namespace {

constexpr int kStepPairs = 4;           // pairs of inputs, after which something is asked for
constexpr size_t kStepBytes = kStepPairs * 64;  // of a panel
constexpr size_t kPrefetchAhead = 2048;  // bytes of a panel; measured best between 1 and 6 KiB
// Rows that are computed before their epilogues: with wider tiles of fewer panels they come out even.
constexpr int kTogether = kNarrowTileRows;

// Rows of a tile of C panels: as many as registers hold sums of, beside what is multiplied.
template <int C>
constexpr int tile_rows() {
  return C == kTilePanels ? kTileRows : kNarrowTileRows;
}

// Weights that come from memory, asked for in time: those of C panels a little ahead, and before
// their end the begin of the panels that follow.
template <int C>
class Stream {
 public:
  Stream(const uint8_t* panels, size_t panel_bytes, const uint8_t* next)
      : at_(panels + kPrefetchAhead), end_(panels + panel_bytes), next_(next), bytes_(panel_bytes) {}

  inline __attribute__((always_inline)) void step() {
    if (next_ == nullptr) return;
    if (at_ == end_) at_ = next_;
    const uint8_t* at = at_;
    for (int c = 0; c < C; ++c, at += bytes_) {
      for (size_t i = 0; i < kStepBytes; i += 64) prefetch(at + i);
    }
    at_ += kStepBytes;
  }

 private:
  const uint8_t* at_;
  const uint8_t* const end_;
  const uint8_t* const next_;
  const size_t bytes_;
};

// What tiles of the same rows and panels have in common.
struct PairTile {
  const uint8_t* panels;
  size_t panel_bytes;
  int pairs;
  const Plain* x;
  size_t width;
  float* out;
  size_t out_width;
  const uint8_t* next;  // panels that are probably met after these; null where these have been met
};

// R rows times C panels.
template <int R, int C>
void multiply_tile(const PairTile& tile, Fetcher* fetcher) {
  Stream<C> stream(tile.panels, tile.panel_bytes, tile.next);
  Vf acc[R][C];
  TRIO_UNROLL
  for (int r = 0; r < R; ++r) {
    TRIO_UNROLL
    for (int c = 0; c < C; ++c) acc[r][c] = vset(0.0f);
  }
  for (int step = 0; step < tile.pairs; step += kStepPairs) {
    stream.step();
    for (int k = step; k < step + kStepPairs; ++k) {
      const uint8_t* at = tile.panels + static_cast<size_t>(k) * 64;
      WeightPair weight[C];
      TRIO_UNROLL
      for (int c = 0; c < C; ++c) {
        const uint8_t* p = at + static_cast<size_t>(c) * tile.panel_bytes;
        weight[c] = load_pair(reinterpret_cast<const uint16_t*>(p));
      }
      TRIO_UNROLL
      for (int r = 0; r < R; ++r) {
        const InputPair input = bcast_pair(tile.x + static_cast<size_t>(r) * tile.width + 2 * k);
        TRIO_UNROLL
        for (int c = 0; c < C; ++c) acc[r][c] = dot_pair(acc[r][c], weight[c], input);
      }
    }
    fetcher->step();
  }
  TRIO_UNROLL
  for (int r = 0; r < R; ++r) {
    TRIO_UNROLL
    for (int c = 0; c < C; ++c) {
      vstore(tile.out + static_cast<size_t>(r) * tile.out_width + c * kLanes, acc[r][c]);
    }
  }
}

// Calls multiply_tile with `rows` (1 .. R) as a constant.
template <int R, int C>
void multiply_rows(int rows, const PairTile& tile, Fetcher* fetcher) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<R - 1, C>(rows, tile, fetcher);
  }
  multiply_tile<R, C>(tile, fetcher);
}

// `rows` rows, C panels, in tiles that are as equal as can be.
template <int C>
void multiply_panels(PairTile tile, int rows, Fetcher* fetcher) {
  for (int tiles = (rows + tile_rows<C>() - 1) / tile_rows<C>(); tiles > 0; --tiles) {
    const int count = (rows + tiles - 1) / tiles;
    multiply_rows<tile_rows<C>(), C>(count, tile, fetcher);
    tile.next = nullptr;
    tile.x += static_cast<size_t>(count) * tile.width;
    tile.out += static_cast<size_t>(count) * tile.out_width;
    rows -= count;
  }
}

// Rows [first, first + rows) of the unit, from panel `panel` on, C at a time and then fewer.
template <int C>
void multiply_block(const GemmUnit& u, int first, int rows, int panel, Fetcher* fetcher) {
  const size_t width = static_cast<size_t>(u.input->width), bytes = u.weight->panel_bytes;
  const Plain* x = static_cast<const Plain*>(u.input->plain) +
                   static_cast<size_t>(u.row0 + first) * width;
  for (; panel + C <= u.panels; panel += C) {
    const uint8_t* at = u.weight->data + static_cast<size_t>(u.panel0 + panel) * bytes;
    const bool last = panel + C == u.panels && u.ahead.at != nullptr;
    const uint8_t* const after = last ? u.ahead.at : at + C * bytes;
    multiply_panels<C>({at, bytes, u.weight->inputs / 2, x, width, u.scratch + panel * kLanes,
                        static_cast<size_t>(u.panels) * kLanes, first == 0 ? after : nullptr},
                       rows, fetcher);
  }
  if constexpr (C > 1) multiply_block<C / 2>(u, first, rows, panel, fetcher);
}

// Steps of a unit, but for an odd panel's.
TRIO_INLINE int steps_of(const GemmUnit& u) {
  const int whole = u.panels / kTilePanels * ((u.rows + kTileRows - 1) / kTileRows);
  const int narrow = u.panels % kTilePanels / 2 * ((u.rows + kNarrowTileRows - 1) / kNarrowTileRows);
  const int runs = whole + narrow > 0 ? whole + narrow : 1;
  return runs * (u.weight->inputs / 2 / kStepPairs);
}

// Where one tile holds all rows, weights are met once, and nothing is gained by asking for those of
// the next unit as well.
template <class Epilogue>
void plain_unit(const GemmUnit& u, const Epilogue& epilogue) {
  const size_t out_width = static_cast<size_t>(u.panels) * kLanes;
  Fetcher fetcher(u.rows > kTileRows ? u.ahead : Ahead{}, steps_of(u));
  for (int first = 0; first < u.rows; first += kTogether) {
    const int rows = u.rows - first < kTogether ? u.rows - first : kTogether;
    multiply_block<kTilePanels>(u, first, rows, 0, &fetcher);
    for (int r = 0; r < rows; ++r) {
      epilogue(u.row0 + first + r, u.scratch + static_cast<size_t>(r) * out_width);
    }
  }
}

}  // namespace
}  // namespace trioengine
