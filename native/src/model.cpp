#include "model.h"

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels.h"
#include "numeric.h"

namespace trioengine {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("model: " + what);
}

void check_linear(const PackedPtr& weight, const char* name, int outputs, int inputs) {
  if (weight == nullptr) refuse(std::string(name) + " is missing");
  const Linear& w = weight->view();
  if (w.panels * kLanes != outputs || w.inputs != inputs) {
    refuse(std::string(name) + " is " + std::to_string(w.panels * kLanes) + " x " +
           std::to_string(w.inputs) + ", expected " + std::to_string(outputs) + " x " +
           std::to_string(inputs));
  }
}

void check_vector(const std::vector<float>& values, const char* name, int size) {
  if (values.size() != static_cast<std::size_t>(size)) {
    refuse(std::string(name) + " has " + std::to_string(values.size()) + " values, expected " +
           std::to_string(size));
  }
}

// Far beyond any model, and such that no product of two rows and columns leaves an int.
constexpr int kMostOfAnything = 1 << 24;
constexpr int kMostPositions = 1 << 30;

void check_size(int value, const char* name, int most = kMostOfAnything) {
  if (value < 1 || value > most) {
    refuse(std::string(name) + " must be in [1, " + std::to_string(most) + "], got " +
           std::to_string(value));
  }
}

}  // namespace

int ModelShape::hidden_width() const { return round_up(hidden, kGroup); }

void InputForms::add(const PackedPtr& weight) {
  (weight->view().format == Format::kBf16 ? plain : quant) = true;
}

Model::Model(const ModelShape& shape) : shape_(shape) {
  check_size(shape.layers, "layers");
  check_size(shape.hidden, "hidden");
  check_size(shape.heads, "heads");
  check_size(shape.kv_heads, "kv_heads");
  check_size(shape.head_dim, "head_dim");
  check_size(shape.intermediate, "intermediate");
  check_size(shape.vocab, "vocab");
  check_size(shape.positions, "positions", kMostPositions);
  if (shape.heads % shape.kv_heads != 0) refuse("heads must be a multiple of kv_heads");
  if (shape.padded_head_dim % kGroup != 0 || shape.padded_head_dim < shape.head_dim ||
      shape.padded_head_dim > kMaxHeadDim) {
    refuse("padded_head_dim must be a multiple of 32 that holds head_dim, at most " +
           std::to_string(kMaxHeadDim));
  }
  if (shape.heads > kMostOfAnything / kMaxHeadDim) refuse("heads are too many");
  if (shape.intermediate % kGroup != 0) refuse("intermediate must be a multiple of 32");
  if (!(shape.eps >= 0.0f) || !std::isfinite(shape.attention_scale)) {
    refuse("eps and attention_scale must be finite");
  }
}

void Model::add_layer(Layer layer) {
  const int width = shape_.hidden_width(), queries = shape_.query_width();
  const int keys = shape_.kv_heads * shape_.padded_head_dim;
  if (layers_.size() == static_cast<std::size_t>(shape_.layers)) refuse("too many layers");
  check_linear(layer.query, "query", queries, width);
  check_linear(layer.key, "key", keys, width);
  check_linear(layer.value, "value", keys, width);
  check_linear(layer.output, "output", width, queries);
  check_linear(layer.gate_up, "gate_up", 2 * shape_.intermediate, width);
  check_linear(layer.down, "down", width, shape_.intermediate);
  check_vector(layer.input_norm, "input_norm", width);
  check_vector(layer.post_norm, "post_norm", width);
  if (!layer.query_norm.empty()) {
    check_vector(layer.query_norm, "query_norm", shape_.padded_head_dim);
  }
  if (!layer.key_norm.empty()) check_vector(layer.key_norm, "key_norm", shape_.padded_head_dim);
  if (layer.window < 0) refuse("window is negative");
  layers_.push_back(std::move(layer));
}

void Model::set_embedding(const uint16_t* rows) {
  const std::size_t bytes = static_cast<std::size_t>(shape_.vocab) *
                            static_cast<std::size_t>(shape_.hidden) * sizeof(uint16_t);
  embedding_ = HugeBuffer(bytes);
  std::memcpy(embedding_.as<void>(), rows, bytes);
}

void Model::set_head(PackedPtr head, std::vector<float> final_norm) {
  check_linear(head, "head", round_up(shape_.vocab, kLanes), shape_.hidden_width());
  if (head->view().outputs != shape_.vocab) refuse("head has not vocab outputs");
  check_vector(final_norm, "final_norm", shape_.hidden_width());
  head_ = std::move(head);
  final_norm_ = std::move(final_norm);
}

void Model::set_rotation(const float* cos, const float* sin, int64_t count) {
  const int64_t expected = static_cast<int64_t>(shape_.positions) * (shape_.padded_head_dim / 2);
  if (count != expected) {
    refuse("rotation has " + std::to_string(count) + " values, expected " +
           std::to_string(expected));
  }
  const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(float);
  cos_ = HugeBuffer(bytes);
  sin_ = HugeBuffer(bytes);
  std::memcpy(cos_.as<void>(), cos, bytes);
  std::memcpy(sin_.as<void>(), sin, bytes);
}

void Model::check_complete() const {
  if (layers_.size() != static_cast<std::size_t>(shape_.layers)) refuse("layers are missing");
  if (head_ == nullptr) refuse("head is missing");
  if (embedding_.size() == 0) refuse("embedding is missing");
  if (cos_.size() == 0) refuse("rotation is missing");
}

std::size_t Model::weight_bytes() const {
  std::size_t total = embedding_.size() + head_->bytes();
  for (const Layer& layer : layers_) {
    for (const PackedPtr& weight :
         {layer.query, layer.key, layer.value, layer.output, layer.gate_up, layer.down}) {
      total += weight->bytes();
    }
  }
  return total;
}

}  // namespace trioengine
