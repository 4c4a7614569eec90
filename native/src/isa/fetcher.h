// Asking for what comes next while something else is computed.
#pragma once

#include "math.h"

namespace trioengine {
namespace {

// Hands out prefetches of what comes next, an even share with each step of a product.
class Fetcher {
 public:
  Fetcher(const Ahead& ahead, int steps) : at_(ahead.at), end_(ahead.end) {
    const size_t lines = static_cast<size_t>(end_ - at_) / 64;
    per_step_ = (lines + static_cast<size_t>(steps) - 1) / static_cast<size_t>(steps) * 64;
  }

  inline __attribute__((always_inline)) void step() {
    const uint8_t* const stop = at_ + per_step_ < end_ ? at_ + per_step_ : end_;
    for (; at_ < stop; at_ += 64) {
      __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  size_t per_step_;
};

}  // namespace
}  // namespace trioengine
