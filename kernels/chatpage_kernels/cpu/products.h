// The two matrix products of attention, R query rows x T vectors of accumulators held in registers.
//
// Each also fetches a part of the next tile, a few cache lines a step: decode is bound by memory, and the processor's own
// prefetchers stop at the end of every block.
#pragma once
#include "tile.h"

constexpr int kCacheLine = 64;

// scores[r, t] = sum_d query[r, d] * key[t, d] for T vectors of tokens; peak[r] = running maximum, lane by lane.
template <class Dot, int R, int T>
inline void score_vectors(const typename Dot::Act* query, int dim, const Tile<Dot>& tile, int vec0, float* scores,
                          simd::Vec* peak, const Fetch& fetch) {
  constexpr int kPerGroup = kGroup / simd::kLanes, P = Dot::P;
  const typename Dot::Kv* panel[T];
  const char* ahead[T];
  int num_ahead = 0;
  for (int t = 0; t < T; ++t) {
    const int group = (vec0 + t) / kPerGroup, part = (vec0 + t) % kPerGroup;
    panel[t] = tile.key[group] + part * simd::kLanes * P;
    if (part == 0 && fetch.has(group)) ahead[num_ahead++] = fetch.value[group];
  }
  simd::Vec sum[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sum[r][t] = simd::zero();
  for (int d = 0; d < dim; d += P) {
    typename Dot::B b[T];
    for (int t = 0; t < T; ++t) {
      b[t] = Dot::load_b(panel[t]);
      panel[t] += tile.key_step;
    }
    for (int i = 0; i < num_ahead; ++i) _mm_prefetch(ahead[i] + d / P * kCacheLine, _MM_HINT_T1);
    for (int r = 0; r < R; ++r) {
      const typename Dot::A a = Dot::load_a(query + (int64_t)r * dim + d);
      for (int t = 0; t < T; ++t) sum[r][t] = Dot::mac(sum[r][t], a, b[t]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      simd::store(scores + r * kTileTokens + (vec0 + t) * simd::kLanes, sum[r][t]);
      peak[r] = simd::max(peak[r], sum[r][t]);
    }
}

// out[r, d] = decay[r] * out[r, d] + sum_t probability[r, t] * value[t, d] for T vectors of dims and the groups [begin, end).
template <class Dot, int R, int T>
inline void value_vectors(const typename Dot::Act* probability, const Tile<Dot>& tile, int begin, int end, int vec0,
                          const float* decay, float* out, int64_t out_step, const Fetch& fetch) {
  constexpr int P = Dot::P;
  const int64_t row_ahead = out_step / kGroup * fetch.key_step;
  int64_t ahead[T];
  int num_ahead = 0;
  for (int t = 0; t < T; ++t) {
    const int dim = (vec0 + t) * simd::kLanes, line = dim / kGroup;
    if (dim % kGroup == 0 && fetch.has(line)) ahead[num_ahead++] = line * fetch.key_step;
  }
  simd::Vec sum[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      sum[r][t] = simd::mul(simd::set1(decay[r]), simd::load(out + r * out_step + (vec0 + t) * simd::kLanes));
    }
  for (int g = begin; g < end; ++g) {
    const typename Dot::Kv* row = tile.value[g] + vec0 * simd::kLanes * P;
    for (int s = 0; s < kGroup / P; ++s, row += tile.value_step) {
      typename Dot::B b[T];
      for (int t = 0; t < T; ++t) b[t] = Dot::load_b(row + t * simd::kLanes * P);
      for (int i = 0; i < num_ahead; ++i) _mm_prefetch(fetch.key[g] + s * row_ahead + ahead[i], _MM_HINT_T1);
      for (int r = 0; r < R; ++r) {
        const typename Dot::A a = Dot::load_a(probability + r * kTileTokens + g * kGroup + s * P);
        for (int t = 0; t < T; ++t) sum[r][t] = Dot::mac(sum[r][t], a, b[t]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) simd::store(out + r * out_step + (vec0 + t) * simd::kLanes, sum[r][t]);
}

template <class Dot, int R>
inline void score_groups(const typename Dot::Act* query, int dim, const Tile<Dot>& tile, int begin, int end,
                         float* scores, simd::Vec* peak, const Fetch& fetch) {
  constexpr int kPerGroup = kGroup / simd::kLanes;
  int v = begin * kPerGroup;
  const int stop = end * kPerGroup;
  for (; v + Dot::kVecs <= stop; v += Dot::kVecs) {
    score_vectors<Dot, R, Dot::kVecs>(query, dim, tile, v, scores, peak, fetch);
  }
  if constexpr (Dot::kVecs > 2) {
    for (; v + 2 <= stop; v += 2) score_vectors<Dot, R, 2>(query, dim, tile, v, scores, peak, fetch);
  }
  for (; v < stop; ++v) score_vectors<Dot, R, 1>(query, dim, tile, v, scores, peak, fetch);
}

template <class Dot, int R>
inline void value_groups(const typename Dot::Act* probability, const Tile<Dot>& tile, int begin, int end, const float* decay,
                         float* out, int64_t out_step, const Fetch& fetch) {
  int v = 0;
  const int stop = (int)out_step / simd::kLanes;
  for (; v + Dot::kVecs <= stop; v += Dot::kVecs) {
    value_vectors<Dot, R, Dot::kVecs>(probability, tile, begin, end, v, decay, out, out_step, fetch);
  }
  if constexpr (Dot::kVecs > 2) {
    for (; v + 2 <= stop; v += 2) {
      value_vectors<Dot, R, 2>(probability, tile, begin, end, v, decay, out, out_step, fetch);
    }
  }
  for (; v < stop; ++v) value_vectors<Dot, R, 1>(probability, tile, begin, end, v, decay, out, out_step, fetch);
}
