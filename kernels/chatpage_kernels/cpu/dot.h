// Products of activations with packed KV, P elements of the inner dimension at a time.
//
// A Dot has: Kv (type of a packed KV element), Act (type of queries and probabilities in scratch), P (elements multiplied at
// once), kRows x kVecs (accumulators that fit the registers), A (an activation broadcast to all lanes) and B (a vector of KV).
#pragma once
#include <cstring>
#include <type_traits>

#include "layout.h"
#include "simd.h"

struct DotFp32 {
  using Kv = float;
  using Act = float;
  using A = simd::Vec;
  using B = simd::Vec;
  static constexpr int P = 1, kRows = 6, kVecs = simd::kLanes == 16 ? 4 : 2, kExpDegree = 5;

  static A load_a(const Act* p) { return simd::set1(*p); }
  static B load_b(const Kv* p) { return simd::load(p); }
  static simd::Vec mac(simd::Vec sum, const A& a, const B& b) { return simd::fma(a, b, sum); }
  static void store_act(Act* p, simd::Vec x) { simd::store(p, x); }
};

#if defined(__AVX512BF16__)
struct DotBf16 {
  using Kv = uint16_t;
  using Act = uint16_t;
  using A = __m512bh;
  using B = __m512bh;
  static constexpr int P = 2, kRows = 6, kVecs = 4, kExpDegree = 3;

  static A load_a(const Act* p) {
    int pair;
    std::memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static B load_b(const Kv* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static simd::Vec mac(simd::Vec sum, const A& a, const B& b) { return _mm512_dpbf16_ps(sum, a, b); }
  static void store_act(Act* p, simd::Vec x) { simd::store_bf16(p, x); }
};
#else
// Without the instruction, pairs of KV are widened to fp32 and activations stay in fp32: two multiplications a pair.
struct DotBf16 {
  using Kv = uint16_t;
  using Act = float;
  struct A {
    simd::Vec first, second;
  };
  using B = simd::Bf16Pairs;
  static constexpr int P = 2, kRows = simd::kLanes == 16 ? 5 : 4, kVecs = simd::kLanes == 16 ? 4 : 2, kExpDegree = 5;

  static A load_a(const Act* p) { return {simd::set1(p[0]), simd::set1(p[1])}; }
  static B load_b(const Kv* p) { return simd::load_bf16_pairs(p); }
  static simd::Vec mac(simd::Vec sum, const A& a, const B& b) {
    return simd::fma(a.second, b.second, simd::fma(a.first, b.first, sum));
  }
  static void store_act(Act* p, simd::Vec x) { simd::store(p, x); }
};
#endif

// How elements lie in a cache and in the tensors of a call, and what they become in scratch.
struct StoreFp32 {
  using Elem = float;
  static float widen(Elem x) { return x; }
  static Elem narrow(float x) { return x; }
  static void narrow(Elem* p, simd::Vec x) { simd::store(p, x); }
};

struct StoreBf16 {
  using Elem = uint16_t;
  static float widen(Elem x) {
    const uint32_t bits = (uint32_t)x << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
  }
  static Elem narrow(float x) {
    alignas(64) uint16_t out[simd::kLanes];
    simd::store_bf16(out, simd::set1(x));
    return out[0];
  }
  static void narrow(Elem* p, simd::Vec x) { simd::store_bf16(p, x); }
};

struct StoreFp16 {
  using Elem = uint16_t;
  static float widen(Elem x) { return simd::half_to_float(x); }
  static Elem narrow(float x) { return simd::float_to_half(x); }
  static void narrow(Elem* p, simd::Vec x) {
    alignas(64) float lanes[simd::kLanes];
    simd::store(lanes, x);
    for (int i = 0; i < simd::kLanes; ++i) p[i] = narrow(lanes[i]);
  }
};

// The same number in another type: bf16 stays bf16 where both sides hold bits, everything else goes through fp32.
template <class Store, class To>
inline To convert(typename Store::Elem x) {
  if constexpr (std::is_same_v<To, typename Store::Elem>) {
    return x;
  } else {
    return Store::widen(x);
  }
}
