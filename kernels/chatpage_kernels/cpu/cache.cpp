// Writes to the KV cache: new rows into their slots, copy-on-write of the first rows of blocks, and the change of layout.
#include <new>

#include "layout.h"
#include "parallel.h"

namespace {

template <class Elem>
void write_token(const WriteCall& call, int64_t token) {
  const CacheShape& c = call.cache;
  const int64_t slot = call.slots[token];
  if (slot < 0) return;
  const int64_t block = slot / c.block_size;
  const int row = (int)(slot % c.block_size);
  Elem* keys = (Elem*)call.key_cache + block * block_elements(c, c.head_dim);
  Elem* values = (Elem*)call.value_cache + block * block_elements(c, c.value_dim);
  for (int h = 0; h < c.num_kv_heads; ++h) {
    const Elem* key = (const Elem*)call.key + token * call.key_row_stride + h * call.key_head_stride;
    const Elem* value = (const Elem*)call.value + token * call.value_row_stride + h * call.value_head_stride;
    if (c.packed) {
      Packed<Elem>::write_key(c, keys, h, row, key);
      Packed<Elem>::write_value(c, values, h, row, value);
    } else {
      std::memcpy(Plain<Elem>::row(c, keys, h, row, c.head_dim), key, sizeof(Elem) * c.head_dim);
      std::memcpy(Plain<Elem>::row(c, values, h, row, c.value_dim), value, sizeof(Elem) * c.value_dim);
    }
  }
}

template <class Elem>
void write_all(const WriteCall& call) {
  constexpr int kPiece = 32;  // neighbouring slots share cache lines: one thread takes a run of them
  Queue tokens(call.num_tokens, kPiece);
  auto body = [&] {
    int64_t begin, end;
    while (tokens.take(&begin, &end)) {
      for (int64_t t = begin; t < end; ++t) write_token<Elem>(call, t);
    }
  };
  run_team(std::min(call.num_threads, (call.num_tokens + kPiece - 1) / kPiece), body);
}

enum class Part { kKeys, kValues };

// Copies the first num_rows rows of a block; what lies behind them in the destination stays.
template <class Elem>
void copy_rows(const CacheShape& c, Part part, const Elem* from, Elem* to, int num_rows) {
  constexpr int P = Packed<Elem>::P;
  const int dim = part == Part::kKeys ? c.head_dim : c.value_dim;
  if (num_rows == c.block_size || !c.packed) {
    std::memcpy(to, from, sizeof(Elem) * num_rows * c.num_kv_heads * dim);
  } else if (part == Part::kKeys) {
    const int64_t step = (int64_t)c.block_size * P;
    for (int64_t i = 0; i < (int64_t)c.num_kv_heads * dim / P; ++i) {
      std::memcpy(to + i * step, from + i * step, sizeof(Elem) * num_rows * P);
    }
  } else {
    const int whole = num_rows / P * P;
    for (int h = 0; h < c.num_kv_heads; ++h) {
      const int64_t start = (int64_t)h * c.block_size * dim, last = start + (int64_t)whole * dim;
      std::memcpy(to + start, from + start, sizeof(Elem) * whole * dim);
      for (int d = 0; whole < num_rows && d < dim; ++d) to[last + d * P] = from[last + d * P];
    }
  }
}

template <class Elem>
void copy_all(void* const* caches, int num_layers, const int64_t* copies, int num_copies, const CacheShape& c, int num_threads) {
  Queue parts(2 * (int64_t)num_layers);  // keys and values of each layer in turn
  auto body = [&] {
    int64_t begin, end;
    while (parts.take(&begin, &end)) {
      const Part part = begin % 2 == 0 ? Part::kKeys : Part::kValues;
      const int64_t size = block_elements(c, part == Part::kKeys ? c.head_dim : c.value_dim);
      Elem* cache = (Elem*)caches[begin];
      for (const int64_t* copy = copies; copy < copies + 3 * (int64_t)num_copies; copy += 3) {
        copy_rows<Elem>(c, part, cache + copy[0] * size, cache + copy[1] * size, (int)copy[2]);
      }
    }
  };
  run_team(num_threads, body);
}

// Rearranges one block through scratch, from the plain layout to the packed one or back.
template <class Elem>
void convert_block(const CacheShape& c, Part part, bool to_packed, Elem* block, Elem* scratch) {
  const int dim = part == Part::kKeys ? c.head_dim : c.value_dim;
  std::memcpy(scratch, block, sizeof(Elem) * block_elements(c, dim));
  for (int t = 0; t < c.block_size; ++t) {
    for (int h = 0; h < c.num_kv_heads; ++h) {
      const Elem* row = Plain<Elem>::row(c, (const Elem*)scratch, h, t, dim);
      Elem* out = Plain<Elem>::row(c, block, h, t, dim);
      if (part == Part::kKeys) {
        to_packed ? Packed<Elem>::write_key(c, block, h, t, row) : Packed<Elem>::read_key(c, scratch, h, t, out);
      } else {
        to_packed ? Packed<Elem>::write_value(c, block, h, t, row) : Packed<Elem>::read_value(c, scratch, h, t, out);
      }
    }
  }
}

template <class Elem>
Status convert_all(void* cache, Part part, bool to_packed, const CacheShape& c, int num_threads) {
  const int64_t size = block_elements(c, part == Part::kKeys ? c.head_dim : c.value_dim);
  Queue blocks(c.num_blocks, 8);
  std::atomic<bool> is_out_of_memory{false};
  auto body = [&] {
    Scratch memory;
    Elem* scratch = (Elem*)memory.reserve(sizeof(Elem) * size);
    if (scratch == nullptr) is_out_of_memory = true;
    int64_t begin, end;
    while (scratch != nullptr && blocks.take(&begin, &end)) {
      for (int64_t b = begin; b < end; ++b) convert_block<Elem>(c, part, to_packed, (Elem*)cache + b * size, scratch);
    }
  };
  run_team(num_threads, body);
  return is_out_of_memory ? kOutOfMemory : kOk;
}

}  // namespace

