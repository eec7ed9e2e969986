// Chooses tokens from logits, one sample at a time: threads take samples, and a sample depends on its own row alone.
//
// A token is found by inverting the cumulative distribution. Its order is that of the token ids where every token may be drawn,
// else from the most to the least likely, equal ones by id; top_k, top_p and min_p each keep a head of this second order. Sums
// of 256 weights are added in fp32, everything longer in double.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr float kLog2E = 1.44269504f, kNegInf = -INFINITY;
constexpr int kBlock = 256;  // tokens whose weights are one term of the long sums
// Heads that are tried before the whole row is sorted, and the pieces whose largest logits bound them.
constexpr int kHeads[][2] = {{128, 64}, {1024, 16}};

float largest_of(const float* x, int size) {
  constexpr int kVecs = 4, kStep = kVecs * simd::kLanes;
  simd::Vec peak[kVecs];
  for (auto& p : peak) p = simd::set1(kNegInf);
  int i = 0;
  for (; i + kStep <= size; i += kStep) {
    for (int v = 0; v < kVecs; ++v) peak[v] = simd::max(simd::load(x + i + v * simd::kLanes), peak[v]);
  }
  float largest = simd::reduce_max(simd::max(simd::max(peak[0], peak[1]), simd::max(peak[2], peak[3])));
  for (; i < size; ++i) largest = std::max(largest, x[i]);
  return largest;
}

// exp((logit - peak) / temperature), 0 below the smallest weight that counts.
struct Weights {
  float peak, inverse_temperature, least;

  simd::Vec operator()(simd::Vec x) const {
    const simd::Vec scaled = simd::mul(simd::mul(simd::sub(x, simd::set1(peak)), simd::set1(inverse_temperature)), simd::set1(kLog2E));
    const simd::Vec weight = simd::exp2<5>(scaled);
    return least > 0.f ? simd::select_greater(simd::set1(least), weight, simd::zero(), weight) : weight;
  }
  float operator()(float x) const {
    alignas(64) float lanes[simd::kLanes];
    simd::store(lanes, (*this)(simd::set1(x)));
    return lanes[0];
  }
};

// The sum of a block's weights, at most kBlock; NaN if one of its logits is.
float block_sum(const float* x, int size, const Weights& weights) {
  simd::Vec sum[2] = {simd::zero(), simd::zero()};
  int i = 0;
  for (; i + 2 * simd::kLanes <= size; i += 2 * simd::kLanes) {
    for (int v = 0; v < 2; ++v) sum[v] = simd::add(sum[v], weights(simd::load(x + i + v * simd::kLanes)));
  }
  float total = simd::reduce_add(simd::add(sum[0], sum[1]));
  for (; i < size; ++i) total += weights(x[i]);
  return total;
}

// The sum of all weights; the cumulative sum over blocks goes to `ends` if given.
double sum_of(const float* x, int size, const Weights& weights, double* ends = nullptr) {
  double total = 0.0;
  for (int b = 0, at = 0; at < size; ++b, at += kBlock) {
    total += block_sum(x + at, std::min(kBlock, size - at), weights);
    if (ends != nullptr) ends[b] = total;
  }
  return total;
}

// Keeps the target under the total, so that the first end beyond it belongs to a token with some mass.
double below(double target, double total) { return std::min(target, std::nextafter(total, 0.0)); }

struct Candidate {
  float logit;
  int32_t id;
  bool operator<(const Candidate& other) const { return logit != other.logit ? logit > other.logit : id < other.id; }
};

// Room of one thread for a row.
struct Room {
  double* ends;           // [number of blocks]
  float* peaks;           // [number of pieces]
  Candidate* candidates;  // [vocab_size]

  static size_t bytes(int size) { return (size_t)(size / kBlock + 1) * 8 + (size_t)(size / 16 + 1) * 4 + (size_t)size * 8 + 64; }
  Room(char* base, int size) {
    ends = (double*)base;
    candidates = (Candidate*)(ends + size / kBlock + 1);
    peaks = (float*)(candidates + size);
  }
};

// Fills the candidates with the likeliest tokens in falling order and returns how many: at least `least` if there are so many,
// and with every token all that are equal to it. A value among the n largest lies at or above the n-th largest of the pieces'
// own largest values.
int find_head(const float* x, int size, int least, int piece, const Room& room) {
  int num_pieces = 0;
  for (int at = 0; at < size; at += piece) room.peaks[num_pieces++] = largest_of(x + at, std::min(piece, size - at));
  if (num_pieces < least) return 0;
  std::nth_element(room.peaks, room.peaks + least - 1, room.peaks + num_pieces, std::greater<float>());
  const float bound = room.peaks[least - 1];
  if (bound == kNegInf) return 0;
  int num = 0;
  for (int at = 0; at < size; at += simd::kLanes) {
    const int end = std::min(at + simd::kLanes, size);
    if (end - at == simd::kLanes && !simd::any_greater(simd::load(x + at), simd::set1(std::nextafter(bound, kNegInf)))) continue;
    for (int i = at; i < end; ++i) {
      if (x[i] >= bound) room.candidates[num++] = {x[i], i};
    }
  }
  std::sort(room.candidates, room.candidates + num);
  return num;
}

