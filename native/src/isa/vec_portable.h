// 16-lane vectors in the compiler's own vector extension (GCC and Clang): SSE2 on x86-64, NEON on
// arm64, plain code elsewhere. Multiply and add round separately, so results are the same with
// every compiler.
#pragma once

#include <cmath>

#include "../numeric.h"

#define TRIO_INLINE static inline __attribute__((always_inline))

namespace trioengine {
namespace {

typedef float Vf __attribute__((vector_size(64)));
typedef int32_t Vi __attribute__((vector_size(64)));
typedef uint8_t Vb __attribute__((vector_size(64)));
typedef uint16_t Vh __attribute__((vector_size(32)));
typedef uint32_t Vu __attribute__((vector_size(64)));

TRIO_INLINE Vf vset(float x) { return Vf{} + x; }
TRIO_INLINE Vf vload(const float* p) {
  Vf x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
TRIO_INLINE void vstore(float* p, Vf x) { std::memcpy(p, &x, sizeof x); }
TRIO_INLINE Vf vadd(Vf a, Vf b) { return a + b; }
TRIO_INLINE Vf vsub(Vf a, Vf b) { return a - b; }
TRIO_INLINE Vf vmul(Vf a, Vf b) { return a * b; }
TRIO_INLINE Vf vdiv(Vf a, Vf b) { return a / b; }
TRIO_INLINE Vf vfma(Vf a, Vf b, Vf c) { return a * b + c; }
TRIO_INLINE Vf vfnma(Vf a, Vf b, Vf c) { return c - a * b; }
TRIO_INLINE Vf vfms(Vf a, Vf b, Vf c) { return a * b - c; }
TRIO_INLINE Vf vmax(Vf a, Vf b) { return a > b ? a : b; }
TRIO_INLINE Vf vmin(Vf a, Vf b) { return a < b ? a : b; }
TRIO_INLINE Vf vabs(Vf a) { return (Vf)((Vu)a & 0x7fffffffu); }
TRIO_INLINE Vf vround(Vf a) {  // |a| < 2^22: adding 1.5 * 2^23 leaves no fraction bits
  const Vf magic = vset(12582912.0f);
  return (a + magic) - magic;
}
TRIO_INLINE Vi iround(Vf a) { return __builtin_convertvector(vround(a), Vi); }
TRIO_INLINE Vf vclamp_exponent(Vf a) { return vmax(a, vset(-126.0f)); }
TRIO_INLINE Vf vreciprocal(Vf a) { return vdiv(vset(1.0f), a); }
TRIO_INLINE Vf vscale2(Vf a, Vf n) { return (Vf)((Vi)a + (iround(n) << 23)); }
TRIO_INLINE float vsum(Vf a) {
  for (int step = 8; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) a[i] += a[i + step];
  }
  return a[0];
}
TRIO_INLINE float vmaximum(Vf a) {
  float most = a[0];
  for (int i = 1; i < 16; ++i) most = a[i] > most ? a[i] : most;
  return most;
}

TRIO_INLINE Vf vkeep(Vf x, int low, int high, Vf fill) {
  const Vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return ((lane >= low) & (lane < high)) ? x : fill;
}
TRIO_INLINE unsigned vequal(Vf a, Vf x) {
  unsigned equal = 0;
  for (unsigned i = 0; i < 16; ++i) equal |= static_cast<unsigned>(a[i] == x[i]) << i;
  return equal;
}
TRIO_INLINE unsigned vabove(Vf a, Vf x) {
  unsigned above = 0;
  for (unsigned i = 0; i < 16; ++i) above |= static_cast<unsigned>(a[i] > x[i]) << i;
  return above;
}
TRIO_INLINE Vf vpick(unsigned bits, Vf x, Vf fill) {
  const Vi lanes = {1,     2,     4,      8,      16,     32,     64,      128,
                    1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return (lanes & static_cast<int32_t>(bits)) != 0 ? x : fill;
}

TRIO_INLINE Vf vload_bf16(const uint16_t* p) {
  Vh raw;
  std::memcpy(&raw, p, sizeof raw);
  return (Vf)(__builtin_convertvector(raw, Vu) << 16);
}
TRIO_INLINE void vstore_bf16(uint16_t* p, Vf x) {
  const Vu bits = (Vu)x;
  const Vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Vu clean = ((bits & 0x7fffffffu) > 0x7f800000u) ? Vu{} + 0x7fc0u : rounded;
  const Vh out = __builtin_convertvector(clean, Vh);
  std::memcpy(p, &out, sizeof out);
}
TRIO_INLINE Vf vload_half(const uint16_t* p) {
  Vf out;
  for (int i = 0; i < 16; ++i) out[i] = half_to_float(p[i]);
  return out;
}

TRIO_INLINE Vi iset(int32_t x) { return Vi{} + x; }
TRIO_INLINE Vi iadd(Vi a, Vi b) { return a + b; }
TRIO_INLINE Vf itof(Vi a) { return __builtin_convertvector(a, Vf); }
TRIO_INLINE int32_t isum(Vi a) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += a[i];
  return sum;
}
TRIO_INLINE void istore_bytes(int8_t* p, Vi a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(a[i]);
}

TRIO_INLINE Vb bload(const uint8_t* p) {
  Vb x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
TRIO_INLINE Vb blow(Vb a) { return a & 15; }
TRIO_INLINE Vb bhigh(Vb a) { return a >> 4; }

struct Quad {
  int32_t x[4];
};
TRIO_INLINE Quad bcast_quad(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
TRIO_INLINE Vi dot_bytes(Vi acc, Vb w, Quad x) {
  const Vu words = (Vu)w;  // little endian: input 0 is the lowest byte
  acc += (Vi)(words & 0xffu) * x.x[0];
  acc += (Vi)((words >> 8) & 0xffu) * x.x[1];
  acc += (Vi)((words >> 16) & 0xffu) * x.x[2];
  acc += (Vi)(words >> 24) * x.x[3];
  return acc;
}
TRIO_INLINE Vi dot_nibbles(Vi acc, Vb w, Quad x) { return dot_bytes(acc, w, x); }

using Plain = float;
TRIO_INLINE void vstore_plain(Plain* p, Vf x) { vstore(p, x); }
TRIO_INLINE void vstore_plains(Plain* p, Vf x, Vf y) {
  vstore(p, x);
  vstore(p + 16, y);
}

struct WeightPair {
  Vf even, odd;
};
struct InputPair {
  float even, odd;
};
TRIO_INLINE WeightPair load_pair(const uint16_t* p) {
  Vu raw;
  std::memcpy(&raw, p, sizeof raw);
  return {(Vf)(raw << 16), (Vf)(raw & 0xffff0000u)};
}
TRIO_INLINE InputPair bcast_pair(const Plain* p) { return {p[0], p[1]}; }
TRIO_INLINE Vf dot_pair(Vf acc, WeightPair w, InputPair x) {
  acc += w.even * x.even;
  return acc + w.odd * x.odd;
}
constexpr int kTileRows = 2, kTilePanels = 1;
constexpr int kNarrowTileRows = 2;
constexpr int kQuantRows = 2;
constexpr int kAttentionTile = 2;

TRIO_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace
}  // namespace trioengine
