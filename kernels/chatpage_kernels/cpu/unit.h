// An item of the plan on one KV head. Its rows are (query row, head of the group) pairs, all of which use every KV tile while it
// is in the cache; results go to the output, or to a partial result that is merged later.
//
// Several heads of an item may be worked on tile by tile in turns, each with scratch of its own (`for_head`): the heads of a
// block lie side by side in memory, so the processor sees longer runs to fetch ahead.
#pragma once
#include "softmax.h"

// Partial results of split and shared ranges: outputs [num_parts, query_heads, padded value_dim] and LSEs [num_parts, query_heads].
struct Partials {
  float* out;
  float* lse;
};

template <class Dot>
struct UnitScratch {
  typename Dot::Act* query;        // [rows, head_dim]
  float* out;                      // [rows, padded value_dim]
  float* peak;                     // [rows] maximum so far, in base 2
  simd::Vec* weight;               // [rows] sum of exp2(score - peak) so far, lane by lane
  int* position;                   // [rows]
  float* scores;                   // [kRows, kTileTokens]
  typename Dot::Act* probability;  // [kRows, kTileTokens]
  typename Dot::Kv* staged;

  // The part of `rows` rows that belongs to the i-th of several heads; what a tile needs is shared.
  UnitScratch for_head(const CacheShape& c, int i, int rows) const {
    const size_t skipped = (size_t)i * rows;
    UnitScratch part = *this;
    part.query += skipped * c.head_dim;
    part.out += skipped * round_up(c.value_dim, kGroup);
    part.peak += skipped;
    part.weight += skipped;
    part.position += skipped;
    return part;
  }

  static size_t bytes(const CacheShape& c, int rows, size_t staged_elements) {
    return layout(nullptr, c, rows, staged_elements, nullptr);
  }
  static size_t layout(char* base, const CacheShape& c, int rows, size_t staged_elements, UnitScratch* s) {
    size_t used = 0;
    const auto place = [&](auto** field, size_t count) {
      using T = std::remove_reference_t<decltype(**field)>;
      if (s != nullptr) *field = (T*)(base + used);
      used += (count * sizeof(T) + 63) / 64 * 64;
    };
    UnitScratch none;
    UnitScratch* to = s != nullptr ? s : &none;
    place(&to->query, (size_t)rows * c.head_dim);
    place(&to->out, (size_t)rows * round_up(c.value_dim, kGroup));
    place(&to->peak, rows);
    place(&to->weight, rows);
    place(&to->position, rows);
    place(&to->scores, (size_t)Dot::kRows * kTileTokens);
    place(&to->probability, (size_t)Dot::kRows * kTileTokens);
    place(&to->staged, staged_elements);
    return used;
  }
};

// Writes factor * from as dim elements.
template <class Store>
inline void store_row(const float* from, float factor, int dim, typename Store::Elem* to) {
  int d = 0;
  for (; d + simd::kLanes <= dim; d += simd::kLanes) {
    Store::narrow(to + d, simd::mul(simd::load(from + d), simd::set1(factor)));
  }
  for (; d < dim; ++d) to[d] = Store::narrow(from[d] * factor);
}

template <class Dot, class Store>
class HeadItem {
  using Elem = typename Store::Elem;

 public:
  HeadItem(const AttentionCall& call, const int32_t* item, int head, const UnitScratch<Dot>& scratch)
      : call_(call),
        c_(call.cache),
        s_(scratch),
        rows_(call.row_index + item[0]),
        head_(head),
        group_(call.num_query_heads / call.cache.num_kv_heads),
        num_rows_(item[1] * group_),
        lo_(item[3]),
        hi_(item[4]),
        part_(item[7]),
        padded_(round_up(call.cache.value_dim, kGroup)),
        tile_tokens_(num_rows_ <= kFewRows ? kFewRowsTokens : kTileTokens),
        reader_(call, call.block_tables + (int64_t)item[2] * call.table_stride, head, item[3], item[4], tile_tokens_,
                scratch.staged) {}

  int first_tile() const { return lo_ / kGroup * kGroup; }
  int end() const { return hi_; }
  int tile_tokens() const { return tile_tokens_; }

  void begin() { load_queries(); }

  // Adds the keys of the tile that starts at position `first`.
  void add_tile(int first) {
    Tile<Dot> tile;
    reader_.read(first, &tile);
    run_strips(tile, first + tile_tokens_);
  }

  void finish(const Partials& partials) {
    for (int r = 0; r < num_rows_; ++r) finish_row(r, partials);
  }

 private:
  void load_queries() {
    for (int r = 0; r < num_rows_; ++r) {
      const int64_t row = rows_[r / group_], head = head_ * group_ + r % group_;
      const Elem* from = (const Elem*)call_.query + row * call_.query_row_stride + head * call_.query_head_stride;
      for (int d = 0; d < c_.head_dim; ++d) {
        s_.query[(size_t)r * c_.head_dim + d] = convert<Store, typename Dot::Act>(from[d]);
      }
      s_.position[r] = call_.row_positions[row];
      s_.peak[r] = kNegInf;
      s_.weight[r] = simd::zero();
    }
    std::memset(s_.out, 0, sizeof(float) * num_rows_ * padded_);
  }

