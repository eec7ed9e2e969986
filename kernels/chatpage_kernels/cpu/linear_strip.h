// The product of a strip of activation rows with one panel of weights, in registers from the first group of inputs to the last.
//
// The order of additions is that of the groups for every strip height and instruction set; inside a group, sums are exact.
#pragma once
#include <cstring>

#include "bytes.h"
#include "linear.h"

// Rows of accumulators that fit the registers, two vectors wide.
constexpr int kStripRows = simd::kLanes == 16 ? 6 : 2;

// Cache lines of the panel that comes next, fetched while this one is multiplied: `lines` for each group.
struct Ahead {
  const char* next;
  int lines;
};

inline simd::Bytes broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return simd::set1_int(four);
}

template <Format F>
inline int32_t start_of(const ActivationGroup& x) {
  if constexpr (F == kQ4_0) return x.start4;
  if constexpr (F == kQ8_0) return simd::kBiasedDotIsSigned ? 0 : x.start8;
  return 0;
}

// sum[r][c] += codes * activations for one group; `codes` are the two vectors' first bytes.
template <Format F, int R>
inline void multiply_group(const uint8_t* const (&codes)[2], const ActivationGroup* const (&x)[R], simd::Bytes (&sum)[R][2]) {
  using Layout = GroupLayout<F>;
  constexpr int kVectorBytes = 4 * kHalfOutputs;
  if constexpr (Layout::kIsWide) {
#pragma GCC unroll 8
    for (int j = 0; j < kGroupInputs / 4; ++j) {
      const simd::Bytes w[2] = {simd::load_bytes(codes[0] + j * kVectorBytes), simd::load_bytes(codes[1] + j * kVectorBytes)};
      for (int r = 0; r < R; ++r) {
        const simd::Bytes a = broadcast4(x[r]->code + 4 * j);
        for (int c = 0; c < 2; ++c) sum[r][c] = simd::dot4_biased(sum[r][c], w[c], a);
      }
    }
  } else {
#pragma GCC unroll 4
    for (int j = 0; j < kGroupInputs / 8; ++j) {
      const int at = j * kVectorBytes;
      const simd::Bytes both[2] = {simd::load_bytes(codes[0] + at), simd::load_bytes(codes[1] + at)};
      const simd::Bytes low[2] = {simd::low_nibbles(both[0]), simd::low_nibbles(both[1])};
      for (int r = 0; r < R; ++r) {
        const simd::Bytes a = broadcast4(x[r]->code + 4 * j);
        for (int c = 0; c < 2; ++c) sum[r][c] = simd::dot4(sum[r][c], low[c], a);
      }
      const simd::Bytes high[2] = {simd::high_nibbles(both[0]), simd::high_nibbles(both[1])};
      for (int r = 0; r < R; ++r) {
        const simd::Bytes a = broadcast4(x[r]->code + kGroupInputs / 2 + 4 * j);
        for (int c = 0; c < 2; ++c) sum[r][c] = simd::dot4(sum[r][c], high[c], a);
      }
    }
  }
}

// tile[r, v] for the R rows from x (num_groups groups each) and the vectors v0, v0 + 1 of the panel.
template <Format F, int R>
inline void multiply_vectors(const uint8_t* panel, int v0, const ActivationGroup* x, int num_groups, Ahead ahead, float* tile) {
  using Layout = GroupLayout<F>;
  constexpr int kPerHalf = kHalfOutputs / simd::kLanes;
  int64_t at[2];
  for (int c = 0; c < 2; ++c) {
    at[c] = (int64_t)((v0 + c) / kPerHalf) * Layout::kHalfBytes + (v0 + c) % kPerHalf * 4 * simd::kLanes;
  }
  const ActivationGroup* row[R];
  for (int r = 0; r < R; ++r) row[r] = x + (int64_t)r * num_groups;
  simd::Vec out[R][2];
  for (int r = 0; r < R; ++r) out[r][0] = out[r][1] = simd::zero();
  for (int g = 0; g < num_groups; ++g, panel += Layout::kBytes) {
    for (int i = 0; i < ahead.lines; ++i, ahead.next += 64) _mm_prefetch(ahead.next, _MM_HINT_T0);
    simd::Bytes sum[R][2];
    for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = simd::set1_int(start_of<F>(*row[r]));
    const uint8_t* const codes[2] = {panel + at[0], panel + at[1]};
    multiply_group<F, R>(codes, row, sum);
    for (int c = 0; c < 2; ++c) {
      const simd::Vec scale = simd::load_half((const uint16_t*)(panel + Layout::kScales) + (v0 + c) * simd::kLanes);
      for (int r = 0; r < R; ++r) {
        const simd::Vec both = simd::mul(scale, simd::set1(row[r]->scale));
        out[r][c] = simd::fma(simd::to_float(sum[r][c]), both, out[r][c]);
      }
      if constexpr (Layout::kHasMins) {
        const simd::Vec min = simd::load_half((const uint16_t*)(panel + Layout::kMins) + (v0 + c) * simd::kLanes);
        for (int r = 0; r < R; ++r) out[r][c] = simd::fma(min, simd::set1(row[r]->sum), out[r][c]);
      }
    }
    for (int r = 0; r < R; ++r) ++row[r];
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < 2; ++c) simd::store(tile + r * kPanelOutputs + (v0 + c) * simd::kLanes, out[r][c]);
}

// tile[r, 0..31] for num <= R rows.
template <Format F, int R = kStripRows>
inline void multiply_strip(const uint8_t* panel, const ActivationGroup* x, int num, int num_groups, Ahead ahead, float* tile) {
  if constexpr (R > 1) {
    if (num < R) return multiply_strip<F, R - 1>(panel, x, num, num_groups, ahead, tile);
  }
  for (int v = 0; v < kPanelOutputs / simd::kLanes; v += 2) {
    multiply_vectors<F, R>(panel, v, x, num_groups, v == 0 ? ahead : Ahead{nullptr, 0}, tile);
  }
}
