// The one random number of a sampled token: the same as engine_proc/uniform.py's.
#pragma once

#include <cstdint>

namespace trioengine {

inline uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The uniform of (seed, position): SplitMix64 as a counter-based generator.
inline double uniform_of(uint64_t seed, int64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t state = mix_bits(seed + kGolden) + static_cast<uint64_t>(position) * kGolden;
  return static_cast<double>(mix_bits(state) >> 11) * 0x1p-53;
}

}  // namespace trioengine
