"""What one sample has said so far: its sampling state, its text, its log probability, and whether it is done.

Invariant: `text` is the deltas handed out, joined; `token_ids` of the sequence and `sum_logprob` cover the same tokens.
"""

import time
from dataclasses import dataclass

from chatpage.engine.detokenizer import Detokenizer
from chatpage.engine.sampler import SamplingState
from chatpage.engine.sequence import Sequence
from chatpage.events import FinishReason, SampleFinished, TokenDelta, TokenLogprob


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sample is over."""

    reason: FinishReason
    stop: str | int | None = None
    detail: str = ""


class SampleStream:
    """Turns the tokens of one sequence into deltas and decides when it ends."""

    def __init__(self, sequence: Sequence, sampling: SamplingState, detokenizer: Detokenizer) -> None:
        self.sampling = sampling
        self._sequence = sequence
        self._detokenizer = detokenizer
        self._parts: list[str] = []
        self._sum_logprob = 0.0
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None

    def append(
        self, token: TokenLogprob, *, eos_token_ids: frozenset[int], max_model_len: int
    ) -> tuple[TokenDelta, Ending | None]:
        """Take one sampled token: extend the sequence, and say what to send and whether it was the last."""
        sequence, params = self._sequence, self._sequence.request.params
        self._last_token_at = time.perf_counter()
        if self._first_token_at is None:
            self._first_token_at = self._last_token_at
        sequence.token_ids.append(token.token_id)
        self.sampling.append(token.token_id)
        self._sum_logprob += token.logprob
        text, matched = self._detokenizer.append((token.token_id,))
        ending = self._find_ending(token.token_id, matched, eos_token_ids, max_model_len)
        if ending is not None and matched is None:
            text += self._detokenizer.finish()
        self._parts.append(text)
        logprobs = () if params.logprobs is None else (token,)
        return TokenDelta(sequence.request.id, sequence.sample, text, (token.token_id,), logprobs), ending

    def finish_text(self) -> str:
        """Flush what the detokenizer holds back, when the sample ends without another token."""
        text = self._detokenizer.finish()
        self._parts.append(text)
        return text

    def finished(self, ending: Ending) -> SampleFinished:
        sequence = self._sequence
        first, last = self._first_token_at, self._last_token_at
        num_tokens = sequence.num_output_tokens
        has_rate = num_tokens > 1 and first is not None and last is not None and last > first
        return SampleFinished(
            request_id=sequence.request.id,
            sample=sequence.sample,
            finish_reason=ending.reason,
            text="".join(self._parts),
            token_ids=tuple(sequence.output_token_ids),
            sum_logprob=self._sum_logprob,
            ttft_s=None if first is None else first - sequence.request.added_at,
            decode_tok_s=(num_tokens - 1) / (last - first) if has_rate and first is not None and last is not None else None,
            stop=ending.stop,
            detail=ending.detail,
        )

    def _find_ending(
        self, token_id: int, matched: str | None, eos_token_ids: frozenset[int], max_model_len: int
    ) -> Ending | None:
        sequence, params = self._sequence, self._sequence.request.params
        num_tokens = sequence.num_output_tokens
        if matched is not None:
            return Ending(FinishReason.STOP, matched)
        if num_tokens > params.min_tokens:
            is_end = token_id in eos_token_ids and not params.ignore_eos
            if is_end or token_id in params.stop_token_ids:
                return Ending(FinishReason.STOP, token_id)
        if params.max_tokens is not None and num_tokens >= params.max_tokens:
            return Ending(FinishReason.LENGTH, detail=f"max_tokens of {params.max_tokens} reached")
        if sequence.num_tokens >= max_model_len:
            return Ending(FinishReason.LENGTH, detail=f"the context of {max_model_len} tokens is full")
        return None
