"""Layers run in one call give, to the bit, what their parts give one by one."""

import dataclasses

import numpy as np
import pytest
import torch

from chatpage_kernels import plan_attention
from chatpage_kernels.cpu import tiles
from chatpage_kernels.cpu.kernels import CpuKernels, PreparedAttention
from chatpage_kernels.cpu.layers import CpuLayers, Layer
from chatpage_kernels.cpu.rotary import CpuRotary
from chatpage_kernels.plan import AttentionPlan
from chatpage_kernels.quantized_linear import cpp_backend
from chatpage_kernels.quantized_weights import Format, pack
from chatpage_kernels.rotary import rotary_table
from tests.kernels.cpu_libraries import ISA_NAMES, kernels_for
from tests.kernels.quantized_layers import gated, random_rows

HIDDEN, NUM_Q, NUM_KV, HEAD_DIM, GATED, SCALE = 96, 6, 2, 16, 160, 0.25
TABLE = rotary_table(10000.0 ** -(torch.arange(HEAD_DIM // 2) / 8), 200)
POSITIONS = torch.tensor([35, 36, 37, 11])
SLOTS = torch.tensor([2 * 16 + 3, 2 * 16 + 4, 2 * 16 + 5, 5 * 16 + 11])


@pytest.fixture(params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return kernels_for(request.param)


def _layer(seed: int, *, has_norms: bool, dtype: torch.dtype = torch.float32) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    norm = torch.rand(2, HIDDEN, generator=generator) + 0.5
    heads = torch.rand(2, HEAD_DIM, generator=generator) + 0.5
    caches = torch.randn(2, 6, 16, NUM_KV, HEAD_DIM, generator=generator).to(dtype)
    return Layer(
        input_norm=norm[0],
        qkv=pack(*(random_rows(Format.Q4_1, n * HEAD_DIM, HIDDEN, seed + n) for n in (NUM_Q, NUM_KV, NUM_KV))),
        output=pack(random_rows(Format.Q4_0, HIDDEN, NUM_Q * HEAD_DIM, seed)),
        mlp_norm=norm[1],
        gate_up=gated(Format.Q4_1, GATED, HIDDEN)[2],
        down=pack(random_rows(Format.Q8_0, HIDDEN, GATED, seed)),
        key_cache=caches[0],
        value_cache=caches[1],
        query_norm=heads[0] if has_norms else None,
        key_norm=heads[1] if has_norms else None,
    )


def _plan() -> AttentionPlan:
    """Two sequences: three tokens of a chunk over blocks 4, 1, 2, and one token over block 5."""
    tables = np.array([[4, 1, 2], [5, -1, -1]], np.int32)
    starts, lens = np.array([0, 3, 4], np.int32), np.array([38, 12], np.int32)
    return plan_attention(starts, lens, tables, block_size=16, num_q_heads=NUM_Q, num_kv_heads=NUM_KV, tile=tiles(2)[0])


def _with_own_caches(layer: Layer) -> Layer:
    return dataclasses.replace(layer, key_cache=layer.key_cache.clone(), value_cache=layer.value_cache.clone())


def _run_parts(kernels: CpuKernels, layers: list[Layer], hidden: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """Run every part by its own call, each tested by itself elsewhere."""
    backend, rotary = cpp_backend(kernels.library), CpuRotary(kernels.library)
    hidden = hidden.clone()
    for layer in layers:
        qkv = backend.linear(hidden, layer.qkv, norm_weight=layer.input_norm)
        query = torch.empty(len(hidden), NUM_Q, HEAD_DIM, dtype=layer.key_cache.dtype)
        call = rotary.prepare(
            qkv, query, layer.key_cache, layer.value_cache, slot_mapping=SLOTS, positions=POSITIONS, table=TABLE,
            query_norm=layer.query_norm, key_norm=layer.key_norm,
        )  # fmt: skip
        rotary.run(call)
        attended = kernels.paged_attention(query, layer.key_cache, layer.value_cache, plan, scale=SCALE)
        backend.linear(attended.flatten(1), layer.output, hidden, residual=hidden)
        product = backend.linear(hidden, layer.gate_up, norm_weight=layer.mlp_norm)
        backend.linear(product, layer.down, hidden, residual=hidden)
    return hidden


def _prepare(kernels: CpuKernels, layers: CpuLayers, layer: Layer, plan: AttentionPlan) -> PreparedAttention:
    rows = slice(plan.num_tokens)
    return kernels.prepare(layers.query[rows], layers.attended[rows], layer.key_cache, layer.value_cache, plan, scale=SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
def test_one_call_equals_its_parts(kernels: CpuKernels, has_norms: bool, dtype: torch.dtype) -> None:
    originals = [_layer(seed, has_norms=has_norms, dtype=dtype) for seed in range(3)]
    alone, together = ([_with_own_caches(layer) for layer in originals] for _ in range(2))
    hidden, plan = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(9)), _plan()
    expected = _run_parts(kernels, alone, hidden, plan)
    layers = CpuLayers(kernels.library, together, TABLE, max_rows=7)
    layers.hidden[:4] = hidden
    prepared = _prepare(kernels, layers, together[0], plan)
    layers.run(4, SLOTS, POSITIONS, [prepared.call])
    assert torch.equal(layers.hidden[:4], expected)
    for a, b in zip(alone, together, strict=True):
        assert torch.equal(a.key_cache, b.key_cache)
        assert torch.equal(a.value_cache, b.value_cache)


def test_what_is_out_of_range_is_refused_before_anything_is_written(kernels: CpuKernels) -> None:
    layer, plan = _layer(0, has_norms=False), _plan()
    layers = CpuLayers(kernels.library, [layer], TABLE, max_rows=4)
    prepared = _prepare(kernels, layers, layer, plan)
    before = layer.key_cache.clone()
    for slots, positions in (
        (SLOTS + 96, POSITIONS),
        (SLOTS, POSITIONS + 200),
        (SLOTS[:3], POSITIONS),
        (SLOTS, POSITIONS.int()),
    ):
        with pytest.raises(ValueError, match=r"outside|slots"):
            layers.run(4, slots, positions, [prepared.call])
    with pytest.raises(ValueError, match="at most 4"):
        layers.run(5, SLOTS, POSITIONS, [prepared.call])
    assert torch.equal(layer.key_cache, before)


def test_attention_is_not_prepared_over_buffers_that_do_not_fit(kernels: CpuKernels) -> None:
    layer, plan = _layer(0, has_norms=False), _plan()
    caches, query = (layer.key_cache, layer.value_cache), torch.zeros(4, NUM_Q, HEAD_DIM)
    for out in (query[:3], query.bfloat16(), torch.zeros(HEAD_DIM, NUM_Q, 4).permute(2, 1, 0)):
        with pytest.raises(ValueError, match="out is"):
            kernels.prepare(query, out, *caches, plan, scale=SCALE)
    with pytest.raises(ValueError, match="the plan has 4 tokens"):
        kernels.prepare(query[:3], query[:3], *caches, plan, scale=SCALE)


def test_layers_that_do_not_fit_are_refused(kernels: CpuKernels) -> None:
    layer = _layer(0, has_norms=False)
    for wrong in (
        {"output": layer.qkv},
        {"gate_up": pack(random_rows(Format.Q4_1, GATED, HIDDEN))},
        {"down": layer.output},
        {"mlp_norm": torch.zeros(HIDDEN + 1)},
        {"key_cache": layer.key_cache.bfloat16()},
    ):
        with pytest.raises(ValueError, match=r"must be|do not fit"):
            CpuLayers(kernels.library, [layer, dataclasses.replace(layer, **wrong)], TABLE, max_rows=4)
    half = dataclasses.replace(layer, key_cache=layer.key_cache.half(), value_cache=layer.value_cache.half())
    with pytest.raises(ValueError, match="read fp32 and bf16"):
        CpuLayers(kernels.library, [half], TABLE, max_rows=4)
