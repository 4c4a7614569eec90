// The Python module `_native`. Everything that comes from Python is checked here or right behind:
// a wrong array raises ValueError, whatever it holds.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <climits>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu.h"
#include "numeric.h"
#include "sampler.h"
#include "step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace trioengine {
namespace {

using AnyArray = nb::ndarray<nb::ro>;
using Masks = std::vector<std::pair<int64_t, std::vector<int64_t>>>;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_array(const AnyArray& array, const char* name, nb::dlpack::dtype type, std::size_t ndim) {
  if (array.device_type() != nb::device::cpu::value) refuse(std::string(name) + " is not on the CPU");
  if (array.dtype() != type) refuse(std::string(name) + " has the wrong dtype");
  if (array.ndim() != ndim) {
    refuse(std::string(name) + " must have " + std::to_string(ndim) + " dimensions, has " +
           std::to_string(array.ndim()));
  }
  for (std::size_t d = 0; d < ndim; ++d) {
    if (array.shape(d) > INT_MAX) refuse(std::string(name) + " is too large");
  }
}

bool is_dense(const AnyArray& array, std::size_t from) {
  int64_t expected = 1;
  for (std::size_t d = array.ndim(); d-- > from;) {
    if (array.shape(d) > 1 && array.stride(d) != expected) return false;
    expected *= static_cast<int64_t>(array.shape(d));
  }
  return true;
}

// A C-contiguous array of T with `ndim` dimensions.
template <class T>
const T* dense(const AnyArray& array, const char* name, std::size_t ndim) {
  check_array(array, name, nb::dtype<T>(), ndim);
  if (!is_dense(array, 0)) refuse(std::string(name) + " is not C-contiguous");
  return static_cast<const T*>(array.data());
}

// As above, one-dimensional with `count` elements.
template <class T>
const T* dense(const AnyArray& array, const char* name, int count) {
  const T* data = dense<T>(array, name, std::size_t{1});
  if (array.shape(0) != static_cast<std::size_t>(count)) {
    refuse(std::string(name) + " has " + std::to_string(array.shape(0)) + " elements, expected " +
           std::to_string(count));
  }
  return data;
}

template <class T>
std::vector<T> copy_of(const AnyArray& array, const char* name) {
  const T* data = dense<T>(array, name, std::size_t{1});
  return std::vector<T>(data, data + array.shape(0));
}

template <class T>
std::vector<T> copy_of(const std::optional<AnyArray>& array, const char* name) {
  return array.has_value() ? copy_of<T>(*array, name) : std::vector<T>();
}

// A new numpy array that owns its memory.
template <class T>
nb::ndarray<nb::numpy, T> make_array(std::vector<std::size_t> shape) {
  std::size_t count = 1;
  for (const std::size_t n : shape) count *= n;
  auto owned = std::make_unique<T[]>(count);
  T* data = owned.get();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  owned.release();
  return nb::ndarray<nb::numpy, T>(data, shape.size(), shape.data(), owner);
}

int32_t to_int32(int64_t value, const char* name) {
  if (value < INT32_MIN || value > INT32_MAX) {
    refuse(std::string(name) + " " + std::to_string(value) + " is out of range");
  }
  return static_cast<int32_t>(value);
}

std::vector<TokenMask> to_masks(const Masks& masks) {
  std::vector<TokenMask> out;
  for (const auto& [row, ids] : masks) {
    TokenMask mask{to_int32(row, "masked_token_ids: row"), {}};
    for (const int64_t id : ids) mask.token_ids.push_back(to_int32(id, "masked_token_ids: id"));
    out.push_back(std::move(mask));
  }
  return out;
}

// ---- weights ------------------------------------------------------------------------------------

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

// ---- model --------------------------------------------------------------------------------------

// Owns a model until a runner takes it: from then on it cannot change.
class ModelBuilder {
 public:
  explicit ModelBuilder(const ModelShape& shape) : model_(std::make_shared<Model>(shape)) {}

  Model& model() const {
    if (model_ == nullptr) refuse("the model was handed to a runner already");
    return *model_;
  }
  std::shared_ptr<const Model> take() {
    model().check_complete();
    return std::move(model_);
  }

