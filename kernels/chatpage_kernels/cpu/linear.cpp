// Linear layers over packed weights: all threads quantise the activations, then take panels and multiply all rows with each.
//
// One loop serves decode and prefill. With few rows the weights' way from memory is the cost: each panel is read once, the next
// one is fetched meanwhile. With many rows the products are: a panel stays in the cache for all of them.
#include "activations.h"
#include "dot.h"
#include "linear_strip.h"
#include "parallel.h"

namespace {

constexpr int64_t kRowBlockBytes = 512 << 10;  // activations that stay in the cache from one panel to the next
constexpr int kMinRowBlock = 48;
constexpr int64_t kSoloInputs = 2048;  // quantised by the calling thread alone: less work than meeting the others
constexpr int kAheadMinRows = 3;  // with fewer, the processor's own prefetchers are faster
constexpr int kAheadGroups = 4;

template <class Store>
class Epilogue {
  using Elem = typename Store::Elem;

 public:
  explicit Epilogue(const LinearCall& call)
      : call_(call),
        panel_width_(call.is_gated ? kHalfOutputs : kPanelOutputs),
        num_columns_(call.is_gated ? call.num_outputs / 2 : call.num_outputs) {}

  // Finishes a row of a panel's results, [32], and writes it. May change the tile.
  void finish(float* tile, int64_t row, int panel) const {
    if (call_.bias != nullptr) {
      const float* bias = call_.bias + panel * kPanelOutputs;
      for (int i = 0; i < kPanelOutputs; i += simd::kLanes) {
        simd::store(tile + i, simd::add(simd::load(tile + i), simd::load(bias + i)));
      }
    }
    if (call_.is_gated) {
      for (int i = 0; i < kHalfOutputs; i += simd::kLanes) {
        simd::store(tile + i, simd::mul(silu(simd::load(tile + i)), simd::load(tile + kHalfOutputs + i)));
      }
    }
    const int column = panel * panel_width_, width = std::min(panel_width_, num_columns_ - column);
    Elem* out = (Elem*)call_.out + row * call_.out_row_stride + column;
    const Elem* residual = nullptr;
    if (call_.residual != nullptr) residual = (const Elem*)call_.residual + row * call_.residual_row_stride + column;
    int i = 0;
    for (; i + simd::kLanes <= width; i += simd::kLanes) {
      simd::Vec value = simd::load(tile + i);
      if (residual != nullptr) value = simd::add(value, load_lanes(residual + i));
      Store::narrow(out + i, value);
    }
    for (; i < width; ++i) {
      out[i] = Store::narrow(residual != nullptr ? tile[i] + Store::widen(residual[i]) : tile[i]);
    }
  }

 private:
  const LinearCall& call_;
  const int panel_width_, num_columns_;
};

// One product as work for a team: every thread calls quantize(), then multiply(), which waits until all rows are quantised.
template <Format F, class Store>
class Linear {
 public:
  Linear(const LinearCall& call, ActivationGroup* activations)
      : call_(call),
        epilogue_(call),
        activations_(activations),
        num_groups_(call.num_inputs / kGroupInputs),
        num_panels_((call.num_outputs + kPanelOutputs - 1) / kPanelOutputs),
        block_rows_(rows_of_block(call.num_rows, num_groups_)),
        num_blocks_((call.num_rows + block_rows_ - 1) / block_rows_),
        rows_(call.num_rows, kStripRows),
        panels_(num_panels_ * num_blocks_, std::max<int64_t>(1, num_panels_ / (8 * call.num_threads))) {}

  void quantize() {
    int64_t begin, end;
    while (rows_.take(&begin, &end)) {
      for (int64_t row = begin; row < end; ++row) quantize_one(row);
      rows_.finish(begin, end);
    }
  }

  // Takes its next panels before it has done the present ones, so it always knows what to fetch.
  void multiply() {
    rows_.wait();
    int64_t begin, end, next_begin, next_end;
    bool has_work = panels_.take(&begin, &end);
    while (has_work) {
      has_work = panels_.take(&next_begin, &next_end);
      for (int64_t unit = begin; unit < end; ++unit) {
        multiply_panel(unit, unit + 1 < end ? unit + 1 : has_work ? next_begin : unit);
      }
      begin = next_begin;
      end = next_end;
    }
  }

 private:
  static int64_t rows_of_block(int64_t num_rows, int64_t num_groups) {
    const int64_t fitting = kRowBlockBytes / (num_groups * (int64_t)sizeof(ActivationGroup));
    return std::max<int64_t>(1, std::min(num_rows, std::max<int64_t>(kMinRowBlock, fitting)));
  }

  void quantize_one(int64_t row) {
    ActivationGroup* out = activations_ + row * num_groups_;
    const int64_t start = row * call_.x_row_stride;
    if (call_.x_dtype == kFloat32) {
      quantize_row((const float*)call_.x + start, call_.num_inputs, call_.norm_weight, call_.norm_epsilon, out);
    } else {
      quantize_row((const uint16_t*)call_.x + start, call_.num_inputs, call_.norm_weight, call_.norm_epsilon, out);
    }
  }

  const uint8_t* panel_of(int64_t unit) const {
    return call_.weight + unit % num_panels_ * num_groups_ * GroupLayout<F>::kBytes;
  }

  // The first strip meets the panel for the first time, the others fetch the next one, a part each.
  Ahead ahead_in_panel(int64_t unit, int64_t num_rows) const {
    if (num_rows < kAheadMinRows) return {nullptr, 0};
    return {(const char*)panel_of(unit) + kAheadGroups * GroupLayout<F>::kBytes, kGroupLines};
  }
  Ahead ahead_in_next(int64_t unit, int64_t next, int64_t part, int64_t num_parts) const {
    const int64_t lines = (kGroupLines + num_parts - 1) / num_parts;
    if (next == unit || part * lines >= kGroupLines) return {nullptr, 0};
    return {(const char*)panel_of(next) + part * lines * num_groups_ * 64, (int)lines};
  }

