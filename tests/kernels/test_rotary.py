"""Rotation turns pairs of dims by the angle of their position; C++ equals torch, and writes what write_kv would write."""

import itertools

import pytest
import torch

from chatpage_kernels.cpu.kernels import CpuKernels
from chatpage_kernels.cpu.rotary import CpuRotary
from chatpage_kernels.rotary import rotary_table, rotate
from tests.kernels.cpu_libraries import ISA_NAMES, kernels_for

FREQUENCIES = 10000.0 ** -(torch.arange(32) / 32)
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return kernels_for(request.param)


def test_a_pair_is_a_complex_number_times_a_phase() -> None:
    heads, positions = torch.randn(3, 2, 64), torch.tensor([0, 5, 4000])
    rotated = rotate(heads, positions, rotary_table(FREQUENCIES, 4001))
    phase = torch.polar(torch.ones(3, 32, dtype=torch.float64), positions[:, None] * FREQUENCIES.double())
    expected = torch.complex(*heads.double().split(32, 2)) * phase[:, None]
    torch.testing.assert_close(torch.complex(*rotated.double().split(32, 2)), expected, rtol=0, atol=1e-5)
    assert torch.equal(rotated[0], heads[0])


def test_dims_behind_the_rotary_ones_stay() -> None:
    heads = torch.randn(2, 1, 80)
    rotated = rotate(heads, torch.tensor([3, 9]), rotary_table(FREQUENCIES, 10))
    assert torch.equal(rotated[:, :, 64:], heads[:, :, 64:])
    assert not torch.equal(rotated[:, :, :64], heads[:, :, :64])


@pytest.mark.parametrize("dtypes", list(itertools.product([torch.float32, torch.bfloat16], EPSILON)), ids=str)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "has_norms"), [(64, 16, False), (72, 16, True), (64, 5, True), (128, 32, False)]
)
def test_cpp_equals_rotation_and_write_kv(
    kernels: CpuKernels, head_dim: int, block_size: int, has_norms: bool, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Rows are strided, one token is not written, and 20 tokens are more than one thread takes."""
    qkv_dtype, cache_dtype = dtypes
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_q_heads, num_kv_heads = 20, 6, 2
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width + 8, generator=generator).to(qkv_dtype)[:, :width]
    positions = torch.randint(0, 500, (num_tokens,), generator=generator)
    slots = torch.randperm(8 * block_size, generator=generator)[:num_tokens]
    slots[3] = -1
    norms = [torch.rand(head_dim, generator=generator) + 0.5 if has_norms else None for _ in range(2)]
    table = rotary_table(FREQUENCIES, 500)
    query = torch.empty(num_tokens, num_q_heads, head_dim, dtype=cache_dtype)
    caches = [torch.full((8, block_size, num_kv_heads, head_dim), 7.0, dtype=cache_dtype) for _ in range(2)]
    expected = [cache.clone() for cache in caches]

    rotary = CpuRotary(kernels.library)
    rotary.run(
        rotary.prepare(
            qkv, query, *caches, slot_mapping=slots, positions=positions, table=table, query_norm=norms[0], key_norm=norms[1]
        )
    )
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    key = rotate(k, positions, table, norm=norms[1]).to(cache_dtype)
    kernels.write_kv(key, v.to(cache_dtype), expected[0], expected[1], slots)
    allowed = EPSILON[cache_dtype]
    torch.testing.assert_close(query, rotate(q, positions, table, norm=norms[0]).to(cache_dtype), rtol=allowed, atol=allowed)
    torch.testing.assert_close(caches[0], expected[0], rtol=allowed, atol=allowed)
    assert torch.equal(caches[1], expected[1])


def test_tensors_that_do_not_fit_are_refused(kernels: CpuKernels) -> None:
    rotary, table = CpuRotary(kernels.library), rotary_table(FREQUENCIES, 8)
    ids, cache = torch.zeros(2, dtype=torch.int64), torch.zeros(4, 16, 2, 64)
    good = {"qkv": torch.zeros(2, 640), "query": torch.zeros(2, 6, 64), "key_cache": cache, "value_cache": cache}
    good |= {"slot_mapping": ids, "positions": ids, "table": table}
    rotary.prepare(**good)  # type: ignore[arg-type]
    for wrong in (
        {"qkv": torch.zeros(2, 576)},
        {"qkv": torch.zeros(2, 640, dtype=torch.float16)},
        {"query": torch.zeros(2, 6, 64, dtype=torch.bfloat16)},
        {"value_cache": torch.zeros(4, 16, 2, 32)},
        {"slot_mapping": ids.int()},
        {"positions": ids[:1]},
        {"table": table.bfloat16()},
        {"table": torch.zeros(8, 66)},
        {"query_norm": torch.zeros(32)},
        {"key_norm": torch.zeros(64, dtype=torch.bfloat16)},
    ):
        with pytest.raises(ValueError, match=r"must be|do not fit"):
            rotary.prepare(**(good | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"slots": [0, 64]}, {"positions": [8, 0]}, {"positions": [0, -1]}])
def test_a_slot_or_position_that_does_not_exist_changes_nothing(kernels: CpuKernels, wrong: dict[str, list[int]]) -> None:
    slots, positions = (torch.tensor(wrong.get(name, [0, 1])) for name in ("slots", "positions"))
    caches, query = torch.zeros(2, 4, 16, 2, 64), torch.zeros(2, 6, 64)
    rotary = CpuRotary(kernels.library)
    table = rotary_table(FREQUENCIES, 8)
    call = rotary.prepare(torch.ones(2, 640), query, caches[0], caches[1], slot_mapping=slots, positions=positions, table=table)
    with pytest.raises(ValueError, match="nothing was written"):
        rotary.run(call)
    assert not caches.any()
    assert not query.any()
