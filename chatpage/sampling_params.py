"""How one request wants its tokens chosen.

Invariant: a `SamplingParams` that exists is valid. Every field is checked when it is made, so no later stage has to.
Names, ranges and meanings follow the OpenAI API and, where that has no such parameter, vLLM and llama.cpp.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from chatpage.errors import InvalidParameterError

MAX_SEED = 2**63 - 1
MAX_SAMPLES = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_TOKEN_ID = 2**31 - 1


class TokenBias(Mapping[int, float]):
    """Token id to bias, frozen: a caller's dict must not change under a running request. Hashes, copies and pickles, so that
    the parameters that hold it can cross to the process of the engine."""

    __slots__ = ("_biases",)

    def __init__(self, biases: Mapping[int, float] | Iterable[tuple[int, float]] = ()) -> None:
        self._biases = dict(biases)

    def __getitem__(self, token_id: int) -> float:
        return self._biases[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._biases)

    def __len__(self) -> int:
        return len(self._biases)

    def __hash__(self) -> int:
        return hash(frozenset(self._biases.items()))

    def __repr__(self) -> str:
        return repr(self._biases)


NO_BIAS = TokenBias()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of one request.

    Args:
        n: Number of samples drawn from one prefill, 1 to 64.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this, in (0, 1].
        min_p: Drop tokens less likely than this share of the most likely one, in [0, 1].
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output (1 = off).
        presence_penalty: Subtracted once from the logit of each token already generated, in [-2, 2].
        frequency_penalty: Subtracted per occurrence from the logit of each token already generated, in [-2, 2].
        logit_bias: Token id to a number added to its logit, in [-100, 100].
        seed: Makes the samples reproducible; None draws one, which is reported.
        stop: Strings that end a sample; they are not part of its text.
        stop_token_ids: Tokens that end a sample beside the model's own end tokens.
        ignore_eos: Do not stop at the model's end tokens (for benches).
        max_tokens: Most tokens to generate per sample; None means as many as fit the context.
        min_tokens: End tokens and stop strings are held off until this many tokens exist.
        logprobs: None for none; else the log probability of each chosen token, and of this many alternatives (0 to 20).

    Raises:
        InvalidParameterError: A value is outside its range; the message has the value and the range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = NO_BIAS
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameterError(f"ignore_eos must be true or false, got {self.ignore_eos!r}.")
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_below=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}: lower min_tokens or raise max_tokens."
            )
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_stop()
        self._check_stop_token_ids()
        self._check_logit_bias()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def _check_stop(self) -> None:
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable) or not all(isinstance(s, str) for s in self.stop):
            raise InvalidParameterError(f"stop must be a sequence of strings, got {self.stop!r}.")
        object.__setattr__(self, "stop", tuple(self.stop))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameterError(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.")
        if any(not s for s in self.stop):
            raise InvalidParameterError("stop has an empty string, which would end every sample at once: remove it.")
        for stop in self.stop:
            if any("\ud800" <= character <= "\udfff" for character in stop):
                raise InvalidParameterError(
                    f"stop has {stop!r}, with half a surrogate pair: no text can ever hold it. Remove it."
                )

    def _check_stop_token_ids(self) -> None:
        if isinstance(self.stop_token_ids, str | bytes) or not isinstance(self.stop_token_ids, Iterable):
            raise InvalidParameterError(f"stop_token_ids must be a sequence of token ids, got {self.stop_token_ids!r}.")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids token id", token_id, 0, MAX_TOKEN_ID)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameterError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.")
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias token id", token_id, 0, MAX_TOKEN_ID)
            _check_number(f"logit_bias of token {token_id}", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", TokenBias(self.logit_bias))


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameterError(f"{name} must be a whole number, got {value!r}.")
    if not low <= value <= high:
        raise InvalidParameterError(f"{name} is {value}; it must be between {low} and {high}.")


def _check_number(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    # An int may be too large for a float, and is then out of range anyway.
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidParameterError(f"{name} must be a finite number, got {value!r}.")
    if value > high or value < low or (open_below and value == low):
        bracket = "(" if open_below else "["
        raise InvalidParameterError(f"{name} is {value}; it must be in {bracket}{low:g}, {high:g}].")
