// What the machine can do at most, measured with the same threads and instructions as the kernels: ceilings for benchmarks.
#include "dot.h"
#include "parallel.h"

// Reads [data, data + size) once on all threads; returns a sum so that no read can be left out.
API double chatpage_read_memory(const float* data, int64_t size, int32_t num_threads) {
  constexpr int64_t kPiece = 1 << 16, kStep = 8 * simd::kLanes;
  Queue pieces(size, kPiece);
  std::atomic<double> total{0.0};
  auto body = [&] {
    simd::Vec sum[8];
    for (auto& x : sum) x = simd::zero();
    int64_t begin, end;
    while (pieces.take(&begin, &end)) {
      for (int64_t i = begin; i + kStep <= end; i += kStep) {
        for (int j = 0; j < 8; ++j) {
          _mm_prefetch((const char*)(data + i + 1024 + j * simd::kLanes), _MM_HINT_T0);
          sum[j] = simd::add(sum[j], simd::load(data + i + j * simd::kLanes));
        }
      }
    }
    double mine = 0.0;
    for (const auto& x : sum) mine += simd::reduce_add(x);
    double old = total.load();
    while (!total.compare_exchange_weak(old, old + mine)) {
    }
  };
  run_team(num_threads, body);
  return total.load();
}

// Multiplies registers `rounds` times on all threads; returns the floating point operations done.
template <class Dot>
static double multiply(int64_t rounds, int num_threads) {
  std::atomic<float> sink{0.f};
  std::atomic<int> num_bodies{0};
  auto body = [&] {
    alignas(64) typename Dot::Kv b[64] = {};
    alignas(64) typename Dot::Act a[64] = {};
    simd::Vec sum[Dot::kRows * Dot::kVecs];
    for (auto& x : sum) x = simd::zero();
    const typename Dot::A left = Dot::load_a(a);
    const typename Dot::B right = Dot::load_b(b);
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 32
      for (int j = 0; j < Dot::kRows * Dot::kVecs; ++j) sum[j] = Dot::mac(sum[j], left, right);
    }
    for (const auto& x : sum) sink = sink + simd::reduce_add(x);
    ++num_bodies;
  };
  run_team(num_threads, body);
  return 2.0 * Dot::P * simd::kLanes * Dot::kRows * Dot::kVecs * (double)rounds * num_bodies;
}

API double chatpage_multiply(int32_t dtype, int64_t rounds, int32_t num_threads) {
  return dtype == kBFloat16 ? multiply<DotBf16>(rounds, num_threads) : multiply<DotFp32>(rounds, num_threads);
}
