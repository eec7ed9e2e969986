"""The engine in a process of its own, behind the interface of `AsyncEngine`.

    event loop                    threads of this process                 child process
    add_request / abort / ... ──> sender ──> one message ───────────────> between two steps
    stream <── mailbox <───────── receiver <── one message a step <────── engine.step()

Invariants: the event loop never waits for the pipe. When the child ends, however it ends, every open stream and every call ends
with `EngineDeadError` at once, and `restart` makes a new child; when this process ends, the child ends too.
"""

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import queue
import secrets
import threading
from collections.abc import AsyncGenerator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from chatpage.config import EngineConfig
from chatpage.engine.accounting import BlockInfo
from chatpage.engine.child import Command, Died, Load, Loaded, Report, load_engine, main
from chatpage.engine.mailbox import Mailbox
from chatpage.engine.stats import EngineInfo, EngineStats, PrefixBlocks, PrefixCost
from chatpage.errors import ChatpageError, EngineDeadError, InvalidRequestError, OverloadedError
from chatpage.events import RequestFailed, RequestFinished, RequestId
from chatpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chatpage.engine.core import PinId
    from chatpage.events import Event

MAX_CALLS = 4096  # that wait for an answer
CLOSE_S = 10.0  # that a child has to finish its step and to save KV, which takes at most half of it
MAX_RESTART_PAUSE_S = 30.0
logger = logging.getLogger(__name__)


