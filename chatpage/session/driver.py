"""One run from its first event to its last: engine -> log -> store.

Invariants: an event reaches the log, and so every reader, before the database hears of it; the database is behind by about a
second while a sample runs and by nothing once the run is done. However a run ends (by itself, stopped, failed, engine or
server gone) every one of its nodes ends too, keeps the text it has, and none is left empty by a failure.

    engine events ──> RunLog ──> readers                    at once
                         └─────> recorder ──> store         once a second, at the end of a sample, at the end of the run
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from chatpage.engine.client import EngineClient
from chatpage.errors import (
    ChatpageError,
    ConflictError,
    EngineDeadError,
    EngineStepError,
    NotFoundError,
    OverloadedError,
    StoreError,
)
from chatpage.events import (
    Event,
    FinishReason,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestStarted,
    SampleFinished,
    TokenDelta,
    Usage,
)
from chatpage.runs import RunLog, SampleLog
from chatpage.sampling_params import SamplingParams
from chatpage.server.views import ErrorView, UsageView
from chatpage.session.prompts import Rendered
from chatpage.session.recorder import Recorder
from chatpage.store import Store
from chatpage.store.nodes import NodeEnd
from chatpage.store.records import NodeId, NodeStatus, RunStatus, TreeChange

FLUSH_S = 1.0
_BUSY_S = 0.1  # until an engine with too much to do is asked again to stop something
logger = logging.getLogger(__name__)

_STATUS = {
    FinishReason.STOP: NodeStatus.COMPLETE,
    FinishReason.LENGTH: NodeStatus.COMPLETE,
    FinishReason.ABORT: NodeStatus.ABORTED,
    FinishReason.ERROR: NodeStatus.ERROR,
}


@dataclass(frozen=True, slots=True)
class RunHooks:
    """What a run asks of its session.

    Args:
        wait_turn: Returns when the run may compute: the messages before it are written, and its user has a free slot.
        render: Returns the prompt; called after `wait_turn`.
        publish: Tells the followers of the conversations that changed.
        on_stored: Notes that a sample ended and is stored, with the prompt it went on from if it got that far.
    """

    wait_turn: Callable[[], Awaitable[None]]
    render: Callable[[], Awaitable[Rendered]]
    publish: Callable[[Sequence[TreeChange]], None]
    on_stored: Callable[[SampleLog, Rendered | None], None]


class RunDriver:
    """Drives one run. Made when its nodes are stored; `start` returns at once.

    Args:
        engine: Computes it.
        store: Keeps it.
        log: Its log.
        params: How to sample.
        hooks: What else it needs.
    """

    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        log: RunLog,
        params: SamplingParams,
        hooks: RunHooks,
        *,
        flush_s: float = FLUSH_S,
    ) -> None:
        self.log = log
        self._engine = engine
        self._store = store
        self._params = params
        self._hooks = hooks
        self._request_id = RequestId(log.run_id)
        self._prompt_usage = (0, 0)  # prompt tokens, cached tokens
        self._usage: Usage | None = None
        self._failure: ErrorView | None = None
        self._is_resumable = False  # failed, but what there is can be continued
        self._has_begun = False
        self._is_added = False
        self._stopped: set[int] = set()  # samples to stop as soon as the engine has them
        self._recorder = Recorder(store, log, publish=hooks.publish, on_stored=hooks.on_stored, flush_s=flush_s)
        self._when_done: Callable[[RunStatus], None] = lambda _: None
        self._when_late: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._turn: asyncio.Task[Rendered] | None = None

    def start(self, when_done: Callable[[RunStatus], None], when_late: Callable[[], None] = lambda: None) -> None:
        """Begin.

        Args:
            when_done: Called once, when everything is stored and just before readers see `run.done`.
            when_late: Called once if the store refuses for a while, just before readers see that; `when_done` comes later.
        """
        self._when_done = when_done
        self._when_late = when_late
        self._task = asyncio.create_task(self._run(), name=f"run-{self.log.run_id}")

    async def stop(self, sample: int | None = None) -> None:
        """Stop one sample, or all; their text stays. Samples that ended are left as they are.

        Returns when the engine knows; the end itself is an event of the log.
        """
        wanted = range(len(self.log.samples)) if sample is None else [sample]
        self._stopped.update(wanted)
        if not self._is_added:
            if len(self._stopped) == len(self.log.samples) and self._turn is not None:
                self._turn.cancel()
            return
        await self._abort(sample)

    async def interrupt(self) -> None:
        """End now because the server ends: what there is is stored as interrupted, and can be continued."""
        if self._task is None:
            return
        while not self._has_begun:  # a task that is cancelled before its first step would leave everything open
            await asyncio.sleep(0)
        self._recorder.give_up()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def wait(self) -> None:
        """Return when everything about the run is stored."""
        if self._task is not None:
            await asyncio.wait([self._task])

    # -- the run ---------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._has_begun = True
        self._recorder.start()
        interrupted = False
        try:
            await self._compute()
        except asyncio.CancelledError:
            interrupted = True
            self._end_all(NodeStatus.INTERRUPTED, FinishReason.ABORT, "the server was stopped")
        except ChatpageError as error:
            self._fail(error.code, str(error), retryable=isinstance(error, EngineDeadError))
        except Exception as error:
            logger.exception("The run %s failed.", self.log.run_id)
            self._fail(EngineStepError.code, f"The run failed: {type(error).__name__}: {error}")
        # From here on nothing may stop it: a second cancellation waits until all is stored.
        status = self._status(interrupted=interrupted)
        self._recorder.close(partial(self._close, status))
        await _shielded(self._finish(status))

    async def _compute(self) -> None:
        if self._is_stopped:
            self._end_all(NodeStatus.ABORTED, FinishReason.ABORT)
            return
        self._turn = asyncio.ensure_future(self._await_turn())
        try:
            rendered = await self._turn
        except asyncio.CancelledError:
            self._turn.cancel()
            if not self._is_stopped:
                raise
            self._end_all(NodeStatus.ABORTED, FinishReason.ABORT)
            return
        self._recorder.rendered = rendered
        if self._is_stopped:
            self._end_all(NodeStatus.ABORTED, FinishReason.ABORT)
            return
        await self._engine.add_request(
            rendered.prompt.token_ids,
            self._params,
            cache_salt=self.log.user_id,
            request_id=self._request_id,
        )
        self._is_added = True
        # Beside the stream: only who reads it gives the request back, whatever happens to the stops.
        stops = [asyncio.ensure_future(self._abort(sample)) for sample in sorted(self._stopped)]
        try:
            async with contextlib.aclosing(self._engine.stream(self._request_id)) as events:
                async for event in events:
                    self._take(event)
        finally:
            for stop in stops:
                stop.cancel()

    async def _abort(self, sample: int | None) -> None:
        """Return when the engine knows that a sample, or all, are to end; however busy it is."""
        while True:
            try:
                return await self._engine.abort(self._request_id, sample)
            except OverloadedError:
                await asyncio.sleep(_BUSY_S)
            except ChatpageError:  # it has ended already, one way or another
                return None

    async def _await_turn(self) -> Rendered:
        await self._hooks.wait_turn()
        return await self._hooks.render()

    @property
    def _is_stopped(self) -> bool:
        return len(self._stopped) == len(self.log.samples)

    def _take(self, event: Event) -> None:
        match event:
            case RequestStarted():
                self._prompt_usage = (event.prompt_tokens, event.cached_tokens)
            case TokenDelta():
                logprob = sum(token.logprob for token in event.logprobs) if event.logprobs else None
                # Text without tokens is what was held back when a sample was stopped. Half a character is no text: its
                # tokens are dropped, and made anew if the sample goes on.
                text = event.text if event.token_ids else event.text.rstrip("\ufffd")
                if text or event.token_ids:
                    self.log.append_delta(event.sample, text, event.token_ids, logprob)
            case SampleFinished():
                status = _STATUS[event.finish_reason]
                self._end_sample(event.sample, status, event.finish_reason, event.detail, finished=event)
            case RequestFinished():
                self._usage = event.usage
            case RequestFailed():
                self._fail(event.code, event.message)

    def _end_sample(
        self, sample: int, status: NodeStatus, reason: FinishReason, detail: str = "", *, finished: SampleFinished | None = None
    ) -> None:
        self.log.end_sample(sample, str(reason), self._usage_of(sample), finished=finished, detail=detail)
        self._recorder.end_sample(sample, status)

    def _end_all(self, status: NodeStatus, reason: FinishReason, detail: str = "") -> None:
        for log in self.log.samples:
            if log.done is None:
                self._end_sample(log.sample, status, reason, detail)

    def _fail(self, code: str, message: str, *, retryable: bool = False) -> None:
        """End by an error. If only the engine is gone, samples that have text are interrupted and can be continued."""
        self._failure = ErrorView(code=code, message=message, retryable=retryable)
        self._is_resumable = code == EngineDeadError.code and any(log.token_ids for log in self.log.samples)
        if self._is_resumable:
            self._end_all(NodeStatus.INTERRUPTED, FinishReason.ERROR, message)
            return
        for log in self.log.samples:  # how their nodes end is up to `discard_run`
            if log.done is None:
                self.log.end_sample(log.sample, str(FinishReason.ERROR), self._usage_of(log.sample), detail=message)

    def _usage_of(self, sample: int) -> UsageView:
        prompt, cached = self._prompt_usage
        num_tokens = len(self.log.samples[sample].token_ids)
        return UsageView(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=num_tokens)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _finish(self, status: RunStatus) -> None:
        """Wait until all is written, then say so in the log: who sees `run.done` will read it in the store."""
        error = self._failure
        if (problem := await self._recorder.wait_until_written_or_late()) is not None:
            self._tell_late(problem)
        try:
            await self._recorder.wait()
        except (NotFoundError, ConflictError) as gone:  # purged on the way: nobody is left to tell
            logger.info("The run %s ended after its conversation was gone: %s", self.log.run_id, gone)
        except StoreError as problem:
            self._name_lost(problem)
            status, error = RunStatus.ERROR, ErrorView(code=problem.code, message=str(problem))
        except Exception as bug:
            logger.exception("The end of the run %s could not be stored.", self.log.run_id)
            self._name_lost(bug)
            status, error = RunStatus.ERROR, ErrorView(code=StoreError.code, message=f"{type(bug).__name__}: {bug}")
        self._when_done(status)
        if self.log.done is None:
            self.log.end(status, usage=self._run_usage(), error=error)

    def _close(self, status: RunStatus, ends: Mapping[NodeId, NodeEnd]) -> Future[tuple[TreeChange, ...]]:
        """Queue how the run ended. If it failed, nodes that are left are taken back if they are empty, else end as errors."""
        run_id, error = self.log.run_id, self._failure
        if status is RunStatus.ERROR and error is not None:
            return self._store.discard_run.submit(run_id, ends=ends, error_code=error.code, error_message=error.message)
        return self._store.finish_run.submit(
            run_id,
            status,
            ends=ends,
            usage=self._run_usage().model_dump(),
            sum_logprobs=[log.done.sum_logprob if log.done else None for log in self.log.samples],
            error_code=None if error is None else error.code,
            error_message=None if error is None else error.message,
        )

    def _tell_late(self, problem: StoreError) -> None:
        """Let readers go, and whoever waits for a place: the store may refuse for hours."""
        for log in self.log.samples:
            log.note_unsaved(problem)
        self._when_late()
        text = f"{problem} What was written is kept in memory, and saved as soon as that is possible."
        self.log.end(RunStatus.ERROR, usage=self._run_usage(), error=ErrorView(code=problem.code, message=text))

    def _name_lost(self, problem: Exception) -> None:
        """Say what is not saved and never will be."""
        for log in self.log.samples:
            if log.unsaved is not None or not log.is_stored:
                logger.error(
                    "The message %s of conversation %s (run %s) is not saved, or not to its end: %d tokens, %d characters. %s",
                    *(log.node_id, self.log.conversation_id, self.log.run_id, len(log.token_ids), len(log.text), problem),
                )

    def _status(self, *, interrupted: bool) -> RunStatus:
        if self._failure is not None:
            return RunStatus.INTERRUPTED if self._is_resumable else RunStatus.ERROR
        if interrupted:
            return RunStatus.INTERRUPTED
        reasons = {log.done.finish_reason for log in self.log.samples if log.done}
        return RunStatus.ABORTED if reasons == {str(FinishReason.ABORT)} else RunStatus.COMPLETE

    def _run_usage(self) -> UsageView:
        prompt, cached = self._prompt_usage
        num_tokens = sum(len(log.token_ids) for log in self.log.samples)
        return UsageView(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=num_tokens)


async def _shielded(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, whoever cancels; a cancellation has nothing left to stop."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                break
    task.result()
