// The model while Python puts it together.
#pragma once

#include <memory>
#include <utility>

#include "../model.h"
#include "arguments.h"

namespace trioengine {

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

}  // namespace trioengine
