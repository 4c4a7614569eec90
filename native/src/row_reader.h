// Rows of the stacked source matrices of a PackRequest, in the order that it asks for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "layout.h"
#include "numeric.h"
#include "packing.h"
#include "weight_group.h"

namespace trioengine {

// Reads rows as float or bf16, in the order of `inputs`.
class RowReader {
 public:
  explicit RowReader(const PackRequest& request) : request_(request) {
    row_bytes_ = source_row_bytes(request.type, request.columns);
  }

  // Null for a padding row.
  const uint8_t* row(int32_t index) const {
    if (index < 0) return nullptr;
    int64_t left = index;
    for (const Source& source : request_.sources) {
      if (left < source.rows) return source.data + static_cast<std::size_t>(left) * row_bytes_;
      left -= source.rows;
    }
    return nullptr;  // excluded by check_request
  }

  float value(const uint8_t* row, int64_t column) const {
    switch (request_.type) {
      case SourceType::kBf16:
        return bf16_to_float(load_u16(row + column * 2));
      case SourceType::kHalf:
        return half_to_float(load_u16(row + column * 2));
      case SourceType::kFloat: {
        float x;
        std::memcpy(&x, row + column * 4, sizeof x);
        return x;
      }
      default:
        return block_value(row, column);
    }
  }

  // Input k of the packed matrix.
  float input(const uint8_t* row, int k) const {
    const int64_t column = source_column(k);
    return row == nullptr || column < 0 ? 0.0f : value(row, column);
  }

  void read_bf16(int32_t index, uint16_t* out, int count) const {
    const uint8_t* from = row(index);
    if (from == nullptr) {
      std::memset(out, 0, static_cast<std::size_t>(count) * 2);
      return;
    }
    if (request_.type == SourceType::kBf16 && request_.inputs.empty()) {
      std::memcpy(out, from, static_cast<std::size_t>(request_.columns) * 2);
      std::memset(out + request_.columns, 0,
                  static_cast<std::size_t>(count - request_.columns) * 2);
      return;
    }
    for (int k = 0; k < count; ++k) out[k] = float_to_bf16(input(from, k));
  }

 private:
  int64_t source_column(int k) const {
    if (!request_.inputs.empty()) {
      return k < static_cast<int>(request_.inputs.size())
                 ? request_.inputs[static_cast<std::size_t>(k)]
                 : -1;
    }
    return k < request_.columns ? k : -1;
  }

  float block_value(const uint8_t* row, int64_t column) const {
    const Group group = read_block(
        request_.type, row + static_cast<std::size_t>(column / kGroup) * block_bytes(request_.type));
    const float scale = half_to_float(group.scale);
    const int code = group.codes[column % kGroup];
    if (request_.type == SourceType::kQ4_1) {
      return scale * static_cast<float>(code) + half_to_float(group.minimum);
    }
    return scale * static_cast<float>(code - (request_.type == SourceType::kQ8_0 ? 128 : 8));
  }

  const PackRequest& request_;
  std::size_t row_bytes_;
};

}  // namespace trioengine
