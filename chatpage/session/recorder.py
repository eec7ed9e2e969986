"""Writes a run into the store while it goes on.

Invariants: one batch of jobs at a time, so nothing overtakes anything; what could not be written stays due; a token is written
only together with its text, so that a crash leaves text and tokens that belong together.

    tokens of a sample   [ written ........ | settled ........ | text held back .. ]
                         in the store         next batch         waits for its text, or for the end of the sample
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from chatpage.errors import ConflictError, NotFoundError, StoreError
from chatpage.runs import RunLog, SampleLog
from chatpage.server.views import ErrorView
from chatpage.session.prompts import Rendered
from chatpage.store import Store
from chatpage.store.records import NodeStatus, TreeChange

MAX_ATTEMPTS = 5  # to write the end of a run; then it ends as an error, and what is not written is lost
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
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._record(), name=f"record-{self._log.run_id}")

    def end_sample(self, sample: int, status: NodeStatus) -> None:
        self._ends[sample] = status
        self._wake.set()

    async def finish(self, *, discard: ErrorView | None) -> None:
        """Write everything that is left.

        Args:
            discard: The run failed: the nodes that are left are taken back if they are empty, else end as errors.

        Raises:
            StoreError: After several attempts something is still not written.
        """
        assert self._task is not None
        self._is_closing = True
        self._wake.set()
        await self._task
        if discard is not None:
            run_id, code, message = self._log.run_id, discard.code, discard.message
            await self._commit(self._store.discard_run.submit(run_id, error_code=code, error_message=message))

    async def _record(self) -> None:
        attempts = 0
        while True:
            if not self._is_closing and not self._ends:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), self._flush_s)
            self._wake.clear()
            closing = self._is_closing
            try:
                await self._write()
                attempts = 0
            except StoreError as error:
                attempts += 1
                logger.warning("The run %s could not be stored, attempt %d: %s", self._log.run_id, attempts, error)
                if closing and attempts >= MAX_ATTEMPTS:
                    raise
                await asyncio.sleep(min(self._flush_s, 0.1 * attempts))
                continue
            if closing and not self._ends:
                return

    async def _write(self) -> None:
        """Queue what is new of every sample in one go; the store commits it together."""
        jobs = [job for log in self._log.samples if (job := self._job(log)) is not None]
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _job(self, log: SampleLog) -> Coroutine[Any, Any, None] | None:
        parts, tokens = self._written[log.sample]
        status = self._ends.get(log.sample)
        text = "".join(log.parts[parts : log.num_settled_parts])
        token_ids = log.token_ids[tokens : log.num_settled_tokens]
        mark = (log.num_settled_parts, log.num_settled_tokens)
        if status is None:
            if not text and not token_ids:
                return None
            submitted: Future[Any] = self._store.append_partial.submit(log.node_id, text, token_ids)
            return self._settle(log, self._commit(submitted), mark)
        done = log.done
        assert done is not None
        return self._settle(
            log,
            self._commit(
                self._store.finish_node.submit(
                    log.node_id,
                    status,
                    finish_reason=done.finish_reason,
                    text=text,
                    token_ids=token_ids,
                    usage=done.usage.model_dump(),
                    timing={"ttft_ms": done.ttft_ms, "tok_s": done.tok_s, "sum_logprob": done.sum_logprob},
                )
            ),
            mark,
            ended=True,
        )

    async def _settle(
        self, log: SampleLog, written: Coroutine[Any, Any, None], mark: tuple[int, int], *, ended: bool = False
    ) -> None:
        try:
            await written
        except (NotFoundError, ConflictError) as error:  # purged on the way: there is nothing to write to any more
            logger.info("A message of the run %s is gone: %s", self._log.run_id, error)
        self._written[log.sample] = mark
        if ended:
            del self._ends[log.sample]
            log.stored.set()
            self._on_stored(log, self.rendered)

    async def _commit(self, submitted: "Future[Any]") -> None:
        """Wait for a write; its changes are told in the order of commits, whoever is cancelled meanwhile."""
        waiting = asyncio.wrap_future(submitted)
        waiting.add_done_callback(self._tell)
        await asyncio.shield(waiting)

    def _tell(self, waiting: "asyncio.Future[Any]") -> None:
        if not waiting.cancelled() and waiting.exception() is None and waiting.result():
            self._publish_changes(waiting.result())
