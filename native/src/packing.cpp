#include "packing.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

#include "row_reader.h"
#include "weight_group.h"

namespace trioengine {
namespace {

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
  if (r.threads < 1 || r.threads > 1024) refuse("threads must be in [1, 1024]");
}

template <class Panel>
void for_each_panel(int panels, int threads, const Panel& panel) {
  std::atomic<int> next{0};
  const auto work = [&] {
    for (int p = next.fetch_add(1); p < panels; p = next.fetch_add(1)) panel(p);
  };
  std::vector<std::thread> helpers;
  const int wanted = std::min(threads, panels / 4);
  helpers.reserve(static_cast<std::size_t>(std::max(wanted, 1)));
  try {
    for (int i = 1; i < wanted; ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads to be had: fewer do it
  }
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

}  // namespace trioengine