  // A unit is one panel with one block of rows, in strips as even as they go: 8 rows are 4 + 4, not 6 + 2.
  void multiply_panel(int64_t unit, int64_t next) {
    const int panel = (int)(unit % num_panels_);
    const int64_t first = unit / num_panels_ * block_rows_, num_rows = std::min(block_rows_, call_.num_rows - first);
    const int64_t num_strips = (num_rows + kStripRows - 1) / kStripRows;
    alignas(64) float tile[kStripRows * kPanelOutputs];
    for (int64_t s = 0; s < num_strips; ++s) {
      const int64_t begin = first + num_rows * s / num_strips, end = first + num_rows * (s + 1) / num_strips;
      const Ahead ahead = s == 0 ? ahead_in_panel(unit, num_rows) : ahead_in_next(unit, next, s - 1, num_strips - 1);
      multiply_strip<F>(panel_of(unit), activations_ + begin * num_groups_, (int)(end - begin), num_groups_, ahead, tile);
      for (int64_t row = begin; row < end; ++row) epilogue_.finish(tile + (row - begin) * kPanelOutputs, row, panel);
    }
  }

  static constexpr int kGroupLines = GroupLayout<F>::kBytes / 64;

  const LinearCall& call_;
  const Epilogue<Store> epilogue_;
  ActivationGroup* activations_;
  const int num_groups_;
  const int64_t num_panels_, block_rows_, num_blocks_;
  Queue rows_, panels_;
};

template <Format F, class Store>
Status run(const LinearCall& call) {
  static thread_local Scratch memory;
  const size_t groups = (size_t)call.num_rows * (call.num_inputs / kGroupInputs);
  ActivationGroup* activations = (ActivationGroup*)memory.reserve(groups * sizeof(ActivationGroup));
  if (activations == nullptr) return kOutOfMemory;
  Linear<F, Store> linear(call, activations);
  const bool is_small = (int64_t)call.num_rows * call.num_inputs <= kSoloInputs;
  if (is_small) linear.quantize();
  auto body = [&] {
    if (!is_small) linear.quantize();
    linear.multiply();
  };
  run_team(call.num_threads, body);
  return kOk;
}

template <class Store>
Status run_format(const LinearCall& call) {
  switch (call.format) {
    case kQ4_0: return run<kQ4_0, Store>(call);
    case kQ4_1: return run<kQ4_1, Store>(call);
    case kQ8_0: return run<kQ8_0, Store>(call);
    default: return kUnsupported;
  }
}

// Writes the values of one output's weights: how a row of an embedding is read.
template <Format F, class Store>
void dequantize_row(const uint8_t* weight, int64_t row, int num_inputs, typename Store::Elem* out) {
  using Layout = GroupLayout<F>;
  const int column = (int)(row % kPanelOutputs), half = column / kHalfOutputs, lane = column % kHalfOutputs;
  const uint8_t* group = weight + row / kPanelOutputs * (num_inputs / kGroupInputs) * Layout::kBytes;
  for (int g = 0; g < num_inputs / kGroupInputs; ++g, group += Layout::kBytes, out += kGroupInputs) {
    const uint8_t* codes = group + half * Layout::kHalfBytes + 4 * lane;
    const float scale = simd::half_to_float(((const uint16_t*)(group + Layout::kScales))[column]);
    float min = -(Layout::kIsWide ? 128.f : 8.f) * scale;
    if constexpr (Layout::kHasMins) min = simd::half_to_float(((const uint16_t*)(group + Layout::kMins))[column]);
    for (int k = 0; k < kGroupInputs; ++k) {
      const int nibble = Layout::kIsWide ? k : k % (kGroupInputs / 2);
      const int byte = codes[nibble / 4 * 4 * kHalfOutputs + nibble % 4];
      const int code = Layout::kIsWide ? byte : k < kGroupInputs / 2 ? byte & 15 : byte >> 4;
      out[k] = Store::narrow(std::fma((float)code, scale, min));
    }
  }
}

template <class Store>
Status embed(const EmbedCall& call) {
  const auto dequantize = call.format == kQ4_0   ? dequantize_row<kQ4_0, Store>
                          : call.format == kQ4_1 ? dequantize_row<kQ4_1, Store>
                                                 : dequantize_row<kQ8_0, Store>;
  typename Store::Elem* out = (typename Store::Elem*)call.out;
  for (int64_t i = 0; i < call.num_rows; ++i) dequantize(call.weight, call.ids[i], call.num_inputs, out + i * call.num_inputs);
  return kOk;
}

}  // namespace

API int32_t chatpage_linear(const LinearCall* call) {
  switch (call->out_dtype) {
    case kFloat32: return run_format<StoreFp32>(*call);
    case kBFloat16: return run_format<StoreBf16>(*call);
    default: return kUnsupported;
  }
}

// Refuses the call as a whole if an id has no row.
API int32_t chatpage_embed(const EmbedCall* call) {
  for (int i = 0; i < call->num_rows; ++i) {
    if (call->ids[i] < 0 || call->ids[i] >= call->num_outputs) return kOutsideCache;
  }
  switch (call->out_dtype) {
    case kFloat32: return embed<StoreFp32>(*call);
    case kBFloat16: return embed<StoreBf16>(*call);
    default: return kUnsupported;
  }
}

API int64_t chatpage_linear_abi() { return (int64_t)sizeof(LinearCall) * 1000 + sizeof(EmbedCall); }
