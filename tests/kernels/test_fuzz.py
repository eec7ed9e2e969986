"""Random trees of forks: planner and kernels together equal dense attention in float64, whatever the step looks like."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatpage_kernels import Tile, reference, triton_attention
from chatpage_kernels.backend import PagedAttention
from tests.kernels.steps import Heads, Step, assert_as_exact_as_torch, attend, make_step, make_tensors

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = [Heads(2, 1, 8, 8), Heads(6, 2, 4, 8), Heads(3, 3, 8, 4)]


@st.composite
def forked_steps(draw: st.DrawFn, max_blocks: int) -> Step:
    """A tree of forks: each sequence begins with some blocks of an earlier one, and has any number of query rows."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    seqs: list[tuple[int, int]] = []
    forks: dict[int, tuple[int, int]] = {}
    for i in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(0, i))
        num_shared = draw(st.integers(0, seqs[parent][0] // block_size)) if parent < i else 0
        forks[i] = (parent, num_shared)
        least = max(1, num_shared * block_size)
        length = draw(st.integers(least, max(least, max_blocks * block_size)))
        seqs.append((length, draw(st.sampled_from([1, 1, 0, min(3, length), length]))))
    return make_step(seqs, block_size=block_size, forks=forks)


@st.composite
def tiles(draw: st.DrawFn, least: int) -> Tile:
    """From tiles that hold all to tiles that hold a row, from sharing that is free to sharing that never pays."""
    return Tile(
        max_rows=draw(st.sampled_from([least, 16, 64])),
        kv_tokens=draw(st.sampled_from([least, 16])),
        num_workers=draw(st.sampled_from([1, 8, 64])),
        split_tokens=draw(st.sampled_from([4, 16])),
        item_cost=draw(st.sampled_from([0, 0, 1000])),
        merge_cost=0,
    )


def _assert_equal(backend: PagedAttention, step: Step, tile: Tile, choices: tuple[int, int, str, bool, bool]) -> None:
    heads, window, split, has_softcap, has_sinks = choices
    tensors = make_tensors(step, HEADS[heads], seed=step.num_tokens)
    softcap = 1.5 if has_softcap else 0.0
    sinks = torch.linspace(-2, 2, HEADS[heads].num_q) if has_sinks else None
    if step.num_tokens:
        options = {"scale": 0.4, "window": window, "softcap": softcap, "sinks": sinks}
        assert_as_exact_as_torch(attend(backend, step, tensors, tile, split=split, **options), step, tensors, **options)  # type: ignore[arg-type]


CHOICES = st.tuples(
    st.integers(0, len(HEADS) - 1),
    st.sampled_from([0, 0, 1, 3, 9]),
    st.sampled_from(["balanced", "fixed", "none"]),
    st.booleans(),
    st.booleans(),
)
UNHURRIED = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.timeout(1200)
@settings(UNHURRIED, max_examples=2000)
@given(step=forked_steps(max_blocks=4), tile=tiles(least=1), choices=CHOICES)
def test_the_torch_backend_equals_dense_attention(step: Step, tile: Tile, choices: tuple[int, int, str, bool, bool]) -> None:
    _assert_equal(reference.paged_attention, step, tile, choices)


@pytest.mark.timeout(1200)
@settings(UNHURRIED, max_examples=60)
@given(step=forked_steps(max_blocks=3), tile=tiles(least=16), choices=CHOICES)
def test_the_triton_backend_equals_dense_attention(step: Step, tile: Tile, choices: tuple[int, int, str, bool, bool]) -> None:
    _assert_equal(triton_attention.paged_attention, step, tile, choices)
