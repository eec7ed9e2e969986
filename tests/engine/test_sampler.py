"""Sampler: the right distribution, the same token every time, whoever else is in the batch."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chatpage.engine import fast_sampling
from chatpage.engine.sampler import InvalidLogitsError, sample
from chatpage.engine.sampling_state import SamplingState
from chatpage.errors import EngineStepError
from chatpage.events import TokenLogprob
from chatpage.sampling_params import SamplingParams
from chatpage_kernels.cpu import build


@pytest.fixture(params=["torch", "C++"], autouse=True, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways to choose a token keep every promise here."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(fast_sampling, "is_ready", lambda logits: False)
        elif build.wait() is None:
            pytest.skip(build.describe())
        yield request.param


EOS = frozenset({2})
VOCAB = 1000
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 600, "top_p": 0.99, "min_p": 1e-4},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {7: 5.0, 8: -100.0}, "logprobs": 5, "top_p": 0.5},
    {"min_tokens": 10, "stop_token_ids": (11, 12), "logprobs": 0},
]


def random_logits(num_rows: int, vocab_size: int = VOCAB, *, seed: int = 0, scale: float = 2.5) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def state(
    *, seed: int = 1, index: int = 0, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **params: Any
) -> SamplingState:
    return SamplingState(SamplingParams(**params), seed, index, prompt, output)


def draw(logits: torch.Tensor, states: Sequence[SamplingState], **options: Any) -> list[TokenLogprob]:
    """Sample, and insist that every row has a token."""
    tokens = []
    for token in sample(logits, states, EOS, **options):
        assert isinstance(token, TokenLogprob)
        tokens.append(token)
    return tokens


def draws(logits: torch.Tensor, num_draws: int, **params: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Count the tokens drawn from one row by as many samples."""
    states = [state(index=i, **params) for i in range(num_draws)]
    counts = np.zeros(logits.shape[1], dtype=np.int64)
    for first in range(0, num_draws, 1000):
        part = states[first : first + 1000]
        for token in draw(logits, part, rows=[0] * len(part)):
            counts[token.token_id] += 1
    return counts


def assert_drawn_from(counts: np.ndarray[Any, np.dtype[np.int64]], probs: torch.Tensor) -> None:
    """Chi-square test at six standard deviations; nothing without probability may be drawn at all."""
    expected = probs.double().numpy() * counts.sum()
    assert counts[expected == 0].sum() == 0
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    num_bins = int((expected >= 5).sum())
    observed_bins = np.append(counts[:num_bins], counts[num_bins:].sum())
    expected_bins = np.append(expected[:num_bins], expected[num_bins:].sum())
    used = expected_bins > 0
    statistic = float(((observed_bins[used] - expected_bins[used]) ** 2 / expected_bins[used]).sum())
    freedom = int(used.sum()) - 1
    assert freedom >= 1
    assert statistic < freedom + 6 * math.sqrt(2 * freedom) + 18


def warped(logits: torch.Tensor, warpers: Sequence[Any], input_ids: Sequence[int] = (0,)) -> torch.Tensor:
    """Return what the logits processors of transformers make of logits `[1, vocab_size]`."""
    process: Any = LogitsProcessorList(warpers)
    scores = process(torch.tensor([list(input_ids)]), logits.clone())
    assert isinstance(scores, torch.Tensor)
    return scores


# -- distributions -----------------------------------------------------------------------------------------------------

