// Parts of the engine by themselves, for tests.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../cpu.h"
#include "../numeric.h"
#include "../packing.h"
#include "../sampler.h"
#include "../step.h"
#include "../uniform.h"
#include "../workspace.h"
#include "arguments.h"
#include "bind.h"

namespace trioengine {
namespace {

using namespace nb::literals;

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
  std::vector<float> scratch(gemm_scratch_floats(w.panels, forms.quant ? w.inputs : 0));
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
  StepView step;
  step.num_rows = to_int32(static_cast<int64_t>(rows), "rows");
  step.temperature = temperature.data();
  step.top_p = top_p.data();
  step.top_k = top_k.data();
  step.min_p = min_p.data();
  step.edits.masks = to_masks(masks);
  check_sampling(step, vocab);
  Sampler sampler(choose_kernels(isa));
  std::vector<int32_t> tokens;
  constexpr int kColumns = kHeadUnitPanels * kLanes;
  std::vector<Peak> peaks(static_cast<std::size_t>(ceil_div(vocab, kColumns)));
  std::vector<float> sums(peaks.size());
  for (std::size_t r = 0; r < rows; ++r) {
    float* row = logits.data() + r * static_cast<std::size_t>(vocab);
    for (int i = 0; i < vocab; ++i) {
      Peak& peak = peaks[static_cast<std::size_t>(i / kColumns)];
      if (i % kColumns == 0 || row[i] > peak.value) peak = {row[i], i};
    }
    std::fill(sums.begin(), sums.end(), kStale);
    const LogitsRow line{row, kColumns, peaks.data(), sums.data(), {}, vocab,
                         static_cast<int>(peaks.size())};
    step.edits.apply(static_cast<int>(r), line);
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

void bind_parts(nb::module_& m) {
  m.def("usable_isas", &usable_isas, "Instruction sets that can run here, best first.");
  m.def("uniform", &uniform_of, "seed"_a, "position"_a);
  m.def("multiply", &multiply, "linear"_a, "x"_a, "isa"_a);
  m.def("sample", &sample, "logits"_a, "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a,
        "uniforms"_a, "masks"_a, "isa"_a);
}

}  // namespace trioengine