 private:
  std::shared_ptr<Model> model_;
};

void init_builder(ModelBuilder* self, int layers, int hidden, int heads, int kv_heads,
                  int head_dim, int padded_head_dim, int intermediate, int vocab, int positions,
                  float eps, float attention_scale) {
  const ModelShape shape{layers,       hidden, heads,     kv_heads, head_dim,       padded_head_dim,
                         intermediate, vocab,  positions, eps,      attention_scale};
  new (self) ModelBuilder(shape);
}

using MaybePacked = std::shared_ptr<PackedLinear>;

void add_layer(ModelBuilder& self, MaybePacked query, MaybePacked key, MaybePacked value,
               MaybePacked output, MaybePacked gate_up, MaybePacked down,
               const AnyArray& input_norm, const AnyArray& post_norm,
               const std::optional<AnyArray>& query_norm, const std::optional<AnyArray>& key_norm,
               int window, bool rotate) {
  Layer layer;
  layer.query = std::move(query);
  layer.key = std::move(key);
  layer.value = std::move(value);
  layer.output = std::move(output);
  layer.gate_up = std::move(gate_up);
  layer.down = std::move(down);
  layer.input_norm = copy_of<float>(input_norm, "input_norm");
  layer.post_norm = copy_of<float>(post_norm, "post_norm");
  layer.query_norm = copy_of<float>(query_norm, "query_norm");
  layer.key_norm = copy_of<float>(key_norm, "key_norm");
  layer.window = window;
  layer.rotate = rotate;
  self.model().add_layer(std::move(layer));
}

void set_embedding(ModelBuilder& self, const AnyArray& rows) {
  const uint16_t* data = dense<uint16_t>(rows, "embedding", std::size_t{2});
  const ModelShape& shape = self.model().shape();
  if (rows.shape(0) != static_cast<std::size_t>(shape.vocab) ||
      rows.shape(1) != static_cast<std::size_t>(shape.hidden)) {
    refuse("embedding is not [vocab][hidden]");
  }
  self.model().set_embedding(data);
}

void set_head(ModelBuilder& self, MaybePacked head, const AnyArray& final_norm) {
  self.model().set_head(std::move(head), copy_of<float>(final_norm, "final_norm"));
}

void set_rotation(ModelBuilder& self, const AnyArray& cos, const AnyArray& sin) {
  const float* c = dense<float>(cos, "cos", std::size_t{2});
  const float* s = dense<float>(sin, "sin", std::size_t{2});
  if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1)) refuse("cos and sin differ");
  self.model().set_rotation(c, s, static_cast<int64_t>(cos.size()));
}

// ---- runner -------------------------------------------------------------------------------------

// Keeps two Python threads out of one step, since the interpreter lock does not.
class GuardedRunner {
 public:
  GuardedRunner(std::shared_ptr<const Model> model, const KernelTable& kernels,
                const RunnerOptions& options)
      : runner_(std::move(model), kernels, options) {}

  const Runner& get() const { return runner_; }

  void execute(const StepView& step, int32_t* tokens, float* logits) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) throw std::runtime_error("a step is running already");
    runner_.execute(step, tokens, logits);
  }

 private:
  std::mutex mutex_;
  Runner runner_;
};

void init_runner(GuardedRunner* self, ModelBuilder& model, const std::string& isa, int threads,
                 int max_tokens, int num_blocks, int block_size) {
  const KernelTable& kernels = choose_kernels(isa);
  std::shared_ptr<const Model> taken = model.take();
  const nb::gil_scoped_release unlocked;
  new (self) GuardedRunner(std::move(taken), kernels,
                           RunnerOptions{threads, max_tokens, num_blocks, block_size});
}

struct StepArrays {
  const AnyArray &token_ids, &positions, &query_start, &seq_lens, &block_tables, &logits_rows;
  const AnyArray &temperature, &top_p, &top_k, &min_p, &seeds, &sample_positions;
};

StepView to_step(const StepArrays& arrays, const Masks& masks) {
  StepView step;
  step.token_ids = dense<int32_t>(arrays.token_ids, "token_ids", std::size_t{1});
  step.num_tokens = static_cast<int>(arrays.token_ids.shape(0));
  step.positions = dense<int32_t>(arrays.positions, "positions", step.num_tokens);
  step.seq_lens = dense<int32_t>(arrays.seq_lens, "seq_lens", std::size_t{1});
  step.num_seqs = static_cast<int>(arrays.seq_lens.shape(0));
  step.query_start = dense<int32_t>(arrays.query_start, "query_start", step.num_seqs + 1);
  const AnyArray& tables = arrays.block_tables;
  check_array(tables, "block_tables", nb::dtype<int32_t>(), 2);
  if (!is_dense(tables, 1)) refuse("block_tables: a row is not contiguous");
  if (tables.shape(0) != arrays.seq_lens.shape(0)) refuse("block_tables needs a row per sequence");
  step.block_tables = static_cast<const int32_t*>(tables.data());
  step.max_blocks = static_cast<int>(tables.shape(1));
  step.table_stride = tables.stride(0);
  step.logits_rows = dense<int32_t>(arrays.logits_rows, "logits_rows", std::size_t{1});
  step.num_rows = static_cast<int>(arrays.logits_rows.shape(0));
  step.temperature = dense<float>(arrays.temperature, "temperature", step.num_rows);
  step.top_p = dense<float>(arrays.top_p, "top_p", step.num_rows);
  step.top_k = dense<int32_t>(arrays.top_k, "top_k", step.num_rows);
  step.min_p = dense<float>(arrays.min_p, "min_p", step.num_rows);
  step.seeds = dense<uint64_t>(arrays.seeds, "seeds", step.num_rows);
  step.sample_positions =
      dense<int64_t>(arrays.sample_positions, "sampling positions", step.num_rows);
  step.masks = to_masks(masks);
  return step;
}

