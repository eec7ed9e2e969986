"""Sampling parameters: what exists is valid, and what is invalid says why."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from chatpage.errors import InvalidParameterError, InvalidRequestError
from chatpage.sampling_params import MAX_SEED, SamplingParams

VALID: list[dict[str, Any]] = [
    {"n": 1},
    {"n": 64},
    {"temperature": 0},
    {"temperature": 100.0},
    {"top_k": 0},
    {"top_k": 2**31 - 1},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0.0},
    {"min_p": 1.0},
    {"repetition_penalty": 0.01},
    {"presence_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {0: -100.0, 5: 100}},
    {"seed": 0},
    {"seed": MAX_SEED},
    {"stop": ["a"] * 16},
    {"stop_token_ids": [0, 7]},
    {"max_tokens": 1},
    {"min_tokens": 5, "max_tokens": 5},
    {"logprobs": 0},
    {"logprobs": 20},
]


@pytest.mark.parametrize("params", VALID, ids=str)
def test_the_ends_of_each_range_are_allowed(params: dict[str, Any]) -> None:
    made = SamplingParams(**params)
    for name, value in params.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 0}, "n is 0; it must be between 1 and 64."),
        ({"n": 65}, "n is 65; it must be between 1 and 64."),
        ({"n": True}, "n must be a whole number, got True."),
        ({"n": 2.0}, "n must be a whole number, got 2.0."),
        ({"temperature": -0.1}, "temperature is -0.1; it must be in [0, 100]."),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan."),
        ({"temperature": float("inf")}, "temperature must be a finite number, got inf."),
        ({"temperature": "1"}, "temperature must be a finite number, got '1'."),
        ({"temperature": True}, "temperature must be a finite number, got True."),
        ({"temperature": 10**400}, "; it must be in [0, 100]."),
        ({"top_k": -1}, "top_k is -1; it must be between 0 and 2147483647."),
        ({"top_p": 0.0}, "top_p is 0.0; it must be in (0, 1]."),
        ({"top_p": 1.01}, "top_p is 1.01; it must be in (0, 1]."),
        ({"min_p": 1.5}, "min_p is 1.5; it must be in [0, 1]."),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be in (0, 100]."),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be in [-2, 2]."),
        ({"frequency_penalty": -3}, "frequency_penalty is -3; it must be in [-2, 2]."),
        ({"logit_bias": {3: 101.0}}, "logit_bias of token 3 is 101.0; it must be in [-100, 100]."),
        ({"logit_bias": {-3: 1.0}}, "logit_bias token id is -3; it must be between 0 and 2147483647."),
        ({"logit_bias": {"3": 1.0}}, "logit_bias token id must be a whole number, got '3'."),
        ({"logit_bias": [3]}, "logit_bias must map token ids to numbers, got [3]."),
        ({"logit_bias": None}, "logit_bias must map token ids to numbers, got None."),
        ({"seed": -1}, "seed is -1; it must be between 0 and 9223372036854775807."),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be between 0 and 9223372036854775807."),
        ({"stop": "end"}, "stop must be a sequence of strings, got 'end'."),
        ({"stop": (1,)}, "stop must be a sequence of strings, got (1,)."),
        ({"stop": None}, "stop must be a sequence of strings, got None."),
        ({"stop": ("a",) * 17}, "stop has 17 strings; at most 16 are allowed."),
        ({"stop": ("a", "")}, "stop has an empty string, which would end every sample at once: remove it."),
        ({"stop": ("a\ud83d",)}, "stop has 'a\\ud83d', with half a surrogate pair: no text can ever hold it. Remove it."),
        ({"stop_token_ids": (-1,)}, "stop_token_ids token id is -1; it must be between 0 and 2147483647."),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a sequence of token ids, got '12'."),
        ({"stop_token_ids": 12}, "stop_token_ids must be a sequence of token ids, got 12."),
        ({"max_tokens": 0}, "max_tokens is 0; it must be between 1 and 2147483647."),
        ({"min_tokens": -1}, "min_tokens is -1; it must be between 0 and 2147483647."),
        (
            {"min_tokens": 6, "max_tokens": 5},
            "min_tokens is 6 but max_tokens is 5: lower min_tokens or raise max_tokens.",
        ),
        ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20."),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_with_value_and_range(params: dict[str, Any], message: str) -> None:
    """Two of these once escaped as a TypeError or an OverflowError, and the server answered with its own fault."""
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**params)
    assert str(caught.value).endswith(message)
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.code == "invalid_parameter"


def test_an_unknown_parameter_is_an_error() -> None:
    unknown: dict[str, Any] = {"top_q": 1}
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(**unknown)


def test_defaults_are_plain_sampling_of_one_sample() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert not params.is_greedy
    assert not params.has_penalties


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_counts_as_one(name: str) -> None:
    params: dict[str, Any] = {name: 0.5}
    assert SamplingParams(**params).has_penalties


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy


def test_a_callers_dict_and_lists_may_change_later() -> None:
    bias = {1: 2.0}
    stop: Any = ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[1] = 3.0
    stop.append("b")
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)
    with pytest.raises(TypeError):
        params.logit_bias[1] = 4.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


@pytest.mark.parametrize("params", [{}, {"logit_bias": {1: 2.0}, "stop": ("a",), "seed": 3}], ids=str)
def test_parameters_cross_to_another_process_and_compare_by_value(params: dict[str, Any]) -> None:
    """A read-only view of a dict cannot be pickled: the engine in its own process never saw a request."""
    made = SamplingParams(**params)
    assert pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made) == made
    assert len({made, SamplingParams(**params), SamplingParams(n=2)}) == 2
    assert SamplingParams(**dataclasses.asdict(made)) == made
    assert dataclasses.replace(made, n=2).n == 2
