"""One run of a conversation, followed to its end: the samples with their text and numbers.

Invariant: whatever happens (a stop by Ctrl-C, a failed step), `Answer` holds everything that was said until then, and the
server has it too.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from chatpage.client import Client
from chatpage.server.protocol import RunCreated, RunDelta, RunDone, RunMessage, RunSnapshot, SampleDone
from chatpage.server.views import RunRequest
from chatpage.terminal.interrupt import InterruptFlag
from chatpage.terminal.summary import PromptCost, decode_speed, summarize


@dataclass(slots=True)
class SampleText:
    """What one sample said so far, what its message began with included."""

    index: int
    text: str = ""
    num_tokens: int = 0
    done: SampleDone | None = None

    @property
    def is_finished(self) -> bool:
        return self.done is not None

    @property
    def finish_reason(self) -> str:
        return self.done.finish_reason if self.done else "error"


@dataclass(slots=True)
class Answer:
    """All samples of one run and what they cost."""

    samples: list[SampleText]
    created: RunCreated | None = None
    end: RunDone | None = None
    was_interrupted: bool = False
    wall_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def failure(self) -> str | None:
        return self.end.error.message if self.end and self.end.error else None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token of any sample."""
        times = [s.done.ttft_ms / 1e3 for s in self.samples if s.done and s.done.ttft_ms is not None]
        return min(times, default=None)

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second of all samples together after their first ones; None if there were too few."""
        return decode_speed(self.num_tokens, len(self.samples), ttft_s=self.ttft_s, wall_s=self.wall_s)

    def take(self, message: RunCreated | RunMessage) -> None:
        """Record one message."""
        match message:
            case RunCreated():
                self.created = message
            case RunSnapshot():
                for view in message.samples:
                    self.samples[view.sample].text = view.text
                    self.samples[view.sample].num_tokens = view.num_tokens
            case RunDelta():
                for sample, text, num_tokens, *_ in message.d:
                    self.samples[sample].text += text
                    self.samples[sample].num_tokens += num_tokens
            case SampleDone():
                self.samples[message.sample].done = message
            case RunDone():
                self.end = message

    def summary(self) -> str:
        """One line: what was reused, what was computed, and how fast it went."""
        cost = None
        if self.created is not None and (prefix := self.created.prefix) is not None:
            cost = PromptCost(prefix.tokens, prefix.cached, prefix.computed, prefix.blocks_shared)
        return summarize(
            cost,
            self.num_tokens,
            ttft_s=self.ttft_s,
            tok_s=self.decode_tok_s,
            was_interrupted=self.was_interrupted,
            details=[s.done.detail for s in self.samples if s.done and s.done.detail],
        )


def run_answer(client: Client, request: RunRequest, on_message: Callable[[RunCreated | RunMessage, Answer], None]) -> Answer:
    """Run, and report each message after it was recorded. Ctrl-C stops the samples and keeps their text.

    Raises:
        ChatpageError: The run was refused; nothing was stored.
    """
    answer = Answer([SampleText(index) for index in range(request.n)])
    started_at = time.perf_counter()

    def stop() -> None:
        """Called in the middle of waiting for the next message, which may be long in coming; so another thread asks."""
        if answer.created is not None and not answer.was_interrupted:
            answer.was_interrupted = True
            threading.Thread(target=client.cancel, args=(answer.created.run_id,), daemon=True).start()

    with InterruptFlag(on_signal=stop) as interrupt:
        for message in client.run(request):
            answer.take(message)
            answer.wall_s = time.perf_counter() - started_at
            if interrupt.is_set:
                stop()
            on_message(message, answer)
    return answer
