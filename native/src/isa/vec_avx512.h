// 16-lane vectors on AVX-512 (F, BW, VL, DQ). With TRIO_BF16 pairs are multiplied by vdpbf16ps and
// activations are bf16; with TRIO_VNNI bytes are multiplied by vpdpbusd.
#pragma once

#include <immintrin.h>

#include "../numeric.h"

#define TRIO_INLINE static inline __attribute__((always_inline))

namespace trioengine {
namespace {

using Vf = __m512;
using Vi = __m512i;
using Vb = __m512i;  // 64 unsigned bytes

TRIO_INLINE Vf vset(float x) { return _mm512_set1_ps(x); }
TRIO_INLINE Vf vload(const float* p) { return _mm512_loadu_ps(p); }
TRIO_INLINE void vstore(float* p, Vf x) { _mm512_storeu_ps(p, x); }
TRIO_INLINE Vf vadd(Vf a, Vf b) { return _mm512_add_ps(a, b); }
TRIO_INLINE Vf vsub(Vf a, Vf b) { return _mm512_sub_ps(a, b); }
TRIO_INLINE Vf vmul(Vf a, Vf b) { return _mm512_mul_ps(a, b); }
TRIO_INLINE Vf vdiv(Vf a, Vf b) { return _mm512_div_ps(a, b); }
TRIO_INLINE Vf vfma(Vf a, Vf b, Vf c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
TRIO_INLINE Vf vfnma(Vf a, Vf b, Vf c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
TRIO_INLINE Vf vfms(Vf a, Vf b, Vf c) { return _mm512_fmsub_ps(a, b, c); }    // a * b - c
TRIO_INLINE Vf vmax(Vf a, Vf b) { return _mm512_max_ps(a, b); }
TRIO_INLINE Vf vmin(Vf a, Vf b) { return _mm512_min_ps(a, b); }
TRIO_INLINE Vf vabs(Vf a) { return _mm512_abs_ps(a); }
TRIO_INLINE Vf vround(Vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT); }
TRIO_INLINE Vf vclamp_exponent(Vf a) { return a; }  // vscale2 takes any n
TRIO_INLINE Vf vreciprocal(Vf a) {  // within 2^-23; a division would take twice as long
  const Vf guess = _mm512_rcp14_ps(a);
  return _mm512_mul_ps(guess, _mm512_fnmadd_ps(a, guess, _mm512_set1_ps(2.0f)));
}
TRIO_INLINE Vf vfraction(Vf a) { return _mm512_reduce_ps(a, 9); }  // a - floor(a), 0 if infinite
TRIO_INLINE Vf vscale2(Vf a, Vf n) { return _mm512_scalef_ps(a, n); }  // a * 2^floor(n)
TRIO_INLINE float vsum(Vf a) { return _mm512_reduce_add_ps(a); }
TRIO_INLINE float vmaximum(Vf a) { return _mm512_reduce_max_ps(a); }

// Lanes [low, high) of x, `fill` elsewhere.
TRIO_INLINE __mmask16 lane_range(int low, int high) {
  const unsigned below_high = high >= 16 ? 0xffffu : (high <= 0 ? 0u : (1u << high) - 1u);
  const unsigned below_low = low >= 16 ? 0xffffu : (low <= 0 ? 0u : (1u << low) - 1u);
  return static_cast<__mmask16>(below_high & ~below_low);
}
TRIO_INLINE Vf vkeep(Vf x, int low, int high, Vf fill) {
  return _mm512_mask_mov_ps(fill, lane_range(low, high), x);
}
// A bit for each lane equal to x's, the first lane's lowest.
TRIO_INLINE unsigned vequal(Vf a, Vf x) { return _mm512_cmp_ps_mask(a, x, _CMP_EQ_OQ); }
TRIO_INLINE unsigned vabove(Vf a, Vf x) { return _mm512_cmp_ps_mask(a, x, _CMP_GT_OQ); }
// Lanes of x whose bit is set, `fill` elsewhere.
TRIO_INLINE Vf vpick(unsigned bits, Vf x, Vf fill) {
  return _mm512_mask_mov_ps(fill, static_cast<__mmask16>(bits), x);
}

TRIO_INLINE Vf vload_bf16(const uint16_t* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
TRIO_INLINE void vstore_bf16(uint16_t* p, Vf x) {
#ifdef TRIO_BF16
  const __m256i out = (__m256i)_mm512_cvtneps_pbh(x);
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i high = _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan,
                                             _mm512_set1_epi32(0x7fc0));
  const __m256i out = _mm512_cvtepi32_epi16(high);
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), out);
}
TRIO_INLINE Vf vload_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

TRIO_INLINE Vi iset(int32_t x) { return _mm512_set1_epi32(x); }
TRIO_INLINE Vi iadd(Vi a, Vi b) { return _mm512_add_epi32(a, b); }
TRIO_INLINE Vi iround(Vf a) { return _mm512_cvtps_epi32(a); }
TRIO_INLINE Vf itof(Vi a) { return _mm512_cvtepi32_ps(a); }
TRIO_INLINE int32_t isum(Vi a) { return _mm512_reduce_add_epi32(a); }
TRIO_INLINE void istore_bytes(int8_t* p, Vi a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}

TRIO_INLINE Vb bload(const uint8_t* p) { return _mm512_loadu_si512(p); }
TRIO_INLINE Vb blow(Vb a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
TRIO_INLINE Vb bhigh(Vb a) {
  return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}

#ifdef TRIO_VNNI
struct Quad {  // 4 signed bytes, for all columns
  __m512i bytes;
};
TRIO_INLINE Quad bcast_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
TRIO_INLINE Vi dot_bytes(Vi acc, Vb w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x.bytes); }
TRIO_INLINE Vi dot_nibbles(Vi acc, Vb w, Quad x) { return _mm512_dpbusd_epi32(acc, w, x.bytes); }
#else
struct Quad {
  __m512i bytes, even, odd;  // as 16-bit numbers: inputs 0 and 2, inputs 1 and 3
};
TRIO_INLINE Quad bcast_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  const __m512i bytes = _mm512_set1_epi32(x);
  return {bytes, _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), _mm512_srai_epi16(bytes, 8)};
}
// Exact for any byte: vpmaddubsw alone would saturate.
TRIO_INLINE Vi dot_bytes(Vi acc, Vb w, Quad x) {
  const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(0xff));
  const __m512i odd = _mm512_srli_epi16(w, 8);
  acc = _mm512_add_epi32(acc, _mm512_madd_epi16(even, x.even));
  return _mm512_add_epi32(acc, _mm512_madd_epi16(odd, x.odd));
}
// Exact for w <= 15: the 16-bit sums stay below 15 * 128 * 2.
TRIO_INLINE Vi dot_nibbles(Vi acc, Vb w, Quad x) {
  const __m512i pairs = _mm512_maddubs_epi16(w, x.bytes);
  return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif

#ifdef TRIO_BF16
using Plain = uint16_t;
TRIO_INLINE void vstore_plain(Plain* p, Vf x) { vstore_bf16(p, x); }
TRIO_INLINE void vstore_plains(Plain* p, Vf x, Vf y) {  // x, then y
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(y, x));
}

struct WeightPair {
  __m512i raw;
};
struct InputPair {
  __m512i raw;
};
TRIO_INLINE WeightPair load_pair(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
TRIO_INLINE InputPair bcast_pair(const Plain* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
TRIO_INLINE Vf dot_pair(Vf acc, WeightPair w, InputPair x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)w.raw, (__m512bh)x.raw);
}
constexpr int kTileRows = 6, kTilePanels = 4;
constexpr int kNarrowTileRows = 12;
#else
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
  Vf even, odd;
};
TRIO_INLINE WeightPair load_pair(const uint16_t* p) {
  const __m512i raw = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(-65536)))};
}
TRIO_INLINE InputPair bcast_pair(const Plain* p) {
  return {_mm512_set1_ps(p[0]), _mm512_set1_ps(p[1])};
}
TRIO_INLINE Vf dot_pair(Vf acc, WeightPair w, InputPair x) {
  return vfma(w.odd, x.odd, vfma(w.even, x.even, acc));
}
constexpr int kTileRows = 12, kTilePanels = 2;
constexpr int kNarrowTileRows = 12;
#endif
constexpr int kQuantRows = 6;
constexpr int kAttentionTile = 12;

TRIO_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace trioengine
