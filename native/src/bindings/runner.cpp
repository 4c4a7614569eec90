// The runner: one step a call, from Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
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

  void execute(const StepView& step, const StepOutput& output) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) throw std::runtime_error("a step is running already");
    runner_.execute(step, output);
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
  step.edits.masks = to_masks(masks);
  return step;
}

// The optional arrays of SamplingRows, as tuples in the order of their fields.
using AllowArrays = std::optional<std::tuple<AnyArray, AnyArray>>;
using BiasArrays = std::optional<std::tuple<AnyArray, AnyArray, AnyArray>>;
using PenaltyArrays =
    std::optional<std::tuple<AnyArray, AnyArray, AnyArray, AnyArray, AnyArray, AnyArray>>;
using MaybeArray = std::optional<AnyArray>;

AllowView to_allow(const AllowArrays& arrays, Latch* filled, int rows) {
  AllowView view;
  if (!arrays.has_value()) return view;
  const auto& [words, row_masks] = *arrays;
  check_array(words, "allow.words", nb::dtype<uint32_t>(), 2);
  if (!is_dense(words, 1)) refuse("allow.words: a row is not contiguous");
  view.words = static_cast<const uint32_t*>(words.data());
  view.stride = words.stride(0);
  view.filled = filled;
  view.masks = static_cast<int>(words.shape(0));
  view.width = static_cast<int>(words.shape(1));
  view.row_masks = dense<int32_t>(row_masks, "allow.row_masks", rows);
  return view;
}

BiasView to_bias(const BiasArrays& arrays, int rows) {
  BiasView view;
  if (!arrays.has_value()) return view;
  const auto& [starts, token_ids, values] = *arrays;
  view.starts = dense<int32_t>(starts, "bias.starts", rows + 1);
  view.token_ids = dense<int32_t>(token_ids, "bias.token_ids", std::size_t{1});
  view.entries = static_cast<int>(token_ids.shape(0));
  view.values = dense<float>(values, "bias.values", view.entries);
  return view;
}

PenaltiesView to_penalties(const PenaltyArrays& arrays, int rows) {
  PenaltiesView view;
  if (!arrays.has_value()) return view;
  const auto& [presence, frequency, repetition, starts, token_ids, counts] = *arrays;
  view.presence = dense<float>(presence, "penalties.presence", rows);
  view.frequency = dense<float>(frequency, "penalties.frequency", rows);
  view.repetition = dense<float>(repetition, "penalties.repetition", rows);
  view.starts = dense<int32_t>(starts, "penalties.starts", rows + 1);
  view.token_ids = dense<int32_t>(token_ids, "penalties.token_ids", std::size_t{1});
  view.entries = static_cast<int>(token_ids.shape(0));
  view.counts = dense<int32_t>(counts, "penalties.counts", view.entries);
  return view;
}

const int32_t* to_column(const MaybeArray& array, const char* name, int rows) {
  return array.has_value() ? dense<int32_t>(*array, name, rows) : nullptr;
}

// Arrays for the logprobs of a step; they belong to Python.
struct LogprobArrays {
  LogprobArrays(std::size_t rows, std::size_t width)
      : chosen(make_array<float>({rows})),
        ranks(make_array<int32_t>({rows})),
        top_ids(make_array<int32_t>({rows, width})),
        top(make_array<float>({rows, width})) {
    // What no row fills is at least sound.
    std::fill(chosen.data(), chosen.data() + rows, kLeastLogprob);
    std::fill(ranks.data(), ranks.data() + rows, 0);
    std::fill(top_ids.data(), top_ids.data() + rows * width, -1);
    std::fill(top.data(), top.data() + rows * width, kLeastLogprob);
  }

  LogprobsOut view(int width) {
    return {chosen.data(), ranks.data(), top_ids.data(), top.data(), width};
  }

  nb::ndarray<nb::numpy, float> chosen;
  nb::ndarray<nb::numpy, int32_t> ranks;
  nb::ndarray<nb::numpy, int32_t> top_ids;
  nb::ndarray<nb::numpy, float> top;
};

// The most that any row wants, within what a check that comes later allows.
int widest(const StepView& step, int vocab) {
  int width = 0;
  for (int i = 0; i < step.num_rows; ++i) width = std::max(width, step.logprobs_k[i]);
  return std::min(width, vocab);
}

nb::object execute(GuardedRunner& self, const AnyArray& token_ids, const AnyArray& positions,
                   const AnyArray& query_start, const AnyArray& seq_lens,
                   const AnyArray& block_tables, const AnyArray& logits_rows,
                   const AnyArray& temperature, const AnyArray& top_p, const AnyArray& top_k,
                   const AnyArray& min_p, const AnyArray& seeds, const AnyArray& sample_positions,
                   const Masks& masks, const AllowArrays& allow, Latch* allow_filled,
                   const BiasArrays& bias, const PenaltyArrays& penalties, const MaybeArray& logprobs_k,
                   const MaybeArray& targets, bool want_logits) {
  const StepArrays arrays{token_ids,   positions, query_start, seq_lens, block_tables, logits_rows,
                          temperature, top_p,     top_k,       min_p,    seeds, sample_positions};
  StepView step = to_step(arrays, masks);
  step.edits.allow = to_allow(allow, allow_filled, step.num_rows);
  step.edits.bias = to_bias(bias, step.num_rows);
  step.edits.penalties = to_penalties(penalties, step.num_rows);
  step.logprobs_k = to_column(logprobs_k, "logprobs_k", step.num_rows);
  step.targets = to_column(targets, "targets", step.num_rows);
  const int vocab = self.get().model().shape().vocab;
  const std::size_t rows = static_cast<std::size_t>(step.num_rows);
  auto tokens = make_array<int32_t>({rows});
  nb::object logits = nb::none(), logprobs = nb::none();
  StepOutput output;
  output.tokens = tokens.data();
  if (want_logits) {
    auto array = make_array<float>({rows, static_cast<std::size_t>(vocab)});
    output.logits = array.data();
    logits = nb::cast(array);
  }
  if (step.logprobs_k != nullptr) {
    const int width = widest(step, vocab);
    LogprobArrays made(rows, static_cast<std::size_t>(width));
    output.logprobs = made.view(width);
    logprobs = nb::make_tuple(made.chosen, made.ranks, made.top_ids, made.top);
  }
  {
    const nb::gil_scoped_release unlocked;
    self.execute(step, output);
  }
  return nb::make_tuple(tokens, logprobs, logits);
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
  nb::class_<Latch>(m, "Latch")
      .def(nb::init<int>(), "count"_a)
      .def("count_down", &Latch::count_down);
  nb::class_<GuardedRunner>(m, "Runner")
      .def("__init__", &init_runner, "model"_a, nb::kw_only(), "isa"_a, "threads"_a,
           "max_tokens"_a, "num_blocks"_a, "block_size"_a)
      .def("execute", &execute, "token_ids"_a, "positions"_a, "query_start"_a, "seq_lens"_a,
           "block_tables"_a, "logits_rows"_a, "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a,
           "seeds"_a, "sample_positions"_a, "masks"_a, "allow"_a.none(), "allow_filled"_a.none(), "bias"_a.none(),
           "penalties"_a.none(), "logprobs_k"_a.none(), "targets"_a.none(), "want_logits"_a)
      .def_prop_ro("isa", [](const GuardedRunner& self) { return self.get().isa(); })
      .def_prop_ro("threads",
                   [](const GuardedRunner& self) { return self.get().options().threads; });
}

}  // namespace trioengine
