"""One request on the engine, followed to its end: the samples with their text, ids and numbers.

Invariant: whatever happens (a stop by Ctrl-C, a failed step), `Reply` holds everything that was generated until then.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from chatpage.chat_template import PLAIN_STOP
from chatpage.engine.core import Engine
from chatpage.events import (
    Event,
    FinishReason,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SampleFinished,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from chatpage.sampling_params import SamplingParams
from chatpage.terminal.interrupt import InterruptFlag
from chatpage.terminal.summary import PromptCost, decode_speed, summarize


@dataclass(slots=True)
class Sample:
    """What one sample said so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: SampleFinished | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.finished is not None

    @property
    def finish_reason(self) -> str:
        return self.finished.finish_reason.value if self.finished else FinishReason.ERROR.value


@dataclass(slots=True)
class Reply:
    """All samples of one request and what they cost."""

    samples: list[Sample]
    started: RequestStarted | None = None
    usage: Usage | None = None
    failure: RequestFailed | None = None
    was_interrupted: bool = False
    wall_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token of any sample."""
        times = [s.finished.ttft_s for s in self.samples if s.finished and s.finished.ttft_s is not None]
        return min(times, default=None)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second of all samples together after their first ones; None if there were too few."""
        return decode_speed(self.num_tokens, len(self.samples), ttft_s=self.ttft_s, wall_s=self.wall_s)

    def take(self, event: Event) -> None:
        """Record one event."""
        match event:
            case RequestStarted():
                self.started = event
            case TokenDelta():
                sample = self.samples[event.sample]
                sample.text += event.text
                sample.token_ids += event.token_ids
                sample.logprobs += event.logprobs
            case SampleFinished():
                self.samples[event.sample].finished = event
            case RequestFinished():
                self.usage = event.usage
            case RequestFailed():
                self.failure = event

    def summary(self) -> str:
        """One line: what was reused, what was computed, and how fast it went."""
        cost = None
        if self.started and (usage := self.usage):
            cost = PromptCost(
                usage.prompt_tokens, usage.cached_tokens, usage.computed_prompt_tokens, self.started.blocks_shared
            )
        return summarize(
            cost,
            self.num_tokens,
            ttft_s=self.ttft_s,
            tok_s=self.decode_tok_s,
            was_interrupted=self.was_interrupted,
            details=[s.finished.detail for s in self.samples if s.finished and s.finished.detail],
        )


def for_chat(engine: Engine, params: SamplingParams) -> SamplingParams:
    """Add what a chat needs: a model without a chat template does not end its turn by itself."""
    if engine.tokenizer.chat_template:
        return params
    return dataclasses.replace(params, stop=tuple(dict.fromkeys((*params.stop, *PLAIN_STOP))))


def run_request(
    engine: Engine, prompt_ids: Sequence[int], params: SamplingParams, on_event: Callable[[Event, Reply], None]
) -> Reply:
    """Generate, and report each event after it was recorded. Ctrl-C stops the samples and keeps their text.

    Raises:
        InvalidRequestError: The engine refuses the prompt or the parameters; nothing was computed.
    """
    started_at = time.perf_counter()
    reply = Reply([Sample(index) for index in range(params.n)])
    with InterruptFlag() as interrupt:
        request_id = engine.add_request(prompt_ids, params)
        for event in engine.stream(request_id):
            reply.take(event)
            reply.wall_s = time.perf_counter() - started_at
            on_event(event, reply)
            if interrupt.is_set and not reply.was_interrupted:
                reply.was_interrupted = True
                engine.abort(request_id)
    return reply


@contextmanager
def holding(engine: Engine, sequences: Iterable[Sequence[int]]) -> Iterator[None]:
    """Hold the cached part of some sequences for a moment, so that reports of the memory say what they take together.

    The last token of a sequence was never fed to the model, so it has no row.

    Raises:
        KeyboardInterrupt: Ctrl-C came meanwhile; raised when everything was let go again.
    """
    pins = []
    with InterruptFlag() as interrupt:
        try:
            for token_ids in sequences:
                findable = token_ids[: engine.max_model_len - 1]
                kept = engine.prefix_blocks(findable).num_tokens if findable else 0
                if kept:
                    pins.append(engine.pin(findable[:kept]))
            yield
        finally:
            for pin in pins:
                engine.unpin(pin)
    if interrupt.is_set:
        raise KeyboardInterrupt