WARPERS: list[tuple[dict[str, Any], Callable[[], list[Any]]]] = [
    ({"temperature": 0.6}, lambda: [TemperatureLogitsWarper(0.6)]),
    ({"temperature": 1.7, "top_k": 7}, lambda: [TemperatureLogitsWarper(1.7), TopKLogitsWarper(7)]),
    ({"temperature": 1.0, "top_p": 0.7}, lambda: [TopPLogitsWarper(0.7)]),
    ({"temperature": 0.8, "min_p": 0.05}, lambda: [TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.05)]),
    (
        {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        lambda: [TemperatureLogitsWarper(1.2), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    ),
    ({"temperature": 3.0, "top_p": 0.95}, lambda: [TemperatureLogitsWarper(3.0), TopPLogitsWarper(0.95)]),
]


@pytest.mark.parametrize(("params", "warpers"), WARPERS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_tokens_follow_the_distribution_of_transformers(params: dict[str, Any], warpers: Callable[[], list[Any]]) -> None:
    logits = random_logits(1, 600)
    expected = warped(logits, warpers()).softmax(-1)[0]
    assert_drawn_from(draws(logits, 4000, **params), expected)


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 5.0),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2]),
)
@settings(max_examples=60, deadline=None)
def test_the_filters_leave_the_same_tokens_as_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """The first and the last token that any random number can reach are the ends of what transformers leaves."""
    logits = random_logits(1, 400, seed=seed)
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    left = warped(logits, warpers)[0]
    order = left.argsort(descending=True) if top_k or top_p < 1 else torch.arange(400)
    kept = [int(i) for i in order if left[i] > -math.inf and left.softmax(-1)[i] > 0]
    states = [FixedState(u, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p) for u in (0.0, 1 - 2.0**-53)]
    first, last = draw(logits, states, rows=[0, 0])
    assert first.token_id == kept[0]
    # One float32 rounding may move the end of a nucleus by one token.
    assert last.token_id in (kept[-1], *(kept[-2:-1] if top_p < 1 else []))


class FixedState(SamplingState):
    """A state whose random number is given."""

    def __init__(self, number: float, **params: Any) -> None:
        super().__init__(SamplingParams(**params), 0, 0, (), ())
        self.number = number

    def uniform(self) -> float:
        return self.number


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 16, 17, 255, 256, 257, 300, 5000, 49_152])
@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 10**9}, {"min_p": 1.0}, {"top_k": 300, "top_p": 0.999}]
)
def test_every_random_number_reaches_a_token_that_is_left(vocab_size: int, params: dict[str, Any]) -> None:
    """The largest random number once pointed past the last token, where rounding had lost the end of the distribution."""
    logits = random_logits(3, vocab_size, seed=vocab_size)
    logits[1] = 0.0
    logits[2, 1:] = -math.inf
    numbers = [0.0, 0.5, 1 - 2.0**-53]
    rows = [row for row in range(3) for _ in numbers]
    for row, token in zip(
        rows, draw(logits, [FixedState(u, **params) for _ in range(3) for u in numbers], rows=rows), strict=True
    ):
        assert 0 <= token.token_id < vocab_size
        assert math.isfinite(token.logprob)
        if row == 2:
            assert token.token_id == 0


def test_equal_logits_are_kept_and_ordered_by_token_id() -> None:
    """bfloat16 models give many equal logits; which of them top_k kept depended on the sort of the day."""
    logits = torch.zeros(1, 10_000)
    logits[0, 5000:] = 1.0
    last = FixedState(1 - 2.0**-53, top_k=3)
    assert [t.token_id for t in draw(logits, [FixedState(0.0, top_k=3), last], rows=[0, 0])] == [5000, 5002]
    assert draw(logits, [state(temperature=0.0)])[0].token_id == 5000
    assert [token_id for token_id, _ in draw(logits, [state(logprobs=3)])[0].alternatives] == [5000, 5001, 5002]


def test_a_flat_distribution_needs_more_than_the_head() -> None:
    """top_p of a hot model keeps most of the vocabulary; the head found first is not all of it."""
    logits = random_logits(1, 6000, scale=0.01)
    counts = draws(logits, 500, top_p=0.9)
    assert (counts > 0).sum() > 400
    expected = warped(logits, [TopPLogitsWarper(0.9)]).softmax(-1)[0]
    assert counts[expected.numpy() == 0].sum() <= 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy_and_overflows_nothing(temperature: float) -> None:
    logits = random_logits(4, scale=1000.0)
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"min_p": 0.1}]
    for params in filters:
        tokens = draw(logits, [state(temperature=temperature, **params) for _ in range(4)])
        assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()