nb::object execute(GuardedRunner& self, const AnyArray& token_ids, const AnyArray& positions,
                   const AnyArray& query_start, const AnyArray& seq_lens,
                   const AnyArray& block_tables, const AnyArray& logits_rows,
                   const AnyArray& temperature, const AnyArray& top_p, const AnyArray& top_k,
                   const AnyArray& min_p, const AnyArray& seeds, const AnyArray& sample_positions,
                   const Masks& masks, bool want_logits) {
  const StepArrays arrays{token_ids,   positions, query_start, seq_lens, block_tables, logits_rows,
                          temperature, top_p,     top_k,       min_p,    seeds, sample_positions};
  const StepView step = to_step(arrays, masks);
  const std::size_t rows = static_cast<std::size_t>(step.num_rows);
  auto tokens = make_array<int32_t>({rows});
  if (!want_logits) {
    {
      const nb::gil_scoped_release unlocked;
      self.execute(step, tokens.data(), nullptr);
    }
    return nb::make_tuple(tokens, nb::none());
  }
  const std::size_t vocab = static_cast<std::size_t>(self.get().model().shape().vocab);
  auto logits = make_array<float>({rows, vocab});
  {
    const nb::gil_scoped_release unlocked;
    self.execute(step, tokens.data(), logits.data());
  }
  return nb::make_tuple(tokens, logits);
}

// ---- parts, for tests ---------------------------------------------------------------------------

// y = x w^T + bias through one instruction set's kernels; x is float [rows][inputs].
nb::ndarray<nb::numpy, float> multiply(const PackedLinear& linear, const AnyArray& x,
                                       const std::string& isa) {
  const KernelTable& kernels = choose_kernels(isa);
  const Linear& w = linear.view();
  const float* values = dense<float>(x, "x", std::size_t{2});
  if (x.shape(1) != static_cast<std::size_t>(w.inputs)) refuse("x has not the weight's inputs");
  const int rows = static_cast<int>(x.shape(0));
  InputForms forms;
  (w.format == Format::kBf16 ? forms.plain : forms.quant) = true;
  const ActsBuffer buffer(rows, w.inputs, kernels.plain_bytes, forms);
  const Acts acts = buffer.view(forms);
  // An RMS norm of weight 1 whose eps makes the factor 1: the way rows become activations.
  const std::vector<float> ones(static_cast<std::size_t>(w.inputs), 1.0f);
  for (int r = 0; r < rows; ++r) {
    const float* row = values + static_cast<std::size_t>(r) * x.shape(1);
    double squares = 0.0;
    for (int k = 0; k < w.inputs; ++k) squares += static_cast<double>(row[k]) * row[k];
    const float eps = static_cast<float>(1.0 - squares / w.inputs);
    kernels.norm(row, w.inputs, w.inputs, ones.data(), eps, 1, acts, r);
  }
  const std::size_t width = static_cast<std::size_t>(w.panels) * kLanes;
  auto out = make_array<float>({static_cast<std::size_t>(rows), width});
  std::vector<float> scratch(gemm_scratch_floats(w.panels));
  const unsigned before = kernels.enter();
  kernels.gemm_store({&w, &acts, 0, rows, 0, w.panels, scratch.data()}, out.data(),
                     static_cast<int>(width));
  kernels.leave(before);
  return out;
}

