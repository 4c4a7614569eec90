#include "packing.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "numeric.h"

namespace trioengine {
namespace {

constexpr int kHalfBytes = 2;

bool is_blocks(SourceType type) {
  return type == SourceType::kQ4_0 || type == SourceType::kQ4_1 || type == SourceType::kQ8_0;
}

std::size_t block_bytes(SourceType type) {
  switch (type) {
    case SourceType::kQ4_0:
      return kHalfBytes + 16;
    case SourceType::kQ4_1:
      return 2 * kHalfBytes + 16;
    default:
      return kHalfBytes + 32;
  }
}

Format native_format(SourceType type) {
  switch (type) {
    case SourceType::kQ4_0:
      return Format::kQ4;
    case SourceType::kQ4_1:
      return Format::kQ4Min;
    case SourceType::kQ8_0:
      return Format::kQ8;
    default:
      return Format::kBf16;
  }
}

uint16_t load_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// One group of 32 weights of one output: what the bytes are, and what they mean.
struct Group {
  uint8_t codes[kGroup];
  uint16_t scale;    // half
  uint16_t minimum;  // half
};

Group zero_group(Format format) {
  Group group{};
  std::memset(group.codes, format == Format::kQ8 ? 128 : (format == Format::kQ4 ? 8 : 0), kGroup);
  return group;
}

Group read_block(SourceType type, const uint8_t* block) {
  Group group{};
  group.scale = load_u16(block);
  const uint8_t* bytes = block + kHalfBytes;
  if (type == SourceType::kQ4_1) {
    group.minimum = load_u16(bytes);
    bytes += kHalfBytes;
  }
  if (type == SourceType::kQ8_0) {
    for (int i = 0; i < kGroup; ++i) group.codes[i] = static_cast<uint8_t>(bytes[i] ^ 0x80u);
    return group;
  }
  for (int i = 0; i < kGroup / 2; ++i) {
    group.codes[i] = bytes[i] & 15u;
    group.codes[i + kGroup / 2] = bytes[i] >> 4;
  }
  return group;
}

// The nearest code in [0, most]; a NaN becomes 0. Plain casts, which compilers vectorise.
inline int nearest_code(float value, int most) {
  const float clamped = value > 0.0f ? (value < static_cast<float>(most) ? value : most) : 0.0f;
  return static_cast<int>(clamped + 0.5f);
}

Group quantise_to_q8(const float* x) {
  float largest = 0.0f;
  for (int i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(x[i]));
  Group group = zero_group(Format::kQ8);
  group.scale = float_to_half(largest / 127.0f);
  const float scale = half_to_float(group.scale);
  if (!(scale > 0.0f)) return group;
  const float inverse = 1.0f / scale;
  for (int i = 0; i < kGroup; ++i) {
    group.codes[i] = static_cast<uint8_t>(nearest_code(x[i] * inverse + 128.0f, 255));
  }
  return group;
}

// 16 steps between two halves, and what they cost.
struct Grid {
  uint16_t scale;
  uint16_t minimum;
  float error;
};

// Sums squared errors in 8 strands, in the order that compilers vectorise without being told that
// addition is associative.
Grid try_grid(const float* x, float low, float high) {
  constexpr int kStrands = 8;
  Grid grid;
  grid.minimum = float_to_half(low);
  grid.scale = float_to_half((high - low) / 15.0f);
  const float scale = half_to_float(grid.scale), minimum = half_to_float(grid.minimum);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  float errors[kStrands] = {};
  for (int i = 0; i < kGroup; i += kStrands) {
    for (int j = 0; j < kStrands; ++j) {
      const float code = static_cast<float>(nearest_code((x[i + j] - minimum) * inverse, 15));
      const float off = scale * code + minimum - x[i + j];
      errors[j] += off * off;
    }
  }
  grid.error = 0.0f;
  for (const float error : errors) grid.error += error;
  return grid;
}

// Best of a few ranges inside the extremes: clipping one outlier often costs less than a coarser
// grid for the other 31.
Grid best_grid(const float* x) {
  float low = x[0], high = x[0];
  for (int i = 1; i < kGroup; ++i) {
    low = std::min(low, x[i]);
    high = std::max(high, x[i]);
  }
  const float step = (high - low) * 0.04f;
  Grid best = try_grid(x, low, high);
  for (int below = 0; below < 3; ++below) {
    for (int above = 0; above < 3; ++above) {
      const Grid grid = try_grid(x, low + step * static_cast<float>(below),
                                 high - step * static_cast<float>(above));
      if (grid.error < best.error) best = grid;
    }
  }
  return best;
}

Group quantise_to_q4(const float* x) {
  const Grid grid = best_grid(x);
  Group group = zero_group(Format::kQ4Min);
  group.scale = grid.scale;
  group.minimum = grid.minimum;
  const float scale = half_to_float(grid.scale), minimum = half_to_float(grid.minimum);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    group.codes[i] = static_cast<uint8_t>(nearest_code((x[i] - minimum) * inverse, 15));
  }
  return group;
}

// Reads rows of the stacked sources as float or bf16, in the order of `inputs`.
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

void pack_plain_panel(const RowReader& reader, const int32_t* rows, int inputs, uint16_t* out) {
  std::vector<uint16_t> staged(static_cast<std::size_t>(inputs) * kLanes);
  for (int n = 0; n < kLanes; ++n) {
    reader.read_bf16(rows[n], staged.data() + static_cast<std::size_t>(n) * inputs, inputs);
  }
  for (int k = 0; k < inputs; k += 2) {
    for (int n = 0; n < kLanes; ++n) {
      std::memcpy(out + (static_cast<std::size_t>(k) * kLanes + static_cast<std::size_t>(n) * 2),
                  staged.data() + static_cast<std::size_t>(n) * inputs + k, 4);
    }
  }
}

void put_codes(Format format, const Group& group, int n, uint8_t* out) {
  for (int k = 0; k < kGroup; ++k) {
    if (format == Format::kQ8) {
      out[k / 4 * 64 + n * 4 + k % 4] = group.codes[k];
    } else {
      uint8_t* byte = out + k / 8 * 64 + n * 4 + k % 4;
      const unsigned shift = k / 4 % 2 != 0 ? 4 : 0;
      *byte = static_cast<uint8_t>(*byte | (group.codes[k] << shift));
    }
  }
}

Group make_group(const PackRequest& request, const RowReader& reader, const uint8_t* row, int g) {
  if (row == nullptr) return zero_group(request.format);
  if (native_format(request.type) == request.format) {
    if (static_cast<int64_t>(g) * kGroup >= request.columns) return zero_group(request.format);
    return read_block(request.type,
                      row + static_cast<std::size_t>(g) * block_bytes(request.type));
  }
  float values[kGroup];
  for (int k = 0; k < kGroup; ++k) values[k] = reader.input(row, g * kGroup + k);
  return request.format == Format::kQ8 ? quantise_to_q8(values) : quantise_to_q4(values);
}

void pack_quant_panel(const PackRequest& request, const RowReader& reader, const int32_t* rows,
                      int inputs, uint8_t* out) {
  const int groups = inputs / kGroup;
  const std::size_t quants = static_cast<std::size_t>(groups) * quant_bytes(request.format);
  uint16_t* scales = reinterpret_cast<uint16_t*>(out + quants);
  uint16_t* minima = scales + static_cast<std::size_t>(groups) * kLanes;
  for (int n = 0; n < kLanes; ++n) {
    const uint8_t* row = reader.row(rows[n]);
    for (int g = 0; g < groups; ++g) {
      const Group group = make_group(request, reader, row, g);
      put_codes(request.format, group, n,
                out + static_cast<std::size_t>(g) * quant_bytes(request.format));
      scales[g * kLanes + n] = group.scale;
      if (request.format == Format::kQ4Min) minima[g * kLanes + n] = group.minimum;
    }
  }
}

[[noreturn]] void refuse(const std::string& why) {
  throw std::invalid_argument("weights: " + why);
}

void check_indices(const std::vector<int32_t>& indices, int64_t limit, const char* what) {
  for (const int32_t index : indices) {
    if (index < -1 || index >= limit) {
      refuse(std::string(what) + " index " + std::to_string(index) + " is not in [-1, " +
             std::to_string(limit) + ")");
    }
  }
}

void check_request(const PackRequest& r) {
  if (r.columns < 1 || r.columns > INT_MAX / 2) refuse("no columns, or too many");
  int64_t total = 0;
  for (const Source& source : r.sources) total += source.rows;
  if (r.rows.empty() || r.rows.size() % kLanes != 0 || r.rows.size() > INT_MAX / 2) {
    refuse("outputs must be padded to a multiple of 16");
  }
  if (r.outputs < 1 || static_cast<std::size_t>(r.outputs) > r.rows.size()) {
    refuse("real outputs must be between 1 and the padded number");
  }
  check_indices(r.rows, total, "row");
  check_indices(r.inputs, r.columns, "input");
  if (r.inputs.size() > INT_MAX / 2) refuse("too many inputs");
  if (!r.bias.empty() && r.bias.size() != r.rows.size()) refuse("one bias per output is needed");
  if (is_blocks(r.type) && r.columns % kGroup != 0) refuse("blocks hold 32 inputs");
  if (r.format == Format::kQ4 && r.type != SourceType::kQ4_0) refuse("kQ4 is read, not made");
  if (native_format(r.type) == r.format && is_blocks(r.type) && !r.inputs.empty()) {
    refuse("inputs of blocks cannot be moved");
  }
  if (r.threads < 1) refuse("threads must be at least 1");
}

template <class Panel>
void for_each_panel(int panels, int threads, const Panel& panel) {
  std::atomic<int> next{0};
  const auto work = [&] {
    for (int p = next.fetch_add(1); p < panels; p = next.fetch_add(1)) panel(p);
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < std::min(threads, panels / 4); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace

std::size_t source_row_bytes(SourceType type, int64_t columns) {
  const std::size_t count = static_cast<std::size_t>(columns);
  if (is_blocks(type)) return count / kGroup * block_bytes(type);
  return count * (type == SourceType::kFloat ? 4 : 2);
}

PackedLinear::PackedLinear(const PackRequest& request, Arena& arena) {
  check_request(request);
  const int64_t columns =
      request.inputs.empty() ? request.columns : static_cast<int64_t>(request.inputs.size());
  view_.format = request.format;
  view_.outputs = request.outputs;
  view_.panels = static_cast<int>(request.rows.size()) / kLanes;
  view_.inputs = round_up(static_cast<int>(columns), kGroup);
  view_.panel_bytes = panel_bytes(request.format, view_.inputs);
  const Arena::Part part = arena.allocate(bytes());
  storage_ = part.owner;
  uint8_t* const data = static_cast<uint8_t*>(part.data);
  view_.data = data;
  bias_ = request.bias;
  view_.bias = bias_.empty() ? nullptr : bias_.data();
  const RowReader reader(request);
  for_each_panel(view_.panels, request.threads, [&](int panel) {
    const int32_t* rows = request.rows.data() + static_cast<std::size_t>(panel) * kLanes;
    uint8_t* out = data + static_cast<std::size_t>(panel) * view_.panel_bytes;
    if (request.format == Format::kBf16) {
      pack_plain_panel(reader, rows, view_.inputs, reinterpret_cast<uint16_t*>(out));
    } else {
      pack_quant_panel(request, reader, rows, view_.inputs, out);
    }
  });
}

namespace {

float packed_value(const Linear& w, const uint8_t* panel, int k, int n) {
  if (w.format == Format::kBf16) {
    const std::size_t pair = static_cast<std::size_t>(k / 2) * kLanes + static_cast<std::size_t>(n);
    return bf16_to_float(load_u16(panel + (pair * 2 + static_cast<std::size_t>(k % 2)) * 2));
  }
  const std::size_t groups = static_cast<std::size_t>(w.inputs / kGroup);
  const std::size_t g = static_cast<std::size_t>(k / kGroup), at = (g * kLanes + n) * 2;
  const uint8_t* bytes = panel + g * quant_bytes(w.format);
  const uint8_t* scales = panel + groups * quant_bytes(w.format);
  const float scale = half_to_float(load_u16(scales + at));
  const int i = k % kGroup;
  if (w.format == Format::kQ8) {
    return scale * static_cast<float>(bytes[i / 4 * 64 + n * 4 + i % 4] - 128);
  }
  const unsigned code = bytes[i / 8 * 64 + n * 4 + i % 4] >> (i / 4 % 2 * 4) & 15u;
  if (w.format == Format::kQ4) return scale * static_cast<float>(static_cast<int>(code) - 8);
  const float minimum = half_to_float(load_u16(scales + groups * kLanes * 2 + at));
  return scale * static_cast<float>(code) + minimum;
}

}  // namespace

void PackedLinear::dequantise(float* out) const {
  for (int n = 0; n < view_.panels * kLanes; ++n) {
    const uint8_t* panel = view_.data + static_cast<std::size_t>(n / kLanes) * view_.panel_bytes;
    for (int k = 0; k < view_.inputs; ++k) {
      *out++ = packed_value(view_, panel, k, n % kLanes);
    }
  }
}

}  // namespace trioengine
