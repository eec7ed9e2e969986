// The C interface: what Python fills in and the kernels read. `library.py` mirrors these structs; `chatpage_abi` guards the pair.
#pragma once
#include <cstdint>

// Everything else stays hidden: two libraries in one process must not see each other.
#define API extern "C" __attribute__((visibility("default")))

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// One layer's KV cache. `packed` says how the bytes of a block lie, see layout.h.
struct CacheShape {
  int32_t block_size, num_kv_heads, head_dim, value_dim;
  int32_t dtype, packed;
  int64_t num_blocks;
};

constexpr int kMaxHeads = 8;  // KV heads of one unit of work

struct AttentionCall {
  const void* query;  // [num_tokens, num_query_heads, head_dim], rows and heads strided, in elements
  void* out;          // [num_tokens, num_query_heads, value_dim], contiguous
  const void* key_cache;
  const void* value_cache;
  const float* sinks;  // [num_query_heads] or null
  int64_t query_row_stride, query_head_stride;
  const int32_t* items;          // [.., 8], see plan.py
  const int32_t* units;          // [num_units, 3] item, first KV head, end of the KV heads; costliest first
  const int32_t* row_index;      // query rows of the items
  const int32_t* row_positions;  // [num_tokens]
  const int32_t* block_tables;   // [num_seqs, table_stride]
  const int32_t* merge_rows;     // [num_merges]
  const int32_t* merge_indptr;   // [num_merges + 1]
  const int32_t* merge_parts;    // [num_parts]
  int32_t num_units, table_stride, num_merges, num_parts, window;
  int32_t num_query_heads, num_threads;
  float scale, softcap;
  CacheShape cache;
};

struct WriteCall {
  const void* key;    // [num_tokens, num_kv_heads, head_dim], rows and heads strided, in elements
  const void* value;  // [num_tokens, num_kv_heads, value_dim], likewise
  void* key_cache;
  void* value_cache;
  const int64_t* slots;  // [num_tokens], below 0: skip
  int64_t key_row_stride, key_head_stride, value_row_stride, value_head_stride;
  int32_t num_tokens, num_threads;
  CacheShape cache;
};

// A failure is a return code: no exception crosses the interface.
enum Status : int32_t { kOk = 0, kOutOfMemory = 1, kUnsupported = 2, kOutsideCache = 3 };
