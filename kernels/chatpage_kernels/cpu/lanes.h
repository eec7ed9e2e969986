// Functions over vectors of fp32 that the layers around attention share.
#pragma once
#include <cstdint>

#include "simd.h"

inline simd::Vec load_lanes(const float* p) { return simd::load(p); }
inline simd::Vec load_lanes(const uint16_t* p) { return simd::load_bf16(p); }

inline simd::Vec magnitude(simd::Vec x) { return simd::max(simd::sub(simd::zero(), x), x); }

// silu(x) = x / (1 + exp(-x)), to fp32 rounding, for any x.
inline simd::Vec silu(simd::Vec x) {
  const simd::Vec one = simd::set1(1.f);
  const simd::Vec e = simd::exp2<5>(simd::mul(magnitude(x), simd::set1(-1.44269504f)));
  // exp only of what is below 0: 1 / (1 + e) right of 0, e / (1 + e) left of it.
  return simd::mul(x, simd::div(simd::select_greater(x, simd::zero(), one, e), simd::add(one, e)));
}
