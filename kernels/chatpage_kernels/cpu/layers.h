// All layers of a llama-like model in one call: between two tokens Python is entered once, not six times a layer.
#pragma once
#include "linear.h"
#include "rotary.h"

// What a layer's calls have in common for every step. Row counts, slots, positions and threads come from the step.
struct LayerCall {
  LinearCall qkv, output, gate_up, down;
  RotaryCall rotary;
  int32_t attention;  // which of the step's attention calls is this layer's
};

struct StepCall {
  const AttentionCall* attention;  // one for each kind of layer; each layer puts its own caches in
  const int64_t* slots;            // [num_rows]
  const int64_t* positions;        // [num_rows]
  int32_t num_rows, num_threads;
};