// Refuses the call as a whole if a slot lies outside the cache.
API int32_t chatpage_write_kv(const WriteCall* call) {
  const int64_t num_slots = call->cache.num_blocks * call->cache.block_size;
  for (int i = 0; i < call->num_tokens; ++i) {
    if (call->slots[i] >= num_slots) return kOutsideCache;
  }
  has_two_byte_elements(call->cache) ? write_all<uint16_t>(*call) : write_all<uint32_t>(*call);
  return kOk;
}

// caches: keys and values of each layer in turn. copies: [num_copies, 3] source, destination, rows; likewise refused as a whole.
API int32_t chatpage_copy_blocks(void* const* caches, int32_t num_layers, const int64_t* copies, int32_t num_copies,
                                 const CacheShape* c, int32_t num_threads) {
  for (const int64_t* copy = copies; copy < copies + 3 * (int64_t)num_copies; copy += 3) {
    const bool is_inside = std::min(copy[0], copy[1]) >= 0 && std::max(copy[0], copy[1]) < c->num_blocks;
    if (!is_inside || copy[2] < 0 || copy[2] > c->block_size) return kOutsideCache;
  }
  has_two_byte_elements(*c) ? copy_all<uint16_t>(caches, num_layers, copies, num_copies, *c, num_threads)
                            : copy_all<uint32_t>(caches, num_layers, copies, num_copies, *c, num_threads);
  return kOk;
}

API int32_t chatpage_convert(void* cache, int32_t is_values, int32_t to_packed, const CacheShape* c, int32_t num_threads) {
  const Part part = is_values ? Part::kValues : Part::kKeys;
  if (has_two_byte_elements(*c)) return convert_all<uint16_t>(cache, part, to_packed, *c, num_threads);
  return convert_all<uint32_t>(cache, part, to_packed, *c, num_threads);
}
