// The runner: one step a call, from Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "../cpu.h"
#include "../step.h"
#include "arguments.h"
#include "bind.h"
#include "model_builder.h"

namespace trioengine {
namespace {

using namespace nb::literals;

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

}  // namespace

void bind_runner(nb::module_& m) {
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
