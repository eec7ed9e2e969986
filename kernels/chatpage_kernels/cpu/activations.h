// Quantises rows of activations to 8 bits in groups of 32, optionally through RMSNorm.
//
// A row is quantised by itself and in one order whatever the number of rows, so its result never depends on its neighbours.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "bytes.h"
#include "lanes.h"
#include "linear.h"

// 32 values, all finite unless the result shall be NaN.
inline void quantize_group(const simd::Vec* x, ActivationGroup* out) {
  constexpr int kVecs = kGroupInputs / simd::kLanes;
  simd::Vec peak = magnitude(x[0]);
  for (int v = 1; v < kVecs; ++v) peak = simd::max(magnitude(x[v]), peak);
  const float largest = simd::reduce_max(peak);
  // Below 1e-30 everything is 0: the inverse would overflow.
  const simd::Vec inverse = simd::set1(largest > 1e-30f ? 127.f / largest : 0.f);
  simd::Vec total = simd::zero();
  for (int v = 0; v < kVecs; ++v) {
    const simd::Vec code = simd::round(simd::mul(x[v], inverse));
    simd::store_int8(out->code + v * simd::kLanes, code);
    total = simd::add(total, code);
  }
  const float sum = simd::reduce_add(total);  // whole numbers: exact in any order
  // A NaN or infinity among the values makes the sum NaN; its codes mean nothing, its scale must say so.
  const bool is_finite = sum == sum;
  out->scale = is_finite ? largest / 127.f : std::numeric_limits<float>::quiet_NaN();
  out->sum = out->scale * sum;
  out->start4 = is_finite ? -8 * (int32_t)sum : 0;
  out->start8 = is_finite ? -128 * (int32_t)sum : 0;
}

// The factor of RMSNorm: 1 / sqrt(mean of squares + epsilon).
template <class Elem>
inline float norm_factor(const Elem* x, int size, float epsilon) {
  simd::Vec sum[2] = {simd::zero(), simd::zero()};
  for (int i = 0; i < size; i += 2 * simd::kLanes) {
    for (int v = 0; v < 2; ++v) {
      const simd::Vec value = load_lanes(x + i + v * simd::kLanes);
      sum[v] = simd::fma(value, value, sum[v]);
    }
  }
  return 1.f / std::sqrt(simd::reduce_add(simd::add(sum[0], sum[1])) / (float)size + epsilon);
}

// Elem: float or uint16_t (bf16). norm_weight may be null.
template <class Elem>
inline void quantize_row(const Elem* x, int size, const float* norm_weight, float epsilon, ActivationGroup* out) {
  constexpr int kVecs = kGroupInputs / simd::kLanes;
  const simd::Vec factor = simd::set1(norm_weight == nullptr ? 1.f : norm_factor(x, size, epsilon));
  for (int i = 0; i < size; i += kGroupInputs, ++out) {
    simd::Vec value[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      const int at = i + v * simd::kLanes;
      value[v] = load_lanes(x + at);
      if (norm_weight != nullptr) value[v] = simd::mul(simd::mul(value[v], factor), simd::load(norm_weight + at));
    }
    quantize_group(value, out);
  }
}
