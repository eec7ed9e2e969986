// A KV tile: up to kTileTokens neighbouring positions, as pointers to groups of kGroup tokens that the products can read.
//
// Where a block holds whole groups in the packed layout, the pointers go straight into the cache. Otherwise (plain layout, odd
// block sizes, fp16, value_dim off 16, and always the group at the edge of a range) the group is rebuilt in scratch, with zeros
// for tokens outside the range: what lies there was never written or belongs to nobody, and 0 * NaN would be NaN.
#pragma once
#include <algorithm>

#include "dot.h"

constexpr int kGroup = 16;
constexpr int kTileTokens = 128;    // the longest tile: reused by many rows, its overhead counts
constexpr int kFewRows = 24;        // query rows x heads of a group up to which reading keys costs more than using them
constexpr int kFewRowsTokens = 64;  // for few rows: a tile, what they add up and what is fetched ahead share the nearest cache
constexpr int kTileGroups = kTileTokens / kGroup;

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

template <class Dot>
struct Tile {
  using Kv = typename Dot::Kv;
  int first = 0;              // position of the first token; a multiple of kGroup
  int num_groups = 0;
  const Kv* key[kTileGroups];    // [head_dim / P, kGroup, P] each, rows key_step apart
  const Kv* value[kTileGroups];  // [kGroup / P, padded value_dim, P] each, rows value_step apart
  int64_t key_step = 0, value_step = 0;
};

// What to fetch from memory while a tile is worked on: the next tile, cut into four shares of which strips of rows take some
// each, so that the fetches spread over all the time that the tile takes.
struct Fetch {
  static constexpr int kShares = 4;
  const char* key[kTileGroups];    // groups of the next tile
  const char* value[kTileGroups];  // likewise
  int64_t key_step = 0;            // bytes between the cache lines of a group of keys
  int first_share = 0, num_shares = 0;

  bool has(int share) const { return share % kShares >= first_share && share % kShares < first_share + num_shares; }
};

// Reads the KV of one head of one sequence, tile by tile.
template <class Dot, class Store>
class TileReader {
  using Kv = typename Dot::Kv;
  using Elem = typename Store::Elem;
  static constexpr int P = Dot::P;

 public:
  static size_t scratch_elements(const CacheShape& c) {
    return (size_t)kTileTokens * (round_up(c.head_dim, 2) + round_up(c.value_dim, kGroup));
  }

  TileReader(const AttentionCall& call, const int32_t* table, int head, int lo, int hi, int tile_tokens, Kv* scratch)
      : c_(call.cache),
        keys_((const Elem*)call.key_cache),
        values_((const Elem*)call.value_cache),
        table_(table),
        head_(head),
        lo_(lo),
        hi_(hi),
        tile_tokens_(tile_tokens),
        padded_(round_up(c_.value_dim, kGroup)),
        key_block_(block_elements(c_, c_.head_dim)),
        value_block_(block_elements(c_, c_.value_dim)),
        key_in_place_(c_.packed != 0),
        value_in_place_(c_.packed != 0 && padded_ == c_.value_dim),
        staged_keys_(scratch),
        staged_values_(scratch + (size_t)kTileTokens * round_up(c_.head_dim, 2)) {}

  void read(int first, Tile<Dot>* tile) {
    tile->first = first;
    tile->num_groups = (std::min(first + tile_tokens_, hi_) - first + kGroup - 1) / kGroup;
    tile->key_step = (int64_t)(key_in_place_ ? c_.block_size : kGroup) * P;
    tile->value_step = (int64_t)padded_ * P;
    if (key_in_place_) locate(first, tile->num_groups, tile->key, tile->value);
    for (int g = 0; g < tile->num_groups; ++g) {
      const int position = first + g * kGroup;
      const bool is_whole = position >= lo_ && position + kGroup <= hi_;
      if (!key_in_place_) tile->key[g] = stage_key(g, position);
      if (!value_in_place_ || !is_whole) tile->value[g] = stage_value(g, position);
    }
  }

