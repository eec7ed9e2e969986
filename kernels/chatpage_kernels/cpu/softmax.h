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

struct RowState {
  float peak = kNegInf;                  // maximum so far, base 2
  simd::Vec weight = simd::zero();       // sum of exp2(score - peak) so far, lane by lane
};

// Applies softcap and mask to the scores of one row and returns their new maximum, lane by lane.
// Tokens [lo, hi) of the tile are visible; scores cover the tokens [begin, end).
inline simd::Vec mask_row(float* scores, int begin, int end, int lo, int hi, float softcap) {
  simd::Vec peak = simd::set1(kNegInf);
  for (int t = begin; t < end; t += simd::kLanes) {
    simd::Vec x = simd::load(scores + t);
    if (softcap > 0.f) x = soften(x, softcap);
    if (t < lo || t + simd::kLanes > hi) x = simd::keep_range(x, lo - t, hi - t, simd::set1(kNegInf));
    simd::store(scores + t, x);
    peak = simd::max(peak, x);
  }
  return peak;
}

// Turns the scores of the tokens [begin, end) into probabilities relative to the row's maximum; returns the decay.
template <class Dot>
inline float exponentiate_row(const float* scores, typename Dot::Act* probability, int begin, int end, simd::Vec peak,
                              RowState* row) {
  float decay = 1.f;
  if (!(row->peak > kNegInf) || simd::any_greater(peak, simd::set1(row->peak))) {
    const float raised = std::max(row->peak, simd::reduce_max(peak));
    decay = std::exp2(row->peak - raised);
    row->peak = raised;
  }
  const simd::Vec base = simd::set1(row->peak);
  simd::Vec weight = simd::mul(row->weight, simd::set1(decay));
  for (int t = begin; t < end; t += simd::kLanes) {
    const simd::Vec p = simd::exp2<Dot::kExpDegree>(simd::sub(simd::load(scores + t), base));
    Dot::store_act(probability + t, p);
    weight = simd::add(weight, p);
  }
  row->weight = weight;
  return decay;
}
