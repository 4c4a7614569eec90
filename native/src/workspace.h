// The buffers that a step computes in: sized once, for the largest step.
#pragma once

#include <vector>

#include "huge_buffer.h"
#include "kernels.h"
#include "model.h"

namespace trioengine {

// Rows of activations in the forms wanted, with spare rows after them.
class ActsBuffer {
 public:
  ActsBuffer() = default;
  ActsBuffer(int rows, int width, std::size_t plain_bytes, InputForms forms);
  // Null pointers for the forms that this reader does not want.
  Acts view(InputForms forms) const;

 private:
  HugeBuffer plain_, quant_, scales_;
  int width_ = 0;
};

constexpr int kOwnNormRows = 8;  // up to so many rows each thread norms by itself: no barrier

// What one thread needs for itself.
struct ThreadSpace {
  HugeBuffer gemm, attention;
  ActsBuffer normed;  // kOwnNormRows rows
};

constexpr int kHeadRows = 128;  // logits rows computed at once

// What the head tells of each row's units. It tells it of many rows in turn, so all rows lie on few
// pages, and an odd number of cache lines apart, or they would share few sets of the L1 cache.
class UnitNotes {
 public:
  struct Row {  // [units] each
    Peak *peaks, *own_peaks;  // of what is allowed, of all
    float *sums, *own_sums;
  };

  UnitNotes() = default;
  UnitNotes(int rows, int units);
  Row row(int index) const;

 private:
  std::size_t units_ = 0, row_bytes_ = 0;  // the units are whole cache lines of sums
  HugeBuffer notes_;
};

struct Workspace {
  Workspace(const Model& model, const KernelTable& kernels, int threads, int max_tokens);

  HugeBuffer hidden;   // float [max_tokens][hidden_width]
  HugeBuffer wanted;   // the same, of the rows that the last layer is left with
  HugeBuffer queries;  // plain [max_tokens][query_width]
  ActsBuffer normed, attended, gated, head_input;
  UnitNotes notes;             // what the head tells of logits
  HugeBuffer logits;           // float [units][rows][64]
  std::vector<int32_t> tiles;  // [max_tokens]
  std::vector<uint8_t> fresh;  // [max_tokens] tokens that a tile begun here gets in this step
  std::vector<ThreadSpace> threads;
};

}  // namespace trioengine