  // Returns false if there is no tile at `first`, or it will not be read in place.
  bool find_fetch(int first, Fetch* fetch) const {
    if (first >= hi_ || !key_in_place_ || !value_in_place_) return false;
    fetch->key_step = (int64_t)c_.block_size * P * (int64_t)sizeof(Kv);
    const int num_groups = tile_tokens_ / kGroup, num_there = std::min(num_groups, (hi_ - first + kGroup - 1) / kGroup);
    const Kv *key[kTileGroups], *value[kTileGroups];
    locate(first, num_there, key, value);
    for (int g = 0; g < num_groups; ++g) {
      fetch->key[g] = (const char*)key[std::min(g, num_there - 1)];
      fetch->value[g] = (const char*)value[std::min(g, num_there - 1)];
    }
    return true;
  }

 private:
  const Elem* block(const Elem* cache, int position, int dim) const {
    return cache + (int64_t)table_[position / c_.block_size] * block_elements(c_, dim);
  }

  // Where the groups from position `first` on lie in packed blocks. Divides once: a division costs as much as many products.
  void locate(int first, int num_groups, const Kv** key, const Kv** value) const {
    const int64_t key_head = Packed<Elem>::key(c_, head_, 0, 0), value_head = Packed<Elem>::value(c_, head_, 0, 0);
    const int32_t* entry = table_ + first / c_.block_size;
    int row = first % c_.block_size;
    for (int g = 0; g < num_groups; ++g) {
      key[g] = (const Kv*)(keys_ + *entry * key_block_ + key_head + row * P);
      value[g] = (const Kv*)(values_ + *entry * value_block_ + value_head + (int64_t)row * c_.value_dim);
      row += kGroup;
      if (row == c_.block_size) {
        row = 0;
        ++entry;
      }
    }
  }

  bool is_inside(int position) const { return position >= lo_ && position < hi_; }

  const Kv* stage_key(int g, int first) {
    Kv* out = staged_keys_ + (size_t)g * kGroup * round_up(c_.head_dim, 2);
    for (int t = 0; t < kGroup; ++t) {
      const int at = first + t;
      const Elem* row = is_inside(at) ? Plain<Elem>::row(c_, block(keys_, at, c_.head_dim), head_, at % c_.block_size, c_.head_dim)
                                      : nullptr;
      for (int d = 0; d < c_.head_dim; ++d) {
        out[((size_t)(d / P) * kGroup + t) * P + d % P] = row ? convert<Store, Kv>(row[d]) : Kv(0);
      }
    }
    return out;
  }

  const Kv* stage_value(int g, int first) {
    Kv* out = staged_values_ + (size_t)g * kGroup * padded_;
    std::memset(out, 0, sizeof(Kv) * kGroup * padded_);
    for (int t = 0; t < kGroup; ++t) {
      const int at = first + t, dim = c_.value_dim;
      if (!is_inside(at)) continue;
      Kv* to = out + (size_t)(t / P) * padded_ * P + t % P;
      const Elem* start = block(values_, at, dim);
      if (c_.packed && t % P == 0 && is_inside(at + P - 1)) {  // both tokens of a pair: one copy
        std::memcpy(to, start + Packed<Elem>::value(c_, head_, at % c_.block_size, 0), sizeof(Elem) * dim * P);
        t += P - 1;
      } else if (c_.packed) {
        const Elem* from = start + Packed<Elem>::value(c_, head_, at % c_.block_size, 0);
        for (int d = 0; d < dim; ++d) to[d * P] = convert<Store, Kv>(from[d * P]);
      } else {
        const Elem* from = Plain<Elem>::row(c_, start, head_, at % c_.block_size, dim);
        for (int d = 0; d < dim; ++d) to[d * P] = convert<Store, Kv>(from[d]);
      }
    }
    return out;
  }

  const CacheShape& c_;
  const Elem* keys_;
  const Elem* values_;
  const int32_t* table_;
  const int head_, lo_, hi_, tile_tokens_, padded_;
  const int64_t key_block_, value_block_;
  const bool key_in_place_, value_in_place_;
  Kv* staged_keys_;
  Kv* staged_values_;
};
