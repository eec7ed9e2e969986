"""The choice of tokens through the C++ kernels, where they are built and the logits are on the CPU.

Invariant: what it chooses is what `sampler` chooses, up to the rounding of sums: the same order of the same distribution, and
the same random number.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from chatpage.engine.sampling_state import MIN_TEMPERATURE, SamplingState
from chatpage_kernels.cpu import build
from chatpage_kernels.cpu.library import Library
from chatpage_kernels.cpu.sampling import CpuSampling, SamplingRows


def is_ready(logits: torch.Tensor) -> bool:
    """Whether these logits can be chosen from here."""
    return logits.is_cpu and build.library() is not None


def choose(
    raw: torch.Tensor, edited: torch.Tensor | None, rows: Sequence[int], states: Sequence[SamplingState]
) -> tuple[list[int], list[float]]:
    """Choose a token per sequence.

    Args:
        raw: float32 `[num_rows, vocab_size]`.
        edited: What the sequences choose from, `[num_states, vocab_size]`; None: from their rows of `raw`.
        rows: Row of `raw` of each state.
        states: One per sequence.

    Returns:
        The tokens, -1 where a row holds no distribution, and their log probabilities by `raw`.
    """
    library = build.library()
    assert library is not None, "ask is_ready first"
    params = [state.params for state in states]
    num = len(states)
    wanted = SamplingRows(
        temperature=np.fromiter((0.0 if p.is_greedy else max(p.temperature, MIN_TEMPERATURE) for p in params), np.float32, num),
        top_k=np.fromiter((p.top_k for p in params), np.int32, num),
        top_p=np.fromiter((p.top_p for p in params), np.float64, num),
        min_p=np.fromiter((p.min_p for p in params), np.float64, num),
        draw=np.fromiter((0.0 if state.params.is_greedy else state.uniform() for state in states), np.float64, num),
    )
    return _sampling(library).choose(raw, raw if edited is None else edited, np.array(rows, np.int32), wanted)


@cache
def _sampling(library: Library) -> CpuSampling:
    return CpuSampling(library)
