// The two matrix products of attention, R query rows x T vectors of accumulators held in registers.
//
// Each also fetches what the other will read next, one cache line for each it consumes: decode is bound by memory, and the
// processor's own prefetchers stop at the end of every block.
#pragma once
#include "tile.h"

// scores[r, t] = scale * sum_d query[r, d] * key[t, d] for T vectors of tokens; peak[r] = running maximum, lane by lane.
template <class Dot, int R, int T>
inline void score_vectors(const typename Dot::Act* query, int dim, const Tile<Dot>& tile, int vec0, simd::Vec scale,
                          float* scores, simd::Vec* peak, bool fetch) {
  constexpr int kPerGroup = kGroup / simd::kLanes, P = Dot::P;
  const typename Dot::Kv* panel[T];
  const char* ahead[T];
  for (int t = 0; t < T; ++t) {
    const int group = (vec0 + t) / kPerGroup;
    panel[t] = tile.key[group] + (vec0 + t) % kPerGroup * simd::kLanes * P;
    ahead[t] = (const char*)tile.value[group];
  }
  simd::Vec sum[R][T];
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) sum[r][t] = simd::zero();
  for (int d = 0; d < dim; d += P) {
    typename Dot::B b[T];
    for (int t = 0; t < T; ++t) {
      b[t] = Dot::load_b(panel[t]);
      panel[t] += tile.key_step;
      if (fetch && (kPerGroup == 1 || t % kPerGroup == 0)) _mm_prefetch(ahead[t] + d / P * 64, _MM_HINT_T0);
    }
    for (int r = 0; r < R; ++r) {
      const typename Dot::A a = Dot::load_a(query + (int64_t)r * dim + d);
      for (int t = 0; t < T; ++t) sum[r][t] = Dot::mac(sum[r][t], a, b[t]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int t = 0; t < T; ++t) {
      const simd::Vec x = simd::mul(sum[r][t], scale);
      simd::store(scores + r * kTileTokens + (vec0 + t) * simd::kLanes, x);
      peak[r] = simd::max(peak[r], x);
    }
}

// out[r, d] = decay[r] * out[r, d] + sum_t probability[r, t] * value[t, d] for T vectors of dims and the groups [begin, end).
template <class Dot, int R, int T>
inline void value_vectors(const typename Dot::Act* probability, const Tile<Dot>& tile, int begin, int end, int vec0,
                          const float* decay, float* out, int64_t out_step, const char* const* ahead, int64_t ahead_step) {
  constexpr int P = Dot::P, kLines = T * simd::kLanes >= kGroup ? T * simd::kLanes / kGroup : 1;
  const int lines_per_row = (int)(tile.value_step / P) / kGroup;
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
      if (ahead[g] != nullptr) {
        const int line = s * lines_per_row + vec0 * simd::kLanes / kGroup;
        for (int i = 0; i < kLines; ++i) _mm_prefetch(ahead[g] + (line + i) * ahead_step, _MM_HINT_T0);
      }
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
inline void score_groups(const typename Dot::Act* query, int dim, const Tile<Dot>& tile, int begin, int end, simd::Vec scale,
                         float* scores, simd::Vec* peak, bool fetch) {
  constexpr int kPerGroup = kGroup / simd::kLanes;
  int v = begin * kPerGroup;
  const int stop = end * kPerGroup;
  for (; v + Dot::kVecs <= stop; v += Dot::kVecs) {
    score_vectors<Dot, R, Dot::kVecs>(query, dim, tile, v, scale, scores, peak, fetch);
  }
  if constexpr (Dot::kVecs > 2) {
    for (; v + 2 <= stop; v += 2) score_vectors<Dot, R, 2>(query, dim, tile, v, scale, scores, peak, fetch);
  }
  for (; v < stop; ++v) score_vectors<Dot, R, 1>(query, dim, tile, v, scale, scores, peak, fetch);
}

template <class Dot, int R>
inline void value_groups(const typename Dot::Act* probability, const Tile<Dot>& tile, int begin, int end, const float* decay,
                         float* out, int64_t out_step, const char* const* ahead, int64_t ahead_step) {
  int v = 0;
  const int stop = (int)out_step / simd::kLanes;
  for (; v + Dot::kVecs <= stop; v += Dot::kVecs) {
    value_vectors<Dot, R, Dot::kVecs>(probability, tile, begin, end, v, decay, out, out_step, ahead, ahead_step);
  }
  if constexpr (Dot::kVecs > 2) {
    for (; v + 2 <= stop; v += 2) {
      value_vectors<Dot, R, 2>(probability, tile, begin, end, v, decay, out, out_step, ahead, ahead_step);
    }
  }
  for (; v < stop; ++v) value_vectors<Dot, R, 1>(probability, tile, begin, end, v, decay, out, out_step, ahead, ahead_step);
}