# -- transformations, in order -----------------------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, 49), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 49), max_size=20),
    penalty=st.floats(0.5, 2.0),
)
@settings(max_examples=50, deadline=None)
def test_the_repetition_penalty_is_that_of_transformers(prompt: list[int], output: list[int], penalty: float) -> None:
    logits = random_logits(1, 50, seed=len(prompt))
    expected = warped(logits, [RepetitionPenaltyLogitsProcessor(penalty)], prompt + output)
    token = draw(logits, [state(prompt=prompt, output=output, repetition_penalty=penalty, temperature=0.0)])[0]
    assert token.token_id == int(expected.argmax())


edits = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(st.integers(0, 19), st.floats(-5, 5), max_size=4),
    }
)


@given(
    prompt=st.lists(st.integers(0, 19), max_size=10),
    output=st.lists(st.integers(0, 19), max_size=30),
    split=st.integers(0, 30),
    params=edits,
)
@settings(max_examples=80, deadline=None)
def test_bias_then_penalties_as_spelled_out(prompt: list[int], output: list[int], split: int, params: dict[str, Any]) -> None:
    """Also when tokens come one by one, which is how counts are kept."""
    logits = random_logits(1, 20, seed=len(output))
    expected = logits[0].clone()
    for token_id in range(20):
        expected[token_id] += params["logit_bias"].get(token_id, 0.0)
        if token_id in prompt + output:
            expected[token_id] *= params["repetition_penalty"] ** (1 if expected[token_id] < 0 else -1)
        expected[token_id] -= params["presence_penalty"] * (token_id in output)
        expected[token_id] -= params["frequency_penalty"] * output.count(token_id)
    grown = state(prompt=prompt, output=output[:split], temperature=0.0, **params)
    for token_id in output[split:]:
        grown.append(token_id)
    token = draw(logits, [grown])[0]
    assert expected[token.token_id] >= expected.max() - 1e-4


