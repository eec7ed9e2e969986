"""Writes a run into the store while it goes on.

Invariants: one batch of jobs at a time, so nothing overtakes anything; what could not be written stays due, and is tried again
for as long as the process lives; a token is written only together with its text, so that a crash leaves text and tokens that
belong together.

    tokens of a sample   [ written ........ | settled ........ | text held back .. ]
                         in the store         next batch         waits for its text, or for the end of the sample
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from chatpage.errors import ConflictError, NotFoundError, StoreError
from chatpage.runs import RunLog, SampleLog
from chatpage.session.prompts import Rendered
from chatpage.store import Store
from chatpage.store.nodes import NodeEnd
from chatpage.store.records import NodeId, NodeStatus, TreeChange

MAX_ATTEMPTS = 5  # to write the end of a run before its readers hear that saving waits, and as many before the process ends
LONGEST_PAUSE_S = 15.0  # between two attempts
_MOST_DOUBLINGS = 10  # of the pause between them
Close = Callable[[Mapping[NodeId, NodeEnd]], "Future[Any]"]  # queues the end of a run and of those of its nodes
logger = logging.getLogger(__name__)


class Recorder:
    """Writes one run.

    Args:
        store: Where to.
        log: What is to be written.
        publish: Tells the followers of the conversations that changed.
        on_stored: Is told of each sample that ended and is written, with the prompt it went on from if it got that far.
        flush_s: Seconds between two batches while nothing ends.
    """

    def __init__(
        self,
        store: Store,
        log: RunLog,
        *,
        publish: Callable[[Sequence[TreeChange]], None],
        on_stored: Callable[[SampleLog, Rendered | None], None],
        flush_s: float,
    ) -> None:
        self.rendered: Rendered | None = None
        self._store = store
        self._log = log
        self._publish_changes = publish
        self._on_stored = on_stored
        self._flush_s = flush_s
        self._ends: dict[int, NodeStatus] = {}  # samples that ended and are not written as ended yet
        self._written = [(0, 0)] * len(log.samples)  # parts and tokens in the store
        self._wake = asyncio.Event()
        self._close: Close | None = None
        self._attempts = 0  # that failed since the last that did not
        self._hurry = asyncio.Event()  # the process ends: what does not succeed soon is given up
        self._late: asyncio.Future[StoreError] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._record(), name=f"record-{self._log.run_id}")

    def end_sample(self, sample: int, status: NodeStatus) -> None:
        self._ends[sample] = status
        self._wake.set()

    def close(self, close: Close) -> None:
        """From now on write everything that is left, and the end of the run with it, however long that takes."""
        self._close = close
        self._wake.set()

    async def wait_until_written_or_late(self) -> StoreError | None:
        """Return what keeps the end of the run from being written, once it does so for a while; None: nothing."""
        assert self._task is not None
        either: set[asyncio.Future[Any]] = {self._task, self._late}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return None if self._task.done() else self._late.result()

    async def wait(self) -> None:
        """Return when everything is written. Raises `StoreError` if it was not, and `give_up` was called."""
        assert self._task is not None
        await self._task

    def give_up(self) -> None:
        """Try a few times more, at once, and then no more: the process ends."""
        if not self._hurry.is_set():
            self._attempts = 0
        self._hurry.set()
        self._wake.set()

    async def _record(self) -> None:
        while True:
            if self._close is None and not self._ends:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._flush_s):
                        await self._wake.wait()
            self._wake.clear()
            close = self._close
            try:
                if close is not None:
                    await self._write_end(close)
                    return
                await self._write(self._log.samples)
                self._attempts = 0
            except (NotFoundError, ConflictError):  # purged on the way: there is no run to end any more
                raise
            except StoreError as error:
                self._attempts += 1
                await self._bear(error, self._attempts, is_last=close is not None and self._hurry.is_set())

    async def _bear(self, error: StoreError, attempts: int, *, is_last: bool) -> None:
        """Wait for the next attempt, longer each time; raise if there is none."""
        if attempts & (attempts - 1) == 0:  # the first, second, fourth, ...: a disk may stay full for hours
            logger.warning("The run %s could not be stored, attempt %d: %s", self._log.run_id, attempts, error)
        if is_last and attempts >= MAX_ATTEMPTS:
            raise error
        if attempts >= MAX_ATTEMPTS and self._close is not None and not self._late.done():
            self._late.set_result(error)
        quick = min(self._flush_s, 0.1 * attempts)
        if attempts < MAX_ATTEMPTS or self._close is None:
            await asyncio.sleep(quick)
            return
        pause = min(quick * 2 ** min(attempts - MAX_ATTEMPTS, _MOST_DOUBLINGS), LONGEST_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), pause)

    async def _write(self, logs: Sequence[SampleLog]) -> None:
        """Queue what is new of samples in one go; the store commits it together."""
        jobs = [job for log in logs if (job := self._job(log)) is not None]
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _write_end(self, close: Close) -> None:
        """Write how the run and its samples ended, in one change: after a crash there are both or none."""
        ended = [log for log in self._log.samples if log.sample in self._ends]
        await self._write([log for log in self._log.samples if log.sample not in self._ends])
        await self._commit(close({log.node_id: self._end_of(log) for log in ended}))
        for log in ended:
            self._note_end(log)

    def _job(self, log: SampleLog) -> Coroutine[Any, Any, None] | None:
        text, token_ids = self._news_of(log)
        mark = (log.num_settled_parts, log.num_settled_tokens)
        if log.sample in self._ends:
            end = self._end_of(log)
            return self._settle(
                log,
                self._store.finish_node.submit(
                    log.node_id,
                    end.status,
                    finish_reason=end.finish_reason,
                    detail=end.detail,
                    text=text,
                    token_ids=token_ids,
                    usage=end.usage,
                    timing=end.timing,
                ),
                mark,
                ended=True,
            )
        if not text and not token_ids:
            return None
        return self._settle(log, self._store.append_partial.submit(log.node_id, text, token_ids), mark)

    def _news_of(self, log: SampleLog) -> tuple[str, list[int]]:
        parts, tokens = self._written[log.sample]
        return "".join(log.parts[parts : log.num_settled_parts]), log.token_ids[tokens : log.num_settled_tokens]

    def _end_of(self, log: SampleLog) -> NodeEnd:
        done = log.done
        assert done is not None
        text, token_ids = self._news_of(log)
        timing = {"ttft_ms": done.ttft_ms, "tok_s": done.tok_s, "sum_logprob": done.sum_logprob}
        status, usage = self._ends[log.sample], done.usage.model_dump()
        return NodeEnd(status, done.finish_reason, done.detail or "", text, token_ids, usage, timing)

    async def _settle(self, log: SampleLog, submitted: "Future[Any]", mark: tuple[int, int], *, ended: bool = False) -> None:
        try:
            await self._commit(submitted)
        except (NotFoundError, ConflictError) as error:  # purged on the way: there is nothing to write to any more
            logger.info("A message of the run %s is gone: %s", self._log.run_id, error)
        self._written[log.sample] = mark
        if ended:
            self._note_end(log)

    def _note_end(self, log: SampleLog) -> None:
        del self._ends[log.sample]
        log.note_stored()
        self._on_stored(log, self.rendered)

    async def _commit(self, submitted: "Future[Any]") -> None:
        """Wait for a write; its changes are told in the order of commits, whoever is cancelled meanwhile."""
        waiting = asyncio.wrap_future(submitted)
        waiting.add_done_callback(self._tell)
        await asyncio.shield(waiting)

    def _tell(self, waiting: "asyncio.Future[Any]") -> None:
        if not waiting.cancelled() and waiting.exception() is None and waiting.result():
            self._publish_changes(waiting.result())
