// Quantised linear layers: how packed weights and quantised activations lie in memory, and the calls that use them.
//
// Weights are cut into panels of 32 outputs. A panel holds, for each group of 32 inputs:
//
//     codes   two halves of 16 outputs; in each, vectors of 64 bytes hold 4 neighbouring inputs of each output, so that a dot
//             product instruction (4 bytes x 4 bytes into 32 bits) needs no shuffle:
//                 byte 4 * output + i of vector j:  4-bit  low nibble = input 4 j + i, high nibble = input 16 + 4 j + i (j < 4)
//                                                    8-bit  input 4 j + i, plus 128 (j < 8)
//     scales  32 x fp16, one per output
//     mins    32 x fp16 (Q4_1 only)
//
// The value of a weight is scale * code + min (Q4_1), scale * (code - 8) (Q4_0) or scale * (code - 128) (Q8_0).
// A group takes 640, 576 or 1088 bytes: whole cache lines, read in one stream from the first output to the last.
#pragma once
#include <cstdint>

#include "abi.h"

enum Format : int32_t { kQ4_0 = 0, kQ4_1 = 1, kQ8_0 = 2 };

constexpr int kPanelOutputs = 32, kGroupInputs = 32, kHalfOutputs = 16;

template <Format F>
struct GroupLayout {
  static constexpr bool kHasMins = F == kQ4_1, kIsWide = F == kQ8_0;
  static constexpr int kHalfBytes = kHalfOutputs * kGroupInputs / (kIsWide ? 1 : 2);
  static constexpr int kScales = 2 * kHalfBytes, kMins = kScales + 2 * kPanelOutputs;
  static constexpr int kBytes = kHasMins ? kMins + 2 * kPanelOutputs : kMins;
};

// A group of 32 activations of one row: value = scale * code. What the products need of their sum is kept beside them.
struct ActivationGroup {
  int8_t code[kGroupInputs];
  float scale;
  float sum;             // scale * sum of codes: what a min is multiplied by
  int32_t start4, start8;  // -8 and -128 times the sum of codes: takes the offset of Q4_0 and Q8_0 codes away, exactly
};
static_assert(sizeof(ActivationGroup) == 48);

struct LinearCall {
  const void* x;            // [num_rows, num_inputs], rows strided, in elements
  void* out;                // [num_rows, num_outputs], or half as many if gated; rows strided
  const void* residual;     // added to the result, out's type and shape, rows strided; may be out itself; or null
  const float* norm_weight;  // [num_inputs]: x goes through RMSNorm first; or null
  const float* bias;        // [32 * number of panels], in the order of the panels; or null
  const uint8_t* weight;
  int64_t x_row_stride, out_row_stride, residual_row_stride;
  int32_t num_rows, num_inputs, num_outputs;
  int32_t format, x_dtype, out_dtype;
  int32_t is_gated;  // each panel holds 16 outputs of a gate, then 16 to multiply: out = silu(gate) * other
  int32_t num_threads;
  float norm_epsilon;
};

struct EmbedCall {
  const uint8_t* weight;
  const int64_t* ids;  // [num_rows]
  void* out;           // [num_rows, num_inputs], contiguous
  int32_t num_rows, num_inputs, num_outputs, format, out_dtype;
};
