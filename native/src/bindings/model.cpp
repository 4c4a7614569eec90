// Building a model of packed weights, from Python.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <optional>
#include <utility>

#include "bind.h"
#include "model_builder.h"

namespace trioengine {
namespace {

using namespace nb::literals;

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

}  // namespace

void bind_model(nb::module_& m) {
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
}

}  // namespace trioengine
