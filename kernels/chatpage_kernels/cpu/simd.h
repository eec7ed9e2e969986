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

// 2^x for x <= 0 by a polynomial (relative minimax on [-1/2, 1/2]): DEGREE 3 errs by 7.5e-5, 5 by 7.5e-8. NaN stays NaN.
template <int DEGREE>
inline Vec exp2(Vec x) {
  static_assert(DEGREE == 3 || DEGREE == 5);
  x = max(set1(-200.f), x);  // far below the smallest float; in this order a NaN survives
  const Vec n = round(x), f = sub(x, n);
  if constexpr (DEGREE == 3) {
    Vec p = fma(set1(5.51716691e-2f), f, set1(2.42611122e-1f));
    p = fma(p, f, set1(6.93260985e-1f));
    return scale2(fma(p, f, set1(9.99928074e-1f)), n);
  }
  Vec p = fma(set1(1.3276472e-3f), f, set1(9.67554133e-3f));
  p = fma(p, f, set1(5.55071327e-2f));
  p = fma(p, f, set1(2.40221197e-1f));
  p = fma(p, f, set1(6.93146967e-1f));
  return scale2(fma(p, f, set1(1.00000007f)), n);
}

}  // namespace simd