  // Strips of at most kRows rows, as even as they go: 8 rows are 4 + 4, not 6 + 2.
  void run_strips(const Tile<Dot>& tile, int next) {
    const int num_strips = (num_rows_ + Dot::kRows - 1) / Dot::kRows;
    Fetch fetch;
    const bool has_next = reader_.find_fetch(next, &fetch);
    const int shares = has_next ? (Fetch::kShares + num_strips - 1) / num_strips : 0;
    for (int i = 0; i < num_strips; ++i) {
      const int begin = num_rows_ * i / num_strips, end = num_rows_ * (i + 1) / num_strips;
      fetch.first_share = i * shares;
      fetch.num_shares = fetch.first_share < Fetch::kShares ? shares : 0;
      run_strip<Dot::kRows>(tile, begin, end - begin, fetch);
    }
  }

  template <int R>
  void run_strip(const Tile<Dot>& tile, int row0, int num, const Fetch& fetch) {
    if constexpr (R > 1) {
      if (num < R) return run_strip<R - 1>(tile, row0, num, fetch);
    }
    const int span = tile.num_groups * kGroup;
    int lo[R], hi[R], min_lo = span, max_hi = 0;
    bool has_edges = call_.softcap > 0.f;
    for (int r = 0; r < R; ++r) {
      const int position = s_.position[row0 + r];
      lo[r] = std::max(call_.window > 0 ? std::max(lo_, position - call_.window + 1) : lo_, tile.first) - tile.first;
      hi[r] = std::min(std::min(hi_, position + 1) - tile.first, span);
      min_lo = std::min(min_lo, lo[r]);
      max_hi = std::max(max_hi, hi[r]);
    }
    const int begin = min_lo / kGroup, end = (max_hi + kGroup - 1) / kGroup;
    if (begin >= end) return;
    for (int r = 0; r < R; ++r) has_edges |= lo[r] > begin * kGroup || hi[r] < end * kGroup;

    simd::Vec peak[R];
    for (int r = 0; r < R; ++r) peak[r] = simd::set1(kNegInf);
    score_groups<Dot, R>(s_.query + (size_t)row0 * c_.head_dim, c_.head_dim, tile, begin, end, s_.scores, peak, fetch);
    float scale = call_.scale * kLog2E, decay[R];
    if (has_edges) {
      for (int r = 0; r < R; ++r) {
        float* scores = s_.scores + r * kTileTokens;
        peak[r] = mask_row(scores, begin * kGroup, end * kGroup, lo[r], hi[r], scale, call_.softcap * kLog2E);
      }
      if (call_.softcap > 0.f) scale = 1.f;
    }
    raise_peaks<R>(peak, scale, s_.peak + row0, decay);
    for (int r = 0; r < R; ++r) {
      exponentiate_row<Dot>(s_.scores + r * kTileTokens, s_.probability + r * kTileTokens, begin * kGroup, end * kGroup, scale,
                            s_.peak[row0 + r], decay[r], &s_.weight[row0 + r]);
    }
    value_groups<Dot, R>(s_.probability, tile, begin, end, decay, s_.out + (size_t)row0 * padded_, padded_, fetch);
  }

  void finish_row(int r, const Partials& partials) {
    const int64_t head = head_ * group_ + r % group_;
    float* out = s_.out + (size_t)r * padded_;
    float weight = simd::reduce_add(s_.weight[r]), peak = s_.peak[r], keep = 1.f;
    if (part_ < 0 && call_.sinks != nullptr) {
      const float sink = call_.sinks[head] * kLog2E;
      peak = std::max(peak, sink);
      keep = std::exp2(s_.peak[r] - peak);
      weight = weight * keep + std::exp2(sink - peak);
    }
    const float factor = weight == 0.f ? 0.f : keep / weight;
    if (part_ >= 0) {
      const int64_t at = (int64_t)(part_ + r / group_) * call_.num_query_heads + head;
      for (int d = 0; d < padded_; ++d) partials.out[at * padded_ + d] = out[d] * factor;
      partials.lse[at] = peak + std::log2(weight);
    } else {
      const int64_t at = (int64_t)rows_[r / group_] * call_.num_query_heads + head;
      store_row<Store>(out, factor, c_.value_dim, (Elem*)call_.out + at * c_.value_dim);
    }
  }

  const AttentionCall& call_;
  const CacheShape& c_;
  const UnitScratch<Dot> s_;
  const int32_t* rows_;
  const int head_, group_, num_rows_, lo_, hi_, part_, padded_, tile_tokens_;
  TileReader<Dot, Store> reader_;
};
