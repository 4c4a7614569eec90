// 16-lane vectors as two registers of AVX2, with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "../numeric.h"

#define TRIO_INLINE static inline __attribute__((always_inline))

namespace trioengine {
namespace {

struct Vf {
  __m256 lo, hi;
};
struct Vi {
  __m256i lo, hi;
};
using Vb = Vi;  // 64 unsigned bytes

TRIO_INLINE Vf vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TRIO_INLINE Vf vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TRIO_INLINE void vstore(float* p, Vf x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
TRIO_INLINE Vf vadd(Vf a, Vf b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
TRIO_INLINE Vf vsub(Vf a, Vf b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
TRIO_INLINE Vf vmul(Vf a, Vf b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
TRIO_INLINE Vf vdiv(Vf a, Vf b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
TRIO_INLINE Vf vfma(Vf a, Vf b, Vf c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
TRIO_INLINE Vf vfnma(Vf a, Vf b, Vf c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
TRIO_INLINE Vf vfms(Vf a, Vf b, Vf c) {
  return {_mm256_fmsub_ps(a.lo, b.lo, c.lo), _mm256_fmsub_ps(a.hi, b.hi, c.hi)};
}
TRIO_INLINE Vf vmax(Vf a, Vf b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
TRIO_INLINE Vf vmin(Vf a, Vf b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
TRIO_INLINE Vf vabs(Vf a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
TRIO_INLINE Vf vround(Vf a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
TRIO_INLINE Vf vclamp_exponent(Vf a) { return vmax(a, vset(-126.0f)); }
TRIO_INLINE Vf vreciprocal(Vf a) { return vdiv(vset(1.0f), a); }
TRIO_INLINE __m256 scale2_half(__m256 a, __m256 n) {
  const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), shift));
}
TRIO_INLINE Vf vscale2(Vf a, Vf n) { return {scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)}; }
TRIO_INLINE float vsum(Vf a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
TRIO_INLINE float vmaximum(Vf a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

TRIO_INLINE Vf vkeep(Vf x, int low, int high, Vf fill) {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i second = _mm256_add_epi32(first, _mm256_set1_epi32(8));
  const __m256i above = _mm256_set1_epi32(low - 1), below = _mm256_set1_epi32(high);
  const __m256i keep_lo = _mm256_and_si256(_mm256_cmpgt_epi32(first, above),
                                           _mm256_cmpgt_epi32(below, first));
  const __m256i keep_hi = _mm256_and_si256(_mm256_cmpgt_epi32(second, above),
                                           _mm256_cmpgt_epi32(below, second));
  return {_mm256_blendv_ps(fill.lo, x.lo, _mm256_castsi256_ps(keep_lo)),
          _mm256_blendv_ps(fill.hi, x.hi, _mm256_castsi256_ps(keep_hi))};
}
TRIO_INLINE unsigned vequal(Vf a, Vf x) {
  const unsigned lo = static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_cmp_ps(a.lo, x.lo, _CMP_EQ_OQ)));
  const unsigned hi = static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_cmp_ps(a.hi, x.hi, _CMP_EQ_OQ)));
  return lo | (hi << 8);
}
TRIO_INLINE unsigned vabove(Vf a, Vf x) {
  const unsigned lo = static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_cmp_ps(a.lo, x.lo, _CMP_GT_OQ)));
  const unsigned hi = static_cast<unsigned>(
      _mm256_movemask_ps(_mm256_cmp_ps(a.hi, x.hi, _CMP_GT_OQ)));
  return lo | (hi << 8);
}
TRIO_INLINE __m256 pick_half(unsigned bits, __m256 x, __m256 fill) {
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i own = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lanes);
  return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(own, lanes)));
}
TRIO_INLINE Vf vpick(unsigned bits, Vf x, Vf fill) {
  return {pick_half(bits, x.lo, fill.lo), pick_half(bits >> 8, x.hi, fill.hi)};
}

TRIO_INLINE __m256 load_bf16_half(const uint16_t* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
TRIO_INLINE Vf vload_bf16(const uint16_t* p) { return {load_bf16_half(p), load_bf16_half(p + 8)}; }
TRIO_INLINE __m256i round_bf16_half(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0),
                            _mm256_castps_si256(nan));
}
TRIO_INLINE void vstore_bf16(uint16_t* p, Vf x) {
  // vpackusdw works within 128-bit halves, so the quarters come out as 0, 2, 1, 3.
  const __m256i packed = _mm256_packus_epi32(round_bf16_half(x.lo), round_bf16_half(x.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
}
TRIO_INLINE Vf vload_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}

TRIO_INLINE Vi iset(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TRIO_INLINE Vi iadd(Vi a, Vi b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
TRIO_INLINE Vi iround(Vf a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
TRIO_INLINE Vf itof(Vi a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
TRIO_INLINE int32_t isum(Vi a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(four);
}
TRIO_INLINE void istore_bytes(int8_t* p, Vi a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi),
                                                 _MM_SHUFFLE(3, 1, 2, 0));
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words),
                                        _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

TRIO_INLINE Vb bload(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
TRIO_INLINE Vb blow(Vb a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
TRIO_INLINE Vb bhigh(Vb a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(a.lo, 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(a.hi, 4), mask)};
}

struct Quad {
  __m256i bytes, even, odd;  // odd and even inputs widened to 16 bits
};
TRIO_INLINE Quad bcast_quad(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  const __m256i bytes = _mm256_set1_epi32(x);
  return {bytes, _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), _mm256_srai_epi16(bytes, 8)};
}
TRIO_INLINE __m256i dot_bytes_half(__m256i acc, __m256i w, Quad x) {
  const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(0xff));
  const __m256i odd = _mm256_srli_epi16(w, 8);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even, x.even));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(odd, x.odd));
}
// Exact for any byte: vpmaddubsw alone would saturate.
TRIO_INLINE Vi dot_bytes(Vi acc, Vb w, Quad x) {
  return {dot_bytes_half(acc.lo, w.lo, x), dot_bytes_half(acc.hi, w.hi, x)};
}
TRIO_INLINE __m256i dot_nibbles_half(__m256i acc, __m256i w, Quad x) {
  const __m256i pairs = _mm256_maddubs_epi16(w, x.bytes);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// Exact for w <= 15: the 16-bit sums stay below 15 * 128 * 2.
TRIO_INLINE Vi dot_nibbles(Vi acc, Vb w, Quad x) {
  return {dot_nibbles_half(acc.lo, w.lo, x), dot_nibbles_half(acc.hi, w.hi, x)};
}

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
  __m256 even, odd;
};
TRIO_INLINE WeightPair load_pair(const uint16_t* p) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i mask = _mm256_set1_epi32(-65536);
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
           _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))},
          {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)),
           _mm256_castsi256_ps(_mm256_and_si256(hi, mask))}};
}
TRIO_INLINE InputPair bcast_pair(const Plain* p) {
  return {_mm256_broadcast_ss(p), _mm256_broadcast_ss(p + 1)};
}
TRIO_INLINE Vf dot_pair(Vf acc, WeightPair w, InputPair x) {
  acc.lo = _mm256_fmadd_ps(w.even.lo, x.even, acc.lo);
  acc.hi = _mm256_fmadd_ps(w.even.hi, x.even, acc.hi);
  acc.lo = _mm256_fmadd_ps(w.odd.lo, x.odd, acc.lo);
  acc.hi = _mm256_fmadd_ps(w.odd.hi, x.odd, acc.hi);
  return acc;
}
constexpr int kTileRows = 4, kTilePanels = 1;
constexpr int kNarrowTileRows = 4;
constexpr int kQuantRows = 2;
constexpr int kAttentionTile = 4;

TRIO_INLINE void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}

}  // namespace
}  // namespace trioengine