int sort_all(const float* x, int size, const Room& room) {
  for (int i = 0; i < size; ++i) room.candidates[i] = {x[i], i};
  std::sort(room.candidates, room.candidates + size);
  return size;
}

struct Filters {
  int top_k;  // 0: off
  double top_p, min_p, draw;
};

// Draws from a head of `num` candidates; -1 if the filters keep more than it holds, or it cannot be told.
int64_t draw_from_head(const Room& room, int num, int size, const Filters& filters, const Weights& weights, double mass) {
  const bool is_whole = num == size, has_top_k = filters.top_k > 0 && filters.top_k < size;
  if (has_top_k && filters.top_k > num) return -1;
  const int limit = has_top_k ? filters.top_k : num;
  const auto weight = [&](int i) { return std::exp((double)((room.candidates[i].logit - weights.peak) * weights.inverse_temperature)); };
  double whole = mass;
  if (has_top_k) {
    whole = 0.0;
    for (int i = 0; i < limit; ++i) whole += weight(i);
  }
  double kept_mass = 0.0;
  int kept = 0;
  for (; kept < limit; ++kept) {
    const double w = weight(kept);
    const bool is_in = (filters.top_p >= 1.0 || kept_mass < filters.top_p * whole) && w >= filters.min_p;
    if (kept > 0 && !is_in) break;
    kept_mass += w;
  }
  if (kept == num && !is_whole && !has_top_k) return -1;
  const double target = below(filters.draw * kept_mass, kept_mass);
  double end = 0.0;
  for (int i = 0; i < kept; ++i) {
    end += weight(i);
    if (end > target) return room.candidates[i].id;
  }
  return room.candidates[kept - 1].id;
}

int64_t draw_from_heads(const float* x, int size, const Filters& filters, const Weights& weights, const Room& room) {
  const double mass = filters.top_k > 0 && filters.top_k < size ? 0.0 : sum_of(x, size, weights);
  for (const auto& [least, piece] : kHeads) {
    const int num = find_head(x, size, least, piece, room);
    const int64_t token = num > 0 ? draw_from_head(room, num, size, filters, weights, mass) : -1;
    if (token >= 0) return token;
  }
  return draw_from_head(room, sort_all(x, size, room), size, filters, weights, mass);
}

int64_t draw_from_all(const float* x, int size, double draw, const Weights& weights, const Room& room) {
  const double total = sum_of(x, size, weights, room.ends);
  const double target = below(draw * total, total);
  const int num_blocks = (size + kBlock - 1) / kBlock;
  const int block = (int)(std::upper_bound(room.ends, room.ends + num_blocks - 1, target) - room.ends);
  double end = block > 0 ? room.ends[block - 1] : 0.0;
  int last = block * kBlock;  // with some mass: the block's own sum was added up in another order
  for (int i = block * kBlock; i < std::min(size, (block + 1) * kBlock); ++i) {
    const float weight = weights(x[i]);
    if (weight <= 0.f) continue;
    end += weight;
    last = i;
    if (end > target) break;
  }
  return last;
}

void choose(const SampleCall& call, int i, const Room& room) {
  const int size = call.vocab_size;
  const float* raw = call.raw + call.raw_row[i] * call.raw_stride;
  const float* x = call.edited + call.edited_row[i] * call.edited_stride;
  const float raw_peak = largest_of(raw, size), peak = x == raw ? raw_peak : largest_of(x, size);
  const double mass = sum_of(raw, size, {raw_peak, 1.f, 0.f});  // NaN or infinity in the row makes it NaN
  call.token[i] = -1;
  call.logprob[i] = std::numeric_limits<double>::quiet_NaN();
  if (!std::isfinite(raw_peak) || !std::isfinite(peak) || !std::isfinite(mass)) return;
  const float temperature = call.temperature[i];
  const Weights weights{peak, 1.f / temperature, 0.f};
  const Filters filters{call.top_k[i], call.top_p[i], call.min_p[i], call.draw[i]};
  int64_t token;
  if (temperature <= 0.f) {
    token = std::find(x, x + size, peak) - x;
  } else if (filters.top_k > 0 || filters.top_p < 1.0) {
    token = draw_from_heads(x, size, filters, weights, room);
  } else {
    // The weight of the likeliest token is 1 up to rounding: it must stay at min_p = 1 too.
    token = draw_from_all(x, size, filters.draw, {peak, 1.f / temperature, (float)filters.min_p * weights(peak)}, room);
  }
  call.token[i] = token;
  call.logprob[i] = (double)(raw[token] - raw_peak) - std::log(mass);
}

}  // namespace

API int32_t chatpage_sample(const SampleCall* call) {
  Queue samples(call->num_samples);
  std::atomic<bool> is_out_of_memory{false};
  auto body = [&] {
    static thread_local Scratch memory;
    char* base = (char*)memory.reserve(Room::bytes(call->vocab_size));
    if (base == nullptr) is_out_of_memory = true;
    int64_t begin, end;
    while (base != nullptr && samples.take(&begin, &end)) choose(*call, (int)begin, Room(base, call->vocab_size));
  };
  run_team(std::min(call->num_threads, call->num_samples), body);
  return is_out_of_memory ? kOutOfMemory : kOk;
}

API int64_t chatpage_sample_abi() { return sizeof(SampleCall); }
