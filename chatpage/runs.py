"""The log of a run: every event of it once, in order, for any number of readers at their own pace.

Invariants: `seq` rises by one per event and never repeats; a snapshot and the deltas after it, joined, are the text of every
sample; a reader costs the log nothing but a cursor, so a slow one slows nobody. A reader that fell behind finds adjacent deltas
merged, one that fell too far behind finds a snapshot, which replaces what it has.

    events      1 delta   2 delta   3 delta   4 sample.done   5 delta   6 sample.done   7 run.done
    a reader that stands at 1 and comes back at the end:
                          [    delta, seq 3 ] [ 4 ]           [ 5 ]     [ 6 ]           [ 7 ]
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from chatpage.errors import StoreError
from chatpage.events import FinishReason, SampleFinished
from chatpage.server.protocol import DeltaEntry, RunCreated, RunDelta, RunDone, RunMessage, RunSnapshot, SampleDone
from chatpage.server.views import ErrorView, SampleView, UsageView
from chatpage.store.records import ConversationId, NodeId, RunId, RunStatus, UserId

KEPT_EVENTS = 2048
KEPT_ENDED_RUNS = 256
KEPT_ENDED_S = 600.0
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # the engine holds nothing back when a sample ends like this
_END_FIELDS = ("finish_reason", "detail", "ttft_ms", "tok_s", "sum_logprob", "usage")


@dataclass(slots=True)
class SampleLog:
    """What one sample said so far. Text and tokens only grow."""

    sample: int
    node_id: NodeId
    prefix_text: str = ""  # what its node began with, and the tokens of that
    prefix_token_ids: tuple[int, ...] = ()
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_settled_parts: int = 0  # before the first token whose text is still held back
    num_settled_tokens: int = 0
    finished: SampleFinished | None = None
    done: SampleDone | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # nothing more is generated
    unsaved: StoreError | None = None  # why the store does not know all of it yet, long after it should
    _settled: asyncio.Event = field(default_factory=asyncio.Event)  # the store knows all of it, or `unsaved` says why not

    @property
    def text(self) -> str:
        return self.prefix_text + "".join(self.parts)

    def append(self, text: str, token_ids: Sequence[int]) -> None:
        self.parts.append(text)
        self.token_ids += token_ids
        if text:
            self.settle()

    def settle(self) -> None:
        """Nothing is held back any more: all tokens belong to the text there is."""
        self.num_settled_parts, self.num_settled_tokens = len(self.parts), len(self.token_ids)

    def drop_unsettled(self) -> None:
        """Forget tokens whose text never came, such as half a character: whoever goes on from here makes them anew."""
        del self.parts[self.num_settled_parts :], self.token_ids[self.num_settled_tokens :]

    @property
    def is_stored(self) -> bool:
        return self._settled.is_set() and self.unsaved is None

    def note_stored(self) -> None:
        self.unsaved = None
        self._settled.set()

    def note_unsaved(self, why: StoreError) -> None:
        if not self._settled.is_set():
            self.unsaved = why
            self._settled.set()

    async def wait_until_stored(self) -> None:
        """Return when the store knows all of the sample. Raises `StoreError` as long as it cannot."""
        await self._settled.wait()
        if self.unsaved is not None:
            raise self.unsaved

    def view(self) -> SampleView:
        running = SampleView(
            sample=self.sample,
            node_id=self.node_id,
            text=self.text,
            num_tokens=len(self.token_ids),
            num_prefix_tokens=len(self.prefix_token_ids),
        )
        if self.done is None:
            return running
        end = {name: getattr(self.done, name) for name in _END_FIELDS}
        return running.model_copy(update=end)


@dataclass(frozen=True, slots=True)
class _Delta:
    sample: int
    text: str
    num_tokens: int
    logprob: float | None


class RunLog:
    """The events of one run; used on the event loop only.

    Args:
        user_id: Whose run it is.
        created: The message that announced it.
        samples: One per node, in order.
        kept_events: A reader further behind gets a snapshot.
    """

    def __init__(
        self, user_id: UserId, created: RunCreated, samples: Sequence[SampleLog], *, kept_events: int = KEPT_EVENTS
    ) -> None:
        self.user_id = user_id
        self.created = created
        self.samples = tuple(samples)
        self.seq = 0
        self.done: RunDone | None = None
        self._kept_events = kept_events
        self._events: list[_Delta | SampleDone | RunDone] = []  # the last of them; the last one has number `seq`
        self._changed = asyncio.Event()

    @property
    def run_id(self) -> RunId:
        return RunId(self.created.run_id)

    @property
    def conversation_id(self) -> ConversationId:
        return ConversationId(self.created.conversation_id)

    def append_delta(self, sample: int, text: str, token_ids: Sequence[int], logprob: float | None = None) -> None:
        """Log new text of a sample; tokens whose text is held back have none yet."""
        self.samples[sample].append(text, token_ids)
        self._append(_Delta(sample, text, len(token_ids), logprob))

    def end_sample(
        self, sample: int, finish_reason: str, usage: UsageView, *, finished: SampleFinished | None = None, detail: str = ""
    ) -> None:
        """Log the end of a sample; `finished` is the engine's word about it, if it had one."""
        log = self.samples[sample]
        if finish_reason in _WHOLE:
            log.settle()
        else:
            log.drop_unsettled()
        log.finished = finished
        log.done = SampleDone(
            run_id=self.run_id,
            seq=self.seq + 1,
            sample=sample,
            finish_reason=finish_reason,
            detail=detail or None,
            usage=usage,
            ttft_ms=None if finished is None else rounded(finished.ttft_s, 1e3),
            tok_s=None if finished is None else rounded(finished.decode_tok_s),
            sum_logprob=None if finished is None else rounded(finished.sum_logprob),
        )
        self._append(log.done)
        log.ended.set()

    def end(self, status: RunStatus, *, usage: UsageView | None = None, error: ErrorView | None = None) -> None:
        """Log the end of the run; nothing follows."""
        assert self.done is None, "a run ends once"
        self.done = RunDone(run_id=self.run_id, seq=self.seq + 1, status=status, usage=usage, error=error)
        self._append(self.done)

    def snapshot(self) -> RunSnapshot:
        """Return the run as it stands, without its end, which is an event of its own."""
        seq = self.seq if self.done is None else self.seq - 1
        return RunSnapshot(run_id=self.run_id, seq=seq, samples=tuple(sample.view() for sample in self.samples))

    async def follow(self, after_seq: int | None = None) -> AsyncGenerator[RunMessage, None]:
        """Yield what comes after event `after_seq` until the run is done; None, or one no longer kept: a snapshot first.

        Whatever gathers while the reader is away is merged. Leaving early leaves nothing behind.
        """
        cursor = after_seq
        while cursor is None or self.done is None or cursor != self.seq:
            first = self.seq - len(self._events)  # the oldest event kept is first + 1
            if cursor is None or not first <= cursor <= self.seq:
                snapshot = self.snapshot()
                cursor = snapshot.seq
                yield snapshot
            elif cursor == self.seq:
                self._changed.clear()
                await self._changed.wait()
            else:
                news, start = self._events[cursor - first :], cursor
                for seq, message in self._merged(news, start):
                    cursor = seq
                    yield message

    def _append(self, event: _Delta | SampleDone | RunDone) -> None:
        assert event is self.done or self.done is None, "nothing follows the end of a run"
        self._events.append(event)
        self.seq += 1
        if len(self._events) >= 2 * self._kept_events:
            del self._events[: -self._kept_events]
        self._changed.set()

    def _merged(self, events: Sequence[_Delta | SampleDone | RunDone], start: int) -> list[tuple[int, RunMessage]]:
        """Return the messages for events `start + 1, ...`; deltas that stand next to each other become one."""
        messages: list[tuple[int, RunMessage]] = []
        waiting: dict[int, list[_Delta]] = {}
        for seq, event in enumerate(events, start + 1):
            if isinstance(event, _Delta):
                waiting.setdefault(event.sample, []).append(event)
                continue
            if waiting:
                messages.append((seq - 1, self._delta(seq - 1, waiting)))
                waiting = {}
            messages.append((seq, event))
        if waiting:
            last = start + len(events)
            messages.append((last, self._delta(last, waiting)))
        return messages

    def _delta(self, seq: int, waiting: dict[int, list[_Delta]]) -> RunDelta:
        return RunDelta(run_id=self.run_id, seq=seq, d=tuple(_entry(deltas) for deltas in waiting.values()))


