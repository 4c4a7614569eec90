// Packing weight matrices, from Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../packing.h"
#include "arguments.h"
#include "bind.h"

namespace trioengine {
namespace {

using namespace nb::literals;

SourceType source_type(const std::string& name) {
  if (name == "bf16") return SourceType::kBf16;
  if (name == "f16") return SourceType::kHalf;
  if (name == "f32") return SourceType::kFloat;
  if (name == "q4_0") return SourceType::kQ4_0;
  if (name == "q4_1") return SourceType::kQ4_1;
  if (name == "q8_0") return SourceType::kQ8_0;
  refuse("unknown source type \"" + name + "\"");
}

Format packed_format(const std::string& name) {
  if (name == "bf16") return Format::kBf16;
  if (name == "q8") return Format::kQ8;
  if (name == "q4") return Format::kQ4;
  if (name == "q4_min") return Format::kQ4Min;
  refuse("unknown format \"" + name + "\"");
}

const char* format_name(Format format) {
  switch (format) {
    case Format::kQ8:
      return "q8";
    case Format::kQ4:
      return "q4";
    case Format::kQ4Min:
      return "q4_min";
    default:
      return "bf16";
  }
}

Source to_source(const AnyArray& array, SourceType type, int64_t columns) {
  const std::size_t bytes = source_row_bytes(type, columns);
  std::size_t width = static_cast<std::size_t>(columns);
  if (type == SourceType::kFloat) {
    dense<float>(array, "source", std::size_t{2});
  } else if (type == SourceType::kBf16 || type == SourceType::kHalf) {
    dense<uint16_t>(array, "source", std::size_t{2});
  } else {
    dense<uint8_t>(array, "source", std::size_t{2});
    width = bytes;
  }
  if (array.shape(1) != width) refuse("source rows do not have the given number of columns");
  return {static_cast<const uint8_t*>(array.data()), static_cast<int64_t>(array.shape(0))};
}

std::shared_ptr<PackedLinear> pack(Arena& arena, const std::vector<AnyArray>& sources,
                                   const std::string& type, int64_t columns, const AnyArray& rows,
                                   const std::optional<AnyArray>& inputs,
                                   const std::optional<AnyArray>& bias, const std::string& format,
                                   int64_t outputs, int threads) {
  if (columns < 1 || columns > INT_MAX / 2) refuse("columns are out of range");
  PackRequest request;
  request.type = source_type(type);
  request.columns = columns;
  for (const AnyArray& source : sources) {
    request.sources.push_back(to_source(source, request.type, columns));
  }
  request.rows = copy_of<int32_t>(rows, "rows");
  request.inputs = copy_of<int32_t>(inputs, "inputs");
  request.bias = copy_of<float>(bias, "bias");
  request.format = packed_format(format);
  request.outputs = to_int32(outputs, "outputs");
  request.threads = threads;
  const nb::gil_scoped_release unlocked;
  return std::make_shared<PackedLinear>(request, arena);
}

nb::ndarray<nb::numpy, float> dequantise(const PackedLinear& linear) {
  const Linear& w = linear.view();
  auto out = make_array<float>({static_cast<std::size_t>(w.panels) * kLanes,
                                static_cast<std::size_t>(w.inputs)});
  linear.dequantise(out.data());
  return out;
}

}  // namespace

void bind_weights(nb::module_& m) {
  nb::class_<PackedLinear>(m, "PackedLinear")
      .def_prop_ro("format", [](const PackedLinear& p) { return format_name(p.view().format); })
      .def_prop_ro("outputs", [](const PackedLinear& p) { return p.view().outputs; })
      .def_prop_ro("inputs", [](const PackedLinear& p) { return p.view().inputs; })
      .def_prop_ro("num_bytes", &PackedLinear::bytes)
      .def("dequantise", &dequantise);
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  m.def("pack", &pack, "arena"_a, "sources"_a, "source_type"_a, "columns"_a, "rows"_a, "inputs"_a.none(),
        "bias"_a.none(), "format"_a, "outputs"_a, "threads"_a);
}

}  // namespace trioengine