class ProcessEngine:
    """An engine in a child process. Methods as `AsyncEngine`, which documents them.

    async with ProcessEngine(EngineConfig.load()) as engine:
        request_id = await engine.add_request(token_ids, SamplingParams(n=4))
    """

    def __init__(self, config: EngineConfig | None = None, *, load: Load = load_engine) -> None:
        """`load` makes the engine in the child; it must be importable there. The default loads the model of `config`."""
        self._config = config
        self._load = load
        self._child: _Child | None = None
        self._mailboxes: dict[RequestId, Mailbox] = {}

    def begin(self) -> None:
        """Start the child, and let it load while there is other work; `start` waits for it."""
        assert not self.is_alive, "the child is alive"
        last_info = None if self._child is None else self._child.info
        self._child = _Child(self._config, self._load, self._mailboxes, last_info)

    async def start(self) -> None:
        """Start the child, unless that was begun, and wait until its model is loaded.

        Raises:
            ModelError, ConfigError: As `Engine.load`.
            EngineDeadError: The child ended while it loaded.
        """
        if self._child is None:
            self.begin()
        assert self._child is not None
        await self._child.loaded()

    async def restart(self) -> None:
        """Start a new child after the old one has ended. Raises as `start`."""
        self.begin()
        assert self._child is not None
        await self._child.loaded()

    async def close(self) -> None:
        """Stop after the current step; running requests end with `EngineDeadError`. Closing twice is fine."""
        if self._child is not None:
            await self._child.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.is_ready

    @property
    def pid(self) -> int | None:
        """The id of the child process; None if it was not started."""
        return None if self._child is None else self._child.pid

    @property
    def info(self) -> EngineInfo:
        """As `Engine.info`, of the engine that was loaded last.

        Raises:
            EngineDeadError: It was never started.
        """
        info = None if self._child is None else self._child.info
        if info is None:
            raise EngineDeadError("The engine was not started.")
        return info

    async def wait_until_dead(self) -> str:
        """Return when the child has ended, and why."""
        assert self._child is not None, "not started"
        return await self._child.wait_until_dead()

    # -- requests --------------------------------------------------------------------------------------------------

    async def add_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        request_id: RequestId | None = None,
        prefill_only: bool = False,
    ) -> RequestId:
        """As `AsyncEngine.add_request`."""
        named = request_id or RequestId(f"req-{secrets.token_hex(8)}")
        return await self._open(
            named, "add_request", token_ids, params, cache_salt=cache_salt, request_id=named, prefill_only=prefill_only
        )

    async def fork(
        self,
        request_id: RequestId,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        num_tokens: int | None = None,
        new_request_id: RequestId | None = None,
    ) -> RequestId:
        """As `AsyncEngine.fork`."""
        named = new_request_id or RequestId(f"req-{secrets.token_hex(8)}")
        return await self._open(named, "fork", request_id, params, sample=sample, num_tokens=num_tokens, new_request_id=named)

    async def abort(self, request_id: RequestId, sample: int | None = None) -> None:
        """As `AsyncEngine.abort`."""
        await self._call("abort", request_id, sample)

    async def stream(self, request_id: RequestId) -> "AsyncGenerator[Event, None]":
        """As `AsyncEngine.stream`."""
        mailbox = self._mailboxes[request_id]
        ended = False
        try:
            while not ended:
                event = await mailbox.take()
                ended = isinstance(event, RequestFinished | RequestFailed)
                if isinstance(event, RequestFailed) and event.code == EngineDeadError.code:
                    raise EngineDeadError(event.message)
                yield event
        finally:
            self._mailboxes.pop(request_id, None)
            if not ended:
                self._abandon(request_id)

    # -- memory ----------------------------------------------------------------------------------------------------

    async def prefix_cost(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixCost:
        """As `AsyncEngine.prefix_cost`."""
        cost: PrefixCost = await self._call("prefix_cost", token_ids, cache_salt=cache_salt)
        return cost

    async def prefix_blocks(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixBlocks:
        """As `AsyncEngine.prefix_blocks`."""
        found: PrefixBlocks = await self._call("prefix_blocks", token_ids, cache_salt=cache_salt)
        return found

    async def pin(self, token_ids: Sequence[int], *, cache_salt: str = "") -> "PinId":
        """As `AsyncEngine.pin`. Pins end with the child."""
        pin_id: PinId = await self._call("pin", token_ids, cache_salt=cache_salt)
        return pin_id

    async def unpin(self, pin_id: "PinId") -> None:
        """As `AsyncEngine.unpin`."""
        await self._call("unpin", pin_id)

    async def stats(self) -> EngineStats:
        """As `AsyncEngine.stats`. Counters start anew with each child."""
        stats: EngineStats = await self._call("stats")
        return stats

    async def block_map(self) -> tuple[BlockInfo, ...]:
        """As `AsyncEngine.block_map`."""
        blocks: tuple[BlockInfo, ...] = await self._call("block_map")
        return blocks

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _open(self, named: RequestId, method: str, /, *args: Any, **kwargs: Any) -> RequestId:
        """Open the mailbox of a request before its first event can arrive, and add it."""
        if named in self._mailboxes:
            raise InvalidRequestError(f"The request id {named!r} is in use; choose another or leave it out.")
        self._mailboxes[named] = Mailbox()
        try:
            await self._call(method, *args, **kwargs)
        except BaseException as error:
            self._mailboxes.pop(named, None)
            if isinstance(error, asyncio.CancelledError):  # it may have been added all the same
                self._abandon(named)
            raise
        return named

    def _abandon(self, request_id: RequestId) -> None:
        """Abort a request that nobody reads any more."""
        if self._child is not None and self._child.is_ready:
            with contextlib.suppress(ChatpageError):
                self._child.call("abort", (request_id,), {}).add_done_callback(_ignore)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._child is None:
            raise EngineDeadError("The engine was not started.")
        return await self._child.call(method, args, kwargs)


class _Child:
    """One child process and the two threads that talk to it."""

    def __init__(
        self, config: EngineConfig | None, load: Load, mailboxes: dict[RequestId, Mailbox], last_info: EngineInfo | None
    ) -> None:
        self.info = last_info  # of the engine that was loaded last, by this child or the one before
        context = multiprocessing.get_context("spawn")
        self._loop = asyncio.get_running_loop()
        self._mailboxes = mailboxes
        self._pipe, child_end = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=main, args=(child_end, load, config), name="chatpage-engine", daemon=True
        )
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._dead: asyncio.Future[str] = self._loop.create_future()
        self._is_closing = False
        self._has_begun = threading.Event()  # the process, as far as it could
        # The child is started by the thread that waits for its end: starting takes a moment that the event loop has not.
        self._receiver = threading.Thread(target=self._receive, args=(child_end,), name="chatpage-engine-receive", daemon=True)
        self._sender = threading.Thread(target=self._send, name="chatpage-engine-send", daemon=True)
        self._receiver.start()

    @property
    def is_ready(self) -> bool:
        """Whether the engine is loaded and the child alive."""
        return self._ready.done() and not self._dead.done()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def loaded(self) -> EngineInfo:
        return await asyncio.shield(self._ready)

    async def wait_until_dead(self) -> str:
        return await asyncio.shield(self._dead)

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "asyncio.Future[Any]":
        """Send a command; the future has its result."""
        if not self.is_ready:
            raise self._death_notice()
        if len(self._calls) >= MAX_CALLS:
            raise OverloadedError(f"The engine has {MAX_CALLS} commands waiting; try again in a moment.")
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls[call_id] = future
        self._outbox.put(Command(call_id, method, args, kwargs))
        return future

    async def close(self) -> None:
        self._is_closing = True
        self._outbox.put(None)
        await asyncio.to_thread(self._end_process)
        await self.wait_until_dead()

    def _end_process(self) -> None:
        self._has_begun.wait()
        if self._process.pid is not None:
            self._process.join(CLOSE_S if self._ready.done() else 0)
            if self._process.is_alive():  # a step that never ends, or a model that still loads
                self._process.kill()
        self._receiver.join()

    # -- threads ---------------------------------------------------------------------------------------------------

    def _receive(self, child_end: Connection) -> None:
        reason = "it ended without a word"
        try:
            try:
                self._sender.start()
                self._process.start()
            finally:
                self._has_begun.set()
            child_end.close()  # else the end of the child would not end the pipe
            while True:
                message = self._pipe.recv()
                if isinstance(message, Died):
                    reason = f"{message.error}"
                    self._on_loop(self._fail_start, message.error)
                else:
                    self._on_loop(self._take, message)
        except (EOFError, OSError, RuntimeError) as error:  # a thread that cannot be started is a RuntimeError
            if not isinstance(error, EOFError | ConnectionResetError):
                reason = f"{type(error).__name__}: {error}"
        if self._process.pid is not None:
            self._process.join(CLOSE_S)
        if self._is_closing:
            reason = "it was closed"
        elif self._process.exitcode:
            reason += f" (exit code {self._process.exitcode})"
        self._outbox.put(None)
        if self._sender.ident is not None:
            self._sender.join()
        self._on_loop(self._bury, reason)

    def _send(self) -> None:
        """Send what waits, together, until the end."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the receiver knows already
            while (command := self._outbox.get()) is not None:
                commands = [command]
                is_last = False
                while not self._outbox.empty() and not is_last:
                    if (more := self._outbox.get()) is None:
                        is_last = True
                    else:
                        commands.append(more)
                self._pipe.send(commands)
                if is_last:
                    break
            self._pipe.send(None)

    def _on_loop(self, function: Any, *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(function, *args)

    # -- on the event loop -----------------------------------------------------------------------------------------

    def _take(self, message: Loaded | Report) -> None:
        if isinstance(message, Loaded):
            self.info = message.info
            if not self._ready.done():
                self._ready.set_result(message.info)
            else:
                logger.info("The engine was loaded again: the C++ kernels are compiled.")
            return
        for reply in message.replies:
            future = self._calls.pop(reply.call_id)
            if future.done():
                continue  # its caller was cancelled
            if reply.error is None:
                future.set_result(reply.result)
            else:
                future.set_exception(reply.error)
        for event in message.events:
            if mailbox := self._mailboxes.get(event.request_id):
                mailbox.put(event)

    def _fail_start(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may have waited for it: a start that is refused for another reason

    def _bury(self, reason: str) -> None:
        """Tell every caller and every reader; a restart begins with none of them."""
        self._dead.set_result(reason)
        if not self._is_closing:
            logger.error("The engine process has ended: %s", reason)
        notice = self._death_notice()
        self._fail_start(notice)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(notice)
        self._calls.clear()
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(RequestFailed(request_id, EngineDeadError.code, str(notice)))
        self._pipe.close()

    def _death_notice(self) -> EngineDeadError:
        why = self._dead.result() if self._dead.done() else "it is not loaded"
        return EngineDeadError(f"The engine is not running: {why}. What was written can be continued when it is back.")


def _ignore(future: "asyncio.Future[Any]") -> None:
    """Nobody waits for the answer to an abort; an error in it means that the request is gone already."""
    if not future.cancelled():
        future.exception()


async def keep_alive(engine: ProcessEngine) -> None:
    """Restart the child whenever it ends, until cancelled; a child that ends again and again is given ever longer pauses."""
    pause = 0.1
    loop = asyncio.get_running_loop()
    while True:
        started_at = loop.time()
        await engine.wait_until_dead()
        pause = 0.1 if loop.time() - started_at > 2 * MAX_RESTART_PAUSE_S else min(2 * pause, MAX_RESTART_PAUSE_S)
        await asyncio.sleep(pause)
        try:
            await engine.restart()
        except ChatpageError:
            continue  # it was logged; the next round tries again
        except (OSError, RuntimeError) as error:  # no descriptor, no memory or no thread is left, and may be in a while
            logger.error("The engine process could not be started: %s: %s", type(error).__name__, error)
            continue
        logger.info("The engine process was started again.")
