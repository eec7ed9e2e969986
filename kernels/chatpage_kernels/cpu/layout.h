// How the rows of a block lie in memory, and the copies between the layouts.
//
// plain    K and V [block_size, kv_heads, dim]: what every other backend uses.
// packed   K [kv_heads, head_dim / P, block_size, P]: one load holds the same P dims of 16 neighbouring tokens, so a dot product
//          needs no shuffles; V [kv_heads, block_size / P, value_dim, P]: one load holds P tokens of neighbouring dims.
//          P = 2 for 16-bit elements (what a bf16 dot product instruction multiplies at once), 1 for fp32.
//
// bf16, token 5, dim 3 of K sits in pair row 1, column 5, half 1; of V in pair row 2, column 3, half 1.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi.h"

inline int64_t block_elements(const CacheShape& c, int dim) { return (int64_t)c.block_size * c.num_kv_heads * dim; }

inline bool has_two_byte_elements(const CacheShape& c) { return c.dtype != kFloat32; }

// Elem is the storage type: uint16_t for bf16 and fp16, uint32_t for fp32. P is 2 or 1 to match.
template <class Elem>
struct Packed {
  static constexpr int P = sizeof(Elem) == 2 ? 2 : 1;

  // The element (head, token, dim) of a block, as an offset from the block's start.
  static int64_t key(const CacheShape& c, int head, int token, int dim) {
    return ((int64_t)(head * (c.head_dim / P) + dim / P) * c.block_size + token) * P + dim % P;
  }
  static int64_t value(const CacheShape& c, int head, int token, int dim) {
    return ((int64_t)(head * (c.block_size / P) + token / P) * c.value_dim + dim) * P + token % P;
  }

  static void write_key(const CacheShape& c, Elem* block, int head, int token, const Elem* row) {
    char* out = (char*)(block + key(c, head, token, 0));
    const size_t step = (size_t)c.block_size * P * sizeof(Elem);
    for (int d = 0; d < c.head_dim; d += P, out += step) std::memcpy(out, row + d, P * sizeof(Elem));
  }
  static void write_value(const CacheShape& c, Elem* block, int head, int token, const Elem* row) {
    Elem* out = block + value(c, head, token, 0);
    for (int d = 0; d < c.value_dim; ++d) out[d * P] = row[d];
  }
  static void read_key(const CacheShape& c, const Elem* block, int head, int token, Elem* row) {
    const char* in = (const char*)(block + key(c, head, token, 0));
    const size_t step = (size_t)c.block_size * P * sizeof(Elem);
    for (int d = 0; d < c.head_dim; d += P, in += step) std::memcpy(row + d, in, P * sizeof(Elem));
  }
  static void read_value(const CacheShape& c, const Elem* block, int head, int token, Elem* row) {
    const Elem* in = block + value(c, head, token, 0);
    for (int d = 0; d < c.value_dim; ++d) row[d] = in[d * P];
  }
};

template <class Elem>
struct Plain {
  static Elem* row(const CacheShape& c, Elem* block, int head, int token, int dim) {
    return block + ((int64_t)token * c.num_kv_heads + head) * dim;
  }
  static const Elem* row(const CacheShape& c, const Elem* block, int head, int token, int dim) {
    return block + ((int64_t)token * c.num_kv_heads + head) * dim;
  }
};
