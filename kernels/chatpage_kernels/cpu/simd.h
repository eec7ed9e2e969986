// Vectors of fp32: the few operations the kernels need, once for AVX-512 and once for AVX2.
#pragma once
#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#error "compile with -mavx512f or -mavx2 -mfma"
#endif

namespace simd {

// 2^x for x <= 0 by a polynomial in x - floor(x) (relative minimax on [0, 1]): DEGREE 3 errs by 7.5e-5, 5 by 7.5e-8.
// 2^-inf is 0 and NaN stays NaN.
template <int DEGREE>
inline Vec exp2(Vec x) {
  static_assert(DEGREE == 3 || DEGREE == 5);
  const Vec f = fraction(x);
  if constexpr (DEGREE == 3) {
    Vec p = fma(set1(7.80245227e-2f), f, set1(2.26067155e-1f));
    p = fma(p, f, set1(6.95833541e-1f));
    return scale2(fma(p, f, set1(9.99925219e-1f)), x);
  }
  Vec p = fma(set1(1.87757667e-3f), f, set1(8.98934009e-3f));
  p = fma(p, f, set1(5.58263181e-2f));
  p = fma(p, f, set1(2.40153617e-1f));
  p = fma(p, f, set1(6.93153073e-1f));
  return scale2(fma(p, f, set1(9.99999925e-1f)), x);
}

}  // namespace simd