def test_penalties_touch_no_batch_mate() -> None:
    logits = torch.zeros(3, 10)
    states = [
        state(temperature=0.0, output=[0, 1], presence_penalty=1.0),
        state(temperature=0.0),
        state(temperature=0.0, logit_bias={4: 1.0}),
    ]
    assert [token.token_id for token in draw(logits, states)] == [2, 0, 4]
    assert not logits.any()


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, 6)
    logits[0, 2], logits[0, 3], logits[0, 4] = 9.0, 8.0, 7.0
    waiting = state(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    assert draw(logits, [waiting])[0].token_id == 4
    waiting.append(4)
    assert draw(logits, [waiting])[0].token_id == 4
    waiting.append(4)
    assert draw(logits, [waiting])[0].token_id == 2


def test_ignore_eos_is_about_stopping_and_changes_no_token() -> None:
    logits = random_logits(1)
    for seed in range(20):
        assert draw(logits, [state(seed=seed)]) == draw(logits, [state(seed=seed, ignore_eos=True)])


# -- log probabilities -------------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_model_itself() -> None:
    """Before temperature, bias, penalties and filters: they tell what the model thinks, not what was asked of it."""
    logits = random_logits(len(MIXED))
    states = [state(index=i, output=[5, 5, 6], **params) for i, params in enumerate(MIXED)]
    expected = logits.double().log_softmax(-1)
    for row, token in enumerate(draw(logits, states)):
        assert token.logprob == pytest.approx(float(expected[row, token.token_id]), abs=1e-5)


@pytest.mark.parametrize("vocab_size", [5, 70, 5000])
def test_alternatives_are_the_likeliest_tokens_in_order(vocab_size: int) -> None:
    logits = random_logits(4, vocab_size)
    wanted = (0, 3, 20, None)
    tokens = draw(logits, [state(logprobs=count, temperature=50.0) for count in wanted])
    for row, (token, count) in enumerate(zip(tokens, wanted, strict=True)):
        best = logits[row].double().log_softmax(-1).topk(min(count or 0, vocab_size))
        assert [token_id for token_id, _ in token.alternatives] == best.indices.tolist()
        assert [logprob for _, logprob in token.alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)


# -- independence ------------------------------------------------------------------------------------------------------


@given(order=st.permutations(range(len(MIXED))), size=st.integers(1, len(MIXED)))
@settings(max_examples=15, deadline=None)
def test_a_row_never_depends_on_its_batch_mates(order: list[int], size: int) -> None:
    """The same seed gave other replies under load: a shared generator advanced with every row of the batch."""
    logits = random_logits(len(MIXED), 5000, seed=3)
    states = [state(seed=9, index=i, output=[4, 4, 9], **params) for i, params in enumerate(MIXED)]
    alone = [draw(logits[i : i + 1], [states[i]])[0] for i in range(len(MIXED))]
    rows = order[:size]
    assert draw(logits, [states[i] for i in rows], rows=rows) == [alone[i] for i in rows]
    assert draw(logits[rows], [states[i] for i in rows]) == [alone[i] for i in rows]


def test_sample_3_of_8_is_sample_3_of_4_and_all_differ() -> None:
    logits = random_logits(1, 5000, scale=1.0)

    def tokens(n: int) -> list[int]:
        return [token.token_id for token in draw(logits, [state(n=n, index=i) for i in range(n)], rows=[0] * n)]

    assert tokens(8)[:4] == tokens(4)
    assert len(set(tokens(8))) == 8


def test_calling_twice_gives_the_same_and_another_seed_or_place_gives_another() -> None:
    logits = random_logits(1, 5000)
    here = state(seed=5)
    there = state(seed=5)
    there.append(1)
    assert draw(logits, [here]) == draw(logits, [here])
    assert draw(logits, [here]) != draw(logits, [state(seed=6)])
    assert draw(logits, [here]) != draw(logits, [there])


def test_a_resumed_sequence_draws_on_as_if_never_stopped() -> None:
    """Preempted and restored, or stopped and continued with its output as part of the prompt."""
    logits = random_logits(1, 5000)
    running = state(prompt=[1, 2, 3], repetition_penalty=1.5)
    for token_id in (7, 8):
        running.append(token_id)
    restored = state(prompt=[1, 2, 3], output=[7, 8], repetition_penalty=1.5)
    continued = state(prompt=[1, 2, 3, 7, 8], repetition_penalty=1.5)
    assert draw(logits, [running]) == draw(logits, [restored]) == draw(logits, [continued])


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", MIXED)
def test_a_row_that_is_not_a_distribution_fails_alone(value: float, params: dict[str, Any]) -> None:
    """One overflowing sequence ended the whole batch, or went on with token 0 for ever."""
    logits = random_logits(3)
    good = [state(index=i, **params) for i in range(3)]
    expected = draw(logits, good)
    logits[1, 17] = value
    first, second, third = sample(logits, good, EOS)
    assert (first, third) == (expected[0], expected[2])
    assert isinstance(second, InvalidLogitsError)
    assert isinstance(second, EngineStepError)
    assert second.row == 1
    assert "row 1 of 3" in str(second)


def test_a_row_whose_every_token_is_ruled_out_fails_alone() -> None:
    logits = torch.zeros(2, 3)
    logits[0] = -math.inf
    first, second, third = sample(logits, [state(), state(min_tokens=1, stop_token_ids=(0, 1)), state()], EOS, rows=[0, 1, 1])
    assert isinstance(first, InvalidLogitsError)
    assert isinstance(second, InvalidLogitsError)
    assert isinstance(third, TokenLogprob)


def test_logits_of_another_shape_or_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 \[num_rows, vocab_size\], got torch.float64"):
        sample(torch.zeros(1, 5, dtype=torch.float64), [state()], EOS)
    with pytest.raises(ValueError, match="names 1 rows for 2 states"):
        sample(torch.zeros(1, 5), [state(), state()], EOS, rows=[0])


def test_no_sequence_is_no_work() -> None:
    assert sample(torch.zeros(0, 5), [], EOS) == []
