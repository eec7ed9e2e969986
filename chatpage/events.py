"""What a request emits while it runs, in order: one `RequestStarted`, then `TokenDelta`s, one `SampleFinished` per sample,
one `RequestFinished`; or a `RequestFailed` at any point, which is the last.

Invariant: the texts of a sample's `TokenDelta`s joined are the text of its `SampleFinished`; likewise the token ids.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context of the model, or the KV cache is full
    ABORT = "abort"  # stopped by its owner
    ERROR = "error"  # the step that computed it failed


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token with its log probability under the model (before temperature and filters)."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost. Counts are tokens; the prompt is counted once, whatever n is."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in shared blocks when the request first entered
    computed_prompt_tokens: int  # prompt tokens that went through the model, recomputation after preemption included
    completion_tokens: int  # over all samples
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The request entered the batch; its prefix is known."""

    request_id: RequestId
    prompt_tokens: int
    cached_tokens: int
    blocks_shared: int
    seed: int


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one sample. `text` may be empty while a character or a possible stop string is incomplete."""

    request_id: RequestId
    sample: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """One sample ended; nothing more comes from it."""

    request_id: RequestId
    sample: int
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    sum_logprob: float
    ttft_s: float | None  # seconds from add_request to its first token; None if there was none
    decode_tok_s: float | None  # tokens per second after the first; None with fewer than two
    stop: str | int | None = None  # the stop string or token that matched
    detail: str = ""  # for people: why, when the reason alone does not say


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Every sample ended and every block of the request was given back."""

    request_id: RequestId
    usage: Usage


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended by an error; `code` is the code of the exception."""

    request_id: RequestId
    code: str
    message: str


Event = RequestStarted | TokenDelta | SampleFinished | RequestFinished | RequestFailed
