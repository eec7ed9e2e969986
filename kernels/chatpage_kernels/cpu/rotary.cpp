// Rotates queries and keys by their positions and writes keys and values to their slots, token by token.
#include "rotary.h"

#include <cmath>

#include "dot.h"
#include "lanes.h"
#include "parallel.h"

namespace {

constexpr int kMaxHeadDim = 1024;
constexpr int kTokensAtOnce = 8;  // too few to make up for waking a thread

void normalize(float* head, int dim, const float* weight, float epsilon) {
  float squares = 0.f;
  for (int d = 0; d < dim; ++d) squares += head[d] * head[d];
  const float factor = 1.f / std::sqrt(squares / (float)dim + epsilon);
  for (int d = 0; d < dim; ++d) head[d] = head[d] * factor * weight[d];
}

// Pairs (d, d + rotary_dim / 2), as Hugging Face lays heads out; what lies behind rotary_dim stays.
void rotate(float* head, int rotary_dim, const float* table) {
  const int half = rotary_dim / 2;
  for (int d = 0; d < half; ++d) {
    const float cosine = table[d], sine = table[half + d], first = head[d], second = head[half + d];
    head[d] = first * cosine - second * sine;
    head[half + d] = second * cosine + first * sine;
  }
}

template <class Store>
void widen_row(const typename Store::Elem* from, int dim, float* to) {
  int d = 0;
  for (; d + simd::kLanes <= dim; d += simd::kLanes) simd::store(to + d, load_lanes(from + d));
  for (; d < dim; ++d) to[d] = Store::widen(from[d]);
}

template <class Store>
void narrow_row(const float* from, int dim, typename Store::Elem* to) {
  int d = 0;
  for (; d + simd::kLanes <= dim; d += simd::kLanes) Store::narrow(to + d, simd::load(from + d));
  for (; d < dim; ++d) to[d] = Store::narrow(from[d]);
}

// In: type of qkv. Out: type of the queries and the cache.
template <class In, class Out>
class Rotary {
  using Elem = typename Out::Elem;

 public:
  explicit Rotary(const RotaryCall& call) : call_(call), c_(call.cache) {}

  void run_token(int64_t token) const {
    const typename In::Elem* in = (const typename In::Elem*)call_.qkv + token * call_.qkv_row_stride;
    const float* table = call_.table + call_.positions[token] * call_.rotary_dim;
    Elem* query = (Elem*)call_.query + token * call_.num_query_heads * c_.head_dim;
    for (int h = 0; h < call_.num_query_heads; ++h, in += c_.head_dim, query += c_.head_dim) {
      turn(in, call_.query_norm, table, query);
    }
    const int64_t slot = call_.slots[token];
    if (slot >= 0) write(in, table, slot / c_.block_size, (int)(slot % c_.block_size));
  }

 private:
  void turn(const typename In::Elem* in, const float* norm, const float* table, Elem* out) const {
    alignas(64) float head[kMaxHeadDim];
    widen_row<In>(in, c_.head_dim, head);
    if (norm != nullptr) normalize(head, c_.head_dim, norm, call_.norm_epsilon);
    rotate(head, call_.rotary_dim, table);
    narrow_row<Out>(head, c_.head_dim, out);
  }

  void write(const typename In::Elem* in, const float* table, int64_t block, int row) const {
    Elem* keys = (Elem*)call_.key_cache + block * block_elements(c_, c_.head_dim);
    Elem* values = (Elem*)call_.value_cache + block * block_elements(c_, c_.head_dim);
    alignas(64) Elem key[kMaxHeadDim], value[kMaxHeadDim];
    alignas(64) float head[kMaxHeadDim];
    for (int h = 0; h < c_.num_kv_heads; ++h, in += c_.head_dim) {
      turn(in, call_.key_norm, table, key);
      widen_row<In>(in + (int64_t)c_.num_kv_heads * c_.head_dim, c_.head_dim, head);
      narrow_row<Out>(head, c_.head_dim, value);
      if (c_.packed) {
        Packed<Elem>::write_key(c_, keys, h, row, key);
        Packed<Elem>::write_value(c_, values, h, row, value);
      } else {
        std::memcpy(Plain<Elem>::row(c_, keys, h, row, c_.head_dim), key, sizeof(Elem) * c_.head_dim);
        std::memcpy(Plain<Elem>::row(c_, values, h, row, c_.head_dim), value, sizeof(Elem) * c_.head_dim);
      }
    }
  }

  const RotaryCall& call_;
  const CacheShape& c_;
};

template <class In, class Out>
Status run(const RotaryCall& call) {
  if (call.cache.head_dim > kMaxHeadDim || call.cache.value_dim != call.cache.head_dim) return kUnsupported;
  const Rotary<In, Out> rotary(call);
  Queue tokens(call.num_tokens, kTokensAtOnce);
  auto body = [&] {
    int64_t begin, end;
    while (tokens.take(&begin, &end)) {
      for (int64_t token = begin; token < end; ++token) rotary.run_token(token);
    }
  };
  run_team(std::min(call.num_threads, (call.num_tokens + kTokensAtOnce - 1) / kTokensAtOnce), body);
  return kOk;
}

bool is_inside(const RotaryCall& call) {
  const int64_t num_slots = call.cache.num_blocks * call.cache.block_size;
  for (int i = 0; i < call.num_tokens; ++i) {
    if (call.slots[i] >= num_slots || call.positions[i] < 0 || call.positions[i] >= call.num_positions) return false;
  }
  return true;
}

template <class In>
Status run_cache_type(const RotaryCall& call) {
  switch (call.cache.dtype) {
    case kFloat32: return run<In, StoreFp32>(call);
    case kBFloat16: return run<In, StoreBf16>(call);
    case kFloat16: return run<In, StoreFp16>(call);
    default: return kUnsupported;
  }
}

}  // namespace

// Refuses the call as a whole if a slot lies outside the cache or a position outside the table.
API int32_t chatpage_rotary(const RotaryCall* call) {
  if (!is_inside(*call)) return kOutsideCache;
  switch (call->qkv_dtype) {
    case kFloat32: return run_cache_type<StoreFp32>(*call);
    case kBFloat16: return run_cache_type<StoreBf16>(*call);
    default: return kUnsupported;
  }
}

API int64_t chatpage_rotary_abi() { return sizeof(RotaryCall); }
