// Online softmax of one query row over one tile, in base 2: scores in, probabilities and the decay of what came before out.
#pragma once
#include <cmath>

#include "products.h"

constexpr float kLog2E = 1.44269504f;
constexpr float kNegInf = -INFINITY;

// tanh(y): (1 - e) / (1 + e) with e = exp(-2 |y|), which cancels near 0; there the series of tanh, exact to fp32 below 1/4.
inline simd::Vec tanh(simd::Vec y) {
  const simd::Vec one = simd::set1(1.f), magnitude = simd::max(simd::sub(simd::zero(), y), y);
  const simd::Vec e = simd::exp2<5>(simd::mul(magnitude, simd::set1(-2.f * kLog2E)));
  const simd::Vec far = simd::copy_sign(simd::div(simd::sub(one, e), simd::add(one, e)), y);
  const simd::Vec y2 = simd::mul(y, y);
  simd::Vec near = simd::fma(simd::set1(62.f / 2835), y2, simd::set1(-17.f / 315));
  near = simd::fma(simd::fma(simd::fma(near, y2, simd::set1(2.f / 15)), y2, simd::set1(-1.f / 3)), y2, one);
  return simd::select_greater(magnitude, simd::set1(0.25f), far, simd::mul(near, y));
}

// cap * tanh(x / cap), x and cap in base 2.
inline simd::Vec soften(simd::Vec x, float cap) { return simd::mul(simd::set1(cap), tanh(simd::mul(x, simd::set1(1.f / cap)))); }

// Applies softcap and mask to the scores of one row, in place, and returns their new maximum, lane by lane.
// Tokens [lo, hi) of the tile are visible; scores cover the tokens [begin, end). With a softcap, scores become base 2 here.
inline simd::Vec mask_row(float* scores, int begin, int end, int lo, int hi, float scale, float softcap) {
  simd::Vec peak = simd::set1(kNegInf);
  for (int t = begin; t < end; t += simd::kLanes) {
    simd::Vec x = simd::load(scores + t);
    if (softcap > 0.f) x = soften(simd::mul(x, simd::set1(scale)), softcap);
    if (t < lo || t + simd::kLanes > hi) x = simd::keep_range(x, lo - t, hi - t, simd::set1(kNegInf));
    simd::store(scores + t, x);
    peak = simd::max(peak, x);
  }
  return peak;
}

// Raises the maxima of R rows to those of new scores (times scale, in base 2) and writes how much older results shrink by it.
template <int R>
inline void raise_peaks(const simd::Vec* peak, float scale, float* row_peak, float* decay) {
  alignas(64) float shrink[simd::kLanes] = {};
  bool is_raised = false;
  for (int r = 0; r < R; ++r) {
    is_raised |= !(row_peak[r] > kNegInf) || simd::any_greater(simd::mul(peak[r], simd::set1(scale)), simd::set1(row_peak[r]));
    decay[r] = 1.f;
  }
  if (!is_raised) return;
  for (int r = 0; r < R; ++r) {
    const float raised = std::max(row_peak[r], simd::reduce_max(peak[r]) * scale);
    // A row that has seen no key yet keeps -inf, and nothing that could shrink.
    shrink[r] = raised > kNegInf ? row_peak[r] - raised : 0.f;
    row_peak[r] = raised;
  }
  static_assert(R <= simd::kLanes);
  simd::store(shrink, simd::exp2<5>(simd::load(shrink)));
  for (int r = 0; r < R; ++r) decay[r] = shrink[r];
}

// Turns the scores of the tokens [begin, end) into probabilities relative to the row's maximum, and adds them to its weight.
template <class Dot>
inline void exponentiate_row(const float* scores, typename Dot::Act* probability, int begin, int end, float scale, float peak,
                             float decay, simd::Vec* weight) {
  // Where no key is visible yet, any finite base makes exp2(-inf - base) = 0.
  const simd::Vec base = simd::set1(-std::max(peak, -1e30f)), factor = simd::set1(scale);
  simd::Vec sum = simd::mul(*weight, simd::set1(decay));
  for (int t = begin; t < end; t += simd::kLanes) {
    const simd::Vec p = simd::exp2<Dot::kExpDegree>(simd::fma(simd::load(scores + t), factor, base));
    Dot::store_act(probability + t, p);
    sum = simd::add(sum, p);
  }
  *weight = sum;
}
