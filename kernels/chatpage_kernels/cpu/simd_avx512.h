// AVX-512: 16 fp32 lanes.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace simd {

using Vec = __m512;
constexpr int kLanes = 16;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// x - floor(x), 0 for infinities; and x * 2^floor(n).
inline Vec fraction(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
inline Vec scale2(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
inline Vec copy_sign(Vec magnitude, Vec sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.f)));
}
// a > b ? x : y, lane by lane; y where a is NaN.
inline Vec select_greater(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x);
}
inline bool any_greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

// Lane i keeps x where lo <= i < hi and becomes `other` elsewhere.
inline Vec keep_range(Vec x, int lo, int hi, Vec other) {
  const uint32_t below_hi = hi >= kLanes ? 0xFFFFu : hi <= 0 ? 0u : (1u << hi) - 1;
  const uint32_t below_lo = lo >= kLanes ? 0xFFFFu : lo <= 0 ? 0u : (1u << lo) - 1;
  return _mm512_mask_mov_ps(other, (__mmask16)(below_hi & ~below_lo), x);
}

inline Vec load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_bf16(uint16_t* p, Vec x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
  const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

// The first and the second element of 16 pairs of bf16, as fp32.
struct Bf16Pairs {
  Vec first, second;
};
inline Bf16Pairs load_bf16_pairs(const uint16_t* p) {
  const __m512i x = _mm512_loadu_si512(p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000)))};
}

inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace simd
