// Paged attention over the work items of a plan: all threads take units (item x some KV heads), then all merge partial results.
#include <new>
#include <optional>

#include "parallel.h"
#include "unit.h"

namespace {

// So many merges (row x head) are done by whoever ends the last unit: cheaper than one more meeting of all threads.
constexpr int64_t kMergedByOne = 1024;

// Merges the partial results of one row and query head: weights 2^(lse - max), the sink as one more weight without a value.
template <class Store>
void merge_row(const AttentionCall& call, const Partials& partials, int merge, int head) {
  const int dim = call.cache.value_dim, padded = round_up(dim, kGroup);
  const int32_t* begin = call.merge_parts + call.merge_indptr[merge];
  const int32_t* end = call.merge_parts + call.merge_indptr[merge + 1];
  const auto at = [&](const int32_t* part) { return (int64_t)*part * call.num_query_heads + head; };
  float peak = call.sinks != nullptr ? call.sinks[head] * kLog2E : kNegInf;
  for (const int32_t* p = begin; p < end; ++p) peak = std::max(peak, partials.lse[at(p)]);
  float weight = call.sinks != nullptr ? std::exp2(call.sinks[head] * kLog2E - peak) : 0.f;
  // The first partial result of the row is its own memory to sum up in: nobody else reads it.
  float* sum = partials.out + at(begin) * padded;
  for (const int32_t* p = begin; p < end; ++p) {
    const float w = std::exp2(partials.lse[at(p)] - peak);
    const float* from = partials.out + at(p) * padded;
    weight += w;
    for (int d = 0; d < padded; d += simd::kLanes) {
      const simd::Vec x = simd::mul(simd::set1(w), simd::load(from + d));
      simd::store(sum + d, p == begin ? x : simd::add(simd::load(sum + d), x));
    }
  }
  const int64_t row = (int64_t)call.merge_rows[merge] * call.num_query_heads + head;
  store_row<Store>(sum, weight == 0.f ? 0.f : 1.f / weight, dim, (typename Store::Elem*)call.out + row * dim);
}

template <class Dot, class Store>
void run_unit(const AttentionCall& call, const int32_t* unit, const UnitScratch<Dot>& scratch, const Partials& partials) {
  const int32_t* item = call.items + (int64_t)unit[0] * 8;
  const int num_heads = unit[2] - unit[1], rows = item[1] * (call.num_query_heads / call.cache.num_kv_heads);
  std::optional<HeadItem<Dot, Store>> heads[kMaxHeads];
  for (int i = 0; i < num_heads; ++i) {
    heads[i].emplace(call, item, unit[1] + i, scratch.for_head(call.cache, i, rows));
    heads[i]->begin();
  }
  for (int first = heads[0]->first_tile(); first < heads[0]->end(); first += heads[0]->tile_tokens()) {
    for (int i = 0; i < num_heads; ++i) heads[i]->add_tile(first);
  }
  for (int i = 0; i < num_heads; ++i) heads[i]->finish(partials);
}

template <class Dot, class Store>
Status run(const AttentionCall& call) {
  const CacheShape& c = call.cache;
  static thread_local Scratch partial_memory;
  const size_t rows = (size_t)call.num_parts * call.num_query_heads, padded = round_up(c.value_dim, kGroup);
  float* memory = (float*)partial_memory.reserve(rows * (padded + 1) * sizeof(float));
  if (rows != 0 && memory == nullptr) return kOutOfMemory;
  const Partials partials{memory, memory + rows * padded};

  const int group = call.num_query_heads / c.num_kv_heads;
  int max_rows = 0;
  for (const int32_t* unit = call.units; unit < call.units + 3 * (int64_t)call.num_units; unit += 3) {
    max_rows = std::max(max_rows, call.items[unit[0] * 8 + 1] * group * (unit[2] - unit[1]));
  }
  const size_t staged = TileReader<Dot, Store>::scratch_elements(c);
  const size_t bytes = UnitScratch<Dot>::bytes(c, max_rows, staged);
  const int num_threads = std::min(call.num_threads, call.num_units);
  const int64_t num_merges = (int64_t)call.num_merges * call.num_query_heads;
  const bool merge_together = num_merges > kMergedByOne;
  Queue units(call.num_units), merges(num_merges, 4);
  std::atomic<bool> is_out_of_memory{false};

  const auto merge_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      merge_row<Store>(call, partials, (int)(i / call.num_query_heads), (int)(i % call.num_query_heads));
    }
  };
  auto body = [&] {
    static thread_local Scratch unit_memory;
    char* base = (char*)unit_memory.reserve(bytes);
    int64_t begin, end;
    if (base == nullptr) is_out_of_memory = true;
    UnitScratch<Dot> scratch;
    UnitScratch<Dot>::layout(base, c, max_rows, staged, &scratch);
    while (base != nullptr && units.take(&begin, &end)) {
      run_unit<Dot, Store>(call, call.units + begin * 3, scratch, partials);
      if (units.finish(begin, end) && !merge_together) merge_some(0, num_merges);
    }
    if (!merge_together || base == nullptr) return;
    units.wait();
    while (merges.take(&begin, &end)) merge_some(begin, end);
  };
  run_team(num_threads, body);
  return is_out_of_memory ? kOutOfMemory : kOk;
}

}  // namespace

API int32_t chatpage_attention(const AttentionCall* call) {
  switch (call->cache.dtype) {
    case kFloat32: return run<DotFp32, StoreFp32>(*call);
    case kBFloat16: return run<DotBf16, StoreBf16>(*call);
    case kFloat16: return run<DotFp32, StoreFp16>(*call);
    default: return kUnsupported;
  }
}

API int64_t chatpage_abi() { return (int64_t)sizeof(AttentionCall) * 1000 + sizeof(WriteCall); }