class RunLogs:
    """The logs of runs that go on, and of those that ended a short while ago; older ones are read from the database.

    Args:
        kept_ended: Most ended runs to keep.
        kept_s: Seconds to keep an ended run.
        clock: Seconds, rising.
    """

    def __init__(
        self, *, kept_ended: int = KEPT_ENDED_RUNS, kept_s: float = KEPT_ENDED_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept_ended = kept_ended
        self._kept_s = kept_s
        self._clock = clock
        self._logs: dict[RunId, RunLog] = {}
        self._ended: OrderedDict[RunId, float] = OrderedDict()
        self._by_message: dict[tuple[UserId, str], RunId] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def add(self, log: RunLog) -> None:
        self._logs[log.run_id] = log
        if log.created.client_msg_id is not None:
            self._by_message[log.user_id, log.created.client_msg_id] = log.run_id

    def mark_ended(self, run_id: RunId) -> None:
        """Start the time that an ended run is kept for."""
        self._ended[run_id] = self._clock()
        self._forget_old()

    def get(self, user_id: UserId, run_id: RunId) -> RunLog | None:
        """Return a log of this user, if it is still kept."""
        self._forget_old()
        log = self._logs.get(run_id)
        return log if log is not None and log.user_id == user_id else None

    def find(self, user_id: UserId, client_msg_id: str) -> RunLog | None:
        """Return the log of the run that this message of the user started, if it is still kept."""
        run_id = self._by_message.get((user_id, client_msg_id))
        return None if run_id is None else self.get(user_id, run_id)

    def _forget_old(self) -> None:
        oldest_allowed = self._clock() - self._kept_s
        while self._ended:
            run_id, ended_at = next(iter(self._ended.items()))
            if len(self._ended) <= self._kept_ended and ended_at >= oldest_allowed:
                return
            del self._ended[run_id]
            log = self._logs.pop(run_id)
            self._by_message.pop((log.user_id, log.created.client_msg_id or ""), None)


def _entry(deltas: Sequence[_Delta]) -> DeltaEntry:
    text, num_tokens = "".join(delta.text for delta in deltas), sum(delta.num_tokens for delta in deltas)
    logprobs = [delta.logprob for delta in deltas if delta.logprob is not None]
    total = rounded(sum(logprobs)) if logprobs else None
    return (deltas[0].sample, text, num_tokens) if total is None else (deltas[0].sample, text, num_tokens, total)


def rounded(value: float | None, factor: float = 1.0) -> float | None:
    """Return `value * factor` as JSON can write it: with 6 decimals, and None for what is no finite number."""
    return None if value is None or not math.isfinite(value) else round(value * factor, 6)
