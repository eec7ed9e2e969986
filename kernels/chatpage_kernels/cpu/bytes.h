// Vectors of bytes for dot products of unsigned weights with signed activations, beside the fp32 vectors of simd.h.
//
// dot4(sum, w, x) adds the four products w[4 i + k] * x[4 i + k] to each 32-bit lane i, exactly. With VNNI it is one instruction
// and w may be any unsigned byte; without, products of pairs pass through 16 bits, so w must be below 128. Where that is not so
// (8-bit weights), dot4_biased moves the offset of 128 out of the weight first: kBiasedDotIsSigned says that it is gone.
#pragma once
#include "simd.h"

namespace simd {

#if defined(__AVX512BW__) && defined(__AVX512F__)
using Bytes = __m512i;

inline Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes set1_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm512_srli_epi16(x, 4)); }
inline Vec to_float(Bytes x) { return _mm512_cvtepi32_ps(x); }
inline Vec load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// Stores lanes that hold whole numbers of [-128, 127].
inline void store_int8(int8_t* p, Vec x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }

#if defined(__AVX512VNNI__)
constexpr bool kBiasedDotIsSigned = false;
inline Bytes dot4(Bytes sum, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline Bytes dot4_biased(Bytes sum, Bytes w, Bytes x) { return dot4(sum, w, x); }
#else
constexpr bool kBiasedDotIsSigned = true;
inline Bytes dot4(Bytes sum, Bytes w, Bytes x) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
inline Bytes dot4_biased(Bytes sum, Bytes w, Bytes x) {
  const Bytes value = _mm512_xor_si512(w, _mm512_set1_epi8((char)128));
  const Bytes moved = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(value), _mm512_setzero_si512(), x);
  return dot4(sum, _mm512_abs_epi8(value), moved);
}
#endif

#else
using Bytes = __m256i;

inline Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Bytes set1_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
inline Vec to_float(Bytes x) { return _mm256_cvtepi32_ps(x); }
inline Vec load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
// Stores lanes that hold whole numbers of [-128, 127].
inline void store_int8(int8_t* p, Vec x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(pairs, pairs));
}

constexpr bool kBiasedDotIsSigned = true;
inline Bytes dot4(Bytes sum, Bytes w, Bytes x) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
inline Bytes dot4_biased(Bytes sum, Bytes w, Bytes x) {
  const Bytes value = _mm256_xor_si256(w, _mm256_set1_epi8((char)128));
  return dot4(sum, _mm256_abs_epi8(value), _mm256_sign_epi8(x, value));
}
#endif

}  // namespace simd
