// Runs the layers one after the other: QKV, rotation and cache write, attention, output, gate and up, down.
#include "layers.h"

API int32_t chatpage_linear(const LinearCall* call);
API int32_t chatpage_rotary(const RotaryCall* call);
API int32_t chatpage_attention(const AttentionCall* call);

namespace {

int32_t run_linear(LinearCall call, const StepCall& step) {
  call.num_rows = step.num_rows;
  call.num_threads = step.num_threads;
  return chatpage_linear(&call);
}

int32_t run_rotary(RotaryCall call, const StepCall& step) {
  call.num_tokens = step.num_rows;
  call.num_threads = step.num_threads;
  call.slots = step.slots;
  call.positions = step.positions;
  return chatpage_rotary(&call);
}

int32_t run_attention(AttentionCall call, const LayerCall& layer) {
  call.key_cache = layer.rotary.key_cache;
  call.value_cache = layer.rotary.value_cache;
  return chatpage_attention(&call);
}

int32_t run_layer(const LayerCall& layer, const StepCall& step) {
  if (int32_t status = run_linear(layer.qkv, step)) return status;
  if (int32_t status = run_rotary(layer.rotary, step)) return status;
  if (int32_t status = run_attention(step.attention[layer.attention], layer)) return status;
  if (int32_t status = run_linear(layer.output, step)) return status;
  if (int32_t status = run_linear(layer.gate_up, step)) return status;
  return run_linear(layer.down, step);
}

}  // namespace

// Stops at the first failure. Slots and positions are those of all layers: a wrong one is refused before anything is written.
API int32_t chatpage_layers(const LayerCall* layers, int32_t num_layers, const StepCall* step) {
  for (int i = 0; i < num_layers; ++i) {
    if (int32_t status = run_layer(layers[i], *step)) return status;
  }
  return kOk;
}

API int64_t chatpage_layers_abi() { return (int64_t)sizeof(LayerCall) * 1000 + sizeof(StepCall); }
