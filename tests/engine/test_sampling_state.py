"""Sampling state: O(1) per token, and a fork that shares the past only."""

from collections.abc import Sequence
from typing import Any

from chatpage.engine.sampling_state import SamplingState
from chatpage.sampling_params import SamplingParams


def state(
    *, seed: int = 1, index: int = 0, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **params: Any
) -> SamplingState:
    return SamplingState(SamplingParams(**params), seed, index, prompt, output)


def test_a_fork_shares_the_past_and_nothing_after() -> None:
    original = state(temperature=0.0, output=[1, 1], frequency_penalty=2.0)
    fork = original.fork(sample=7)
    for token_id in range(2, 40):
        fork.append(token_id)
    assert original.token_counts is not None
    assert original.token_counts.token_ids.tolist() == [1]
    assert original.token_counts.counts.tolist() == [2.0]
    assert original.num_output_tokens == 2
    assert (fork.sample, fork.num_output_tokens, original.sample) == (7, 40, 0)
    assert fork.token_counts is not None
    assert fork.token_counts.counts.tolist() == [2.0] + [1.0] * 38
    assert state().fork(sample=3).uniform() == state(index=3).uniform()


def test_without_penalties_no_tokens_are_counted() -> None:
    """A state of a plain request costs nothing per token of its history."""
    assert state(prompt=range(10**6), logit_bias={1: 1.0}).token_counts is None
    presence_only = state(prompt=range(1000), output=[5], presence_penalty=1.0).token_counts
    assert presence_only is not None
    assert presence_only.token_ids.tolist() == [5]
