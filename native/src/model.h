// The weights of a decoder of the Llama family, checked to fit together.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "huge_buffer.h"
#include "packing.h"

namespace trioengine {

struct ModelShape {
  int layers = 0;
  int hidden = 0;      // real width of the residual
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;    // real
  int padded_head_dim = 0;
  int intermediate = 0;  // padded to kGroup
  int vocab = 0;
  int positions = 0;   // longest sequence
  float eps = 0.0f;    // of every RMS norm
  float attention_scale = 0.0f;

  int hidden_width() const;  // padded to kGroup
  int query_width() const { return heads * padded_head_dim; }
};

using PackedPtr = std::shared_ptr<const PackedLinear>;

struct Layer {
  PackedPtr query, key, value, output, gate_up, down;
  std::vector<float> input_norm, post_norm;   // [hidden_width]
  std::vector<float> query_norm, key_norm;    // [padded_head_dim] or empty
  int window = 0;     // tokens a query sees; 0 means all
  bool rotate = true;
};

// Which forms of activations the matrices of a model read.
struct InputForms {
  bool plain = false;
  bool quant = false;

  void add(const PackedPtr& weight);
};

class Model {
 public:
  // Throws std::invalid_argument where the shape makes no sense.
  explicit Model(const ModelShape& shape);

  // Throw std::invalid_argument, naming the part, where a size does not fit the shape.
  void add_layer(Layer layer);
  void set_embedding(const uint16_t* rows);  // bf16 [vocab][hidden], copied
  void set_head(PackedPtr head, std::vector<float> final_norm);
  void set_rotation(const float* cos, const float* sin, int64_t count);  // [positions][dim / 2]
  // Throws std::invalid_argument where a part is missing.
  void check_complete() const;

  const ModelShape& shape() const { return shape_; }
  const std::vector<Layer>& layers() const { return layers_; }
  const Linear& head() const { return head_->view(); }
  const PackedPtr& head_weight() const { return head_; }
  const float* final_norm() const { return final_norm_.data(); }
  const uint16_t* embedding() const { return embedding_.as<uint16_t>(); }
  const float* cos() const { return cos_.as<float>(); }
  const float* sin() const { return sin_.as<float>(); }
  std::size_t weight_bytes() const;

 private:
  ModelShape shape_;
  std::vector<Layer> layers_;
  PackedPtr head_;
  std::vector<float> final_norm_;
  HugeBuffer embedding_, cos_, sin_;
};

}  // namespace trioengine