// One token per row of logits (changed where masked): the sampler without a model.
std::vector<int32_t> sample(const nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& logits,
                            const std::vector<float>& temperature, const std::vector<float>& top_p,
                            const std::vector<int32_t>& top_k, const std::vector<float>& min_p,
                            const std::vector<double>& uniforms, const Masks& masks,
                            const std::string& isa) {
  const std::size_t rows = logits.shape(0);
  const int vocab = to_int32(static_cast<int64_t>(logits.shape(1)), "vocab");
  if (vocab < 1) refuse("no logits");
  if (temperature.size() != rows || top_p.size() != rows || top_k.size() != rows ||
      min_p.size() != rows || uniforms.size() != rows) {
    refuse("one parameter per row is needed");
  }
  const std::vector<TokenMask> checked = to_masks(masks);
  Sampler sampler(choose_kernels(isa));
  std::vector<int32_t> tokens;
  constexpr int kColumns = kHeadUnitPanels * kLanes;
  std::vector<Peak> peaks(static_cast<std::size_t>(ceil_div(vocab, kColumns)));
  for (std::size_t r = 0; r < rows; ++r) {
    float* row = logits.data() + r * static_cast<std::size_t>(vocab);
    for (int i = 0; i < vocab; ++i) {
      Peak& peak = peaks[static_cast<std::size_t>(i / kColumns)];
      if (i % kColumns == 0 || row[i] > peak.value) peak = {row[i], i};
    }
    const LogitsRow line{row, peaks.data(), vocab, static_cast<int>(peaks.size())};
    for (const TokenMask& mask : checked) {
      for (const int32_t id : mask.token_ids) {
        if (id < 0 || id >= vocab) refuse("masked id out of range");
      }
      if (mask.row == static_cast<int>(r)) Sampler::mask(line, mask.token_ids);
    }
    if (temperature[r] == 0.0f) {
      tokens.push_back(Sampler::likeliest(line));
    } else {
      tokens.push_back(sampler.sample(
          line, {temperature[r], top_p[r], top_k[r], min_p[r], uniforms[r]}));
    }
  }
  return tokens;
}

std::vector<std::string> usable_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : usable_kernels()) names.emplace_back(table->name);
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("usable_isas", &usable_isas, "Instruction sets that can run here, best first.");
  m.def("uniform", &uniform_of, "seed"_a, "position"_a);
  m.def("multiply", &multiply, "linear"_a, "x"_a, "isa"_a);
  m.def("sample", &sample, "logits"_a, "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a,
        "uniforms"_a, "masks"_a, "isa"_a);
  m.def("block_bytes", [](int layers, int kv_heads, int padded_head_dim, int block_size) {
    if (layers < 1 || kv_heads < 1 || padded_head_dim < 1 || block_size < 1) {
      refuse("sizes must be at least 1");
    }
    ModelShape shape;
    shape.layers = layers;
    shape.kv_heads = kv_heads;
    shape.padded_head_dim = padded_head_dim;
    return Runner::block_bytes(shape, block_size);
  }, "layers"_a, "kv_heads"_a, "padded_head_dim"_a, "block_size"_a);

  nb::class_<PackedLinear>(m, "PackedLinear")
      .def_prop_ro("format", [](const PackedLinear& p) { return format_name(p.view().format); })
      .def_prop_ro("outputs", [](const PackedLinear& p) { return p.view().outputs; })
      .def_prop_ro("inputs", [](const PackedLinear& p) { return p.view().inputs; })
      .def_prop_ro("num_bytes", &PackedLinear::bytes)
      .def("dequantise", &dequantise);
  nb::class_<Arena>(m, "Arena").def(nb::init<>());
  m.def("pack", &pack, "arena"_a, "sources"_a, "source_type"_a, "columns"_a, "rows"_a, "inputs"_a.none(),
        "bias"_a.none(), "format"_a, "outputs"_a, "threads"_a);

  nb::class_<ModelBuilder>(m, "ModelBuilder")
      .def("__init__", &init_builder, nb::kw_only(), "layers"_a, "hidden"_a, "heads"_a,
           "kv_heads"_a, "head_dim"_a, "padded_head_dim"_a, "intermediate"_a, "vocab"_a,
           "positions"_a, "eps"_a, "attention_scale"_a)
      .def("add_layer", &add_layer, nb::kw_only(), "query"_a, "key"_a, "value"_a, "output"_a,
           "gate_up"_a, "down"_a, "input_norm"_a, "post_norm"_a, "query_norm"_a.none(),
           "key_norm"_a.none(), "window"_a, "rotate"_a)
      .def("set_embedding", &set_embedding, "rows"_a)
      .def("set_head", &set_head, "head"_a, "final_norm"_a)
      .def("set_rotation", &set_rotation, "cos"_a, "sin"_a)
      .def_prop_ro("weight_bytes", [](const ModelBuilder& self) {
        self.model().check_complete();
        return self.model().weight_bytes();
      });

  nb::class_<GuardedRunner>(m, "Runner")
      .def("__init__", &init_runner, "model"_a, nb::kw_only(), "isa"_a, "threads"_a,
           "max_tokens"_a, "num_blocks"_a, "block_size"_a)
      .def("execute", &execute, "token_ids"_a, "positions"_a, "query_start"_a, "seq_lens"_a,
           "block_tables"_a, "logits_rows"_a, "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a,
           "seeds"_a, "sample_positions"_a, "masks"_a, "want_logits"_a)
      .def_prop_ro("isa", [](const GuardedRunner& self) { return self.get().isa(); })
      .def_prop_ro("threads",
                   [](const GuardedRunner& self) { return self.get().options().threads; });
}

}  // namespace trioengine
