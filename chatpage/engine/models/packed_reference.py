"""A model over packed weights in plain torch and fp32: what the C++ kernels are held to when a model is loaded.

Invariant: nothing here is shared with them but the packed bytes: products are of dequantised weights and whole activations,
attention is over plain tensors.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from chatpage.engine.models.packed_weights import LayerWeights, PackedModel
from chatpage_kernels.quantized_linear import embed, linear
from chatpage_kernels.rotary import rotary_table, rotate


def reference_logits(model: PackedModel, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the logits after every token.

    Args:
        model: The weights.
        sequences: int64 token ids of each sequence.

    Returns:
        fp32 [number of all tokens, vocab_size], one sequence after the other.
    """
    lengths = [len(ids) for ids in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    epsilon = model.shape.norm_epsilon
    table = rotary_table(model.shape.frequencies, max(lengths), model.shape.rotary_factor)
    hidden = embed(torch.cat(list(sequences)), model.embedding, torch.float32)
    for layer, window in zip(model.layers, model.shape.windows, strict=True):
        query, key, value = _heads(model, layer, hidden, positions, table)
        parts = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        attended = torch.cat([_attend(*part, window=window) for part in parts])
        hidden = linear(attended.flatten(1), layer.output, residual=hidden)
        gated = linear(hidden, layer.gate_up, norm_weight=layer.mlp_norm, norm_epsilon=epsilon)
        hidden = linear(gated, layer.down, residual=hidden)
    return linear(hidden, model.head, norm_weight=model.final_norm, norm_epsilon=epsilon)


def _heads(
    model: PackedModel, layer: LayerWeights, hidden: torch.Tensor, positions: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rotated queries, rotated keys, and values, each [num_tokens, num_heads, head_dim]."""
    shape = model.shape
    qkv = linear(hidden, layer.qkv, norm_weight=layer.input_norm, norm_epsilon=shape.norm_epsilon)
    heads = qkv.view(len(hidden), -1, shape.head_dim)
    query, key, value = heads.split([shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    query = rotate(query, positions, table, norm=layer.query_norm, norm_epsilon=shape.norm_epsilon)
    return query, rotate(key, positions, table, norm=layer.key_norm, norm_epsilon=shape.norm_epsilon), value


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, window: int) -> torch.Tensor:
    """Attend inside one sequence, [num_tokens, num_q_heads, head_dim]."""
    length = len(query)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    is_seen = (distance >= 0) & (distance < (window or length))
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=is_seen, enable_gqa=True)[0].transpose(0, 1)
