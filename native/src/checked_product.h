// Sizes that come from Python are multiplied here, so that none wraps round to a small one.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <stdexcept>

namespace trioengine {

// Throws std::invalid_argument where the product does not fit.
inline std::size_t checked_product(std::initializer_list<std::size_t> factors) {
  std::size_t product = 1;
  for (const std::size_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) {
      throw std::invalid_argument("sizes are too large");
    }
  }
  return product;
}

}  // namespace trioengine
