// What lies between the QKV projection and attention: norms of heads, rotation by position, and the write to the KV cache.
#pragma once
#include <cstdint>

#include "abi.h"

struct RotaryCall {
  const void* qkv;  // [num_tokens, (num_query_heads + 2 * num_kv_heads) * head_dim], rows strided, in elements
  void* query;      // [num_tokens, num_query_heads, head_dim], contiguous, of the cache's type
  void* key_cache;
  void* value_cache;
  const int64_t* slots;      // [num_tokens], below 0: not written
  const int64_t* positions;  // [num_tokens]
  const float* table;        // [num_positions, rotary_dim]: rotary_dim / 2 cosines, then as many sines
  const float* query_norm;   // [head_dim]: each query head goes through RMSNorm first; or null
  const float* key_norm;     // likewise
  int64_t qkv_row_stride;
  int32_t num_tokens, num_query_heads, num_positions, rotary_dim, qkv_dtype, num_threads;
  float norm_epsilon;
  CacheShape cache;  // value_dim = head_dim
};
