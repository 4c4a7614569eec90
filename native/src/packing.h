// Weight matrices brought into the layout of the kernels (layout.h), once, at load time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "huge_buffer.h"
#include "layout.h"

namespace trioengine {

// How the elements of a source matrix are stored: row after row.
enum class SourceType : int {
  kBf16 = 0,
  kHalf = 1,
  kFloat = 2,
  kQ4_0 = 3,  // GGUF blocks of 32: half scale, 16 bytes of nibbles (0..15 low, 16..31 high)
  kQ4_1 = 4,  // GGUF: half scale, half minimum, 16 bytes of nibbles
  kQ8_0 = 5,  // GGUF: half scale, 32 signed bytes
};

struct Source {
  const uint8_t* data;
  int64_t rows;
};

struct PackRequest {
  std::vector<Source> sources;  // stacked; all of `type` and `columns`
  SourceType type;
  int64_t columns;               // inputs of a source row
  std::vector<int32_t> rows;     // output -> stacked source row, -1 for zeros; a multiple of 16
  std::vector<int32_t> inputs;   // input -> source column, -1 for zero; empty: as they are
  std::vector<float> bias;       // one per output, or empty
  Format format;                 // kBf16, or what the source holds, or what to quantise to
  int outputs;                   // real outputs; those after are padding
  int threads;
};

class PackedLinear {
 public:
  // Throws std::invalid_argument where an index is out of range, sizes do not fit, or the format
  // cannot be made from the source; std::bad_alloc.
  PackedLinear(const PackRequest& request, Arena& arena);

  const Linear& view() const { return view_; }
  std::size_t bytes() const {
    return view_.panel_bytes * static_cast<std::size_t>(view_.panels);
  }
  // Writes what the packed weights mean: [panels * kLanes][inputs].
  void dequantise(float* out) const;

 private:
  std::shared_ptr<HugeBuffer> storage_;
  std::vector<float> bias_;
  Linear view_;
};

// Bytes of one source row.
std::size_t source_row_bytes(SourceType type, int64_t columns);

}  // namespace trioengine
