"""The one thread that owns an engine, and the asyncio side that talks to it.

    asyncio                                             engine thread
    add_request / fork / abort ──> bounded command queue ──> engine.add_request(...)      between two steps
    stream(request)  <── mailbox <── call_soon_threadsafe <── one batch of events a step

Invariants: only the thread touches the engine; it never waits for a reader. A mailbox is unbounded in events only up to
what one request can emit, and a slow reader finds adjacent deltas merged, so its memory is bounded by the text itself.
Leaving `stream` early aborts the request; closing the engine ends every stream with `EngineDeadError`.
"""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from chatpage.config import EngineConfig
from chatpage.engine.accounting import BlockInfo
from chatpage.engine.core import Engine, PinId
from chatpage.engine.mailbox import Mailbox
from chatpage.engine.stats import EngineInfo, EngineStats, PrefixBlocks, PrefixCost
from chatpage.errors import EngineDeadError, OverloadedError
from chatpage.events import Event, RequestFailed, RequestFinished, RequestId
from chatpage.sampling_params import SamplingParams

T = TypeVar("T")
_MAX_COMMANDS = 4096


@dataclass(frozen=True, slots=True)
class _Command(Generic[T]):
    """Work for the engine's thread, and who waits for its result."""

    work: Callable[[Engine], T]
    future: Future[T]

    def run(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.work(engine))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller, who waits for it
            self.future.set_exception(error)


class AsyncEngine:
    """An engine on its own thread, for programs that run on asyncio.

    async with AsyncEngine(EngineConfig.load()) as engine:
        request_id = await engine.add_request(token_ids, SamplingParams(n=4))
        async for event in engine.stream(request_id):
            ...
    """

    def __init__(
        self, config: EngineConfig | None = None, *, load: Callable[[EngineConfig | None], Engine] = Engine.load
    ) -> None:
        """`load` makes the engine on its thread; the default loads the model of `config`."""
        self._config = config
        self._load = load
        self._commands: queue.Queue[_Command[Any] | None] = queue.Queue(_MAX_COMMANDS)
        self._mailboxes: dict[RequestId, Mailbox] = {}
        self._thread: threading.Thread | None = None
        self._death: BaseException | None = None
        self._info: EngineInfo | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # nothing is queued after the thread has died

    async def start(self) -> None:
        """Load the model on the engine's thread.

        Raises:
            ModelError: As `Engine.load`.
        """
        assert self._thread is None, "an AsyncEngine starts once"
        self._loop = asyncio.get_running_loop()
        loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="chatpage-engine", daemon=True)
        self._thread.start()
        await asyncio.wrap_future(loaded)

    async def close(self) -> None:
        """Stop after the current step; running requests end with `EngineDeadError`."""
        if self._thread is not None:
            await asyncio.to_thread(self._commands.put, None)
            await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self._death is None

    @property
    def info(self) -> EngineInfo:
        """As `Engine.info`; stays readable after the engine has ended.

        Raises:
            EngineDeadError: It was never started.
        """
        if self._info is None:
            raise self._death_notice()
        return self._info

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
        """As `Engine.add_request`; its events wait in `stream` from now on."""
        return await self._open(
            lambda engine: engine.add_request(
                token_ids, params, cache_salt=cache_salt, request_id=request_id, prefill_only=prefill_only
            )
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
        """As `Engine.fork`."""
        return await self._open(
            lambda engine: engine.fork(request_id, params, sample=sample, num_tokens=num_tokens, new_request_id=new_request_id)
        )

    async def abort(self, request_id: RequestId, sample: int | None = None) -> None:
        """As `Engine.abort`."""
        await self._call(lambda engine: engine.abort(request_id, sample))

    async def stream(self, request_id: RequestId) -> AsyncGenerator[Event, None]:
        """Yield the events of a request until it ends; each request has one reader.

        Raises:
            EngineDeadError: The engine closed or died before the request ended.
        """
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
            if not ended and self.is_alive:
                self._post(_Command(lambda engine: engine.abort(request_id), Future()))

    # -- memory ----------------------------------------------------------------------------------------------------

    async def prefix_cost(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixCost:
        """As `Engine.prefix_cost`."""
        return await self._call(lambda engine: engine.prefix_cost(token_ids, cache_salt=cache_salt))

    async def prefix_blocks(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixBlocks:
        """As `Engine.prefix_blocks`."""
        return await self._call(lambda engine: engine.prefix_blocks(token_ids, cache_salt=cache_salt))

    async def pin(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PinId:
        """As `Engine.pin`."""
        return await self._call(lambda engine: engine.pin(token_ids, cache_salt=cache_salt))

    async def unpin(self, pin_id: PinId) -> None:
        """As `Engine.unpin`."""
        await self._call(lambda engine: engine.unpin(pin_id))

    async def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return await self._call(lambda engine: engine.stats())

    async def block_map(self) -> tuple[BlockInfo, ...]:
        """As `Engine.block_map`."""
        return await self._call(lambda engine: engine.block_map())

    # -- between the threads ---------------------------------------------------------------------------------------

    async def _open(self, make: Callable[[Engine], RequestId]) -> RequestId:
        """Add a request and open its mailbox before its first event can arrive."""
        made: list[RequestId] = []

        def add(engine: Engine) -> RequestId:
            made.append(make(engine))
            self._on_loop(self._mailboxes.setdefault, made[0], Mailbox())
            return made[0]

        try:
            return await self._call(add)
        except asyncio.CancelledError:
            self._post(_Command(lambda engine: self._abandon(engine, made), Future()))
            raise

    def _abandon(self, engine: Engine, made: list[RequestId]) -> None:
        """Nobody will read a request whose caller was cancelled while it was added."""
        for request_id in made:
            engine.abort(request_id)
            self._on_loop(self._mailboxes.pop, request_id, None)

    async def _call(self, work: Callable[[Engine], T]) -> T:
        """Run `work` on the engine's thread between two steps."""
        future: Future[T] = Future()
        self._post(_Command(work, future))
        return await asyncio.wrap_future(future)

    def _post(self, command: "_Command[Any]") -> None:
        with self._lock:
            if not self.is_alive:
                raise self._death_notice()
            try:
                self._commands.put_nowait(command)
            except queue.Full:
                raise OverloadedError(f"The engine has {_MAX_COMMANDS} commands waiting; try again in a moment.") from None

    def _death_notice(self) -> EngineDeadError:
        return EngineDeadError(f"The engine is not running: {self._death or 'it was not started'}. Start it again.")

    def _run(self, loaded: Future[None]) -> None:
        """The thread: commands between steps, a step while there is work, sleep when there is none."""
        try:
            engine = self._load(self._config)
        except BaseException as error:  # noqa: BLE001 - `start` raises it
            self._death = error
            loaded.set_exception(error)
            return
        self._info = engine.info()
        loaded.set_result(None)
        death: BaseException = EngineDeadError("it was closed")
        try:
            while self._obey(engine):
                if engine.has_work:
                    self._deliver(engine.step())
        except BaseException as error:  # noqa: BLE001 - every reader and caller is told below
            death = error
        self._die(death)
        if isinstance(death, EngineDeadError):  # it was closed, so its memory is whole and worth saving
            engine.close()

    def _obey(self, engine: Engine) -> bool:
        """Run every waiting command; block for one when there is nothing else to do. False: time to stop."""
        block = not engine.has_work
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run(engine)
            block = False

    def _die(self, death: BaseException) -> None:
        with self._lock:
            self._death = death
        while not self._commands.empty():
            if command := self._commands.get_nowait():
                command.future.set_exception(self._death_notice())
        self._on_loop(self._bury)

    def _deliver(self, events: list[Event]) -> None:
        if events:
            self._on_loop(self._distribute, events)

    def _distribute(self, events: list[Event]) -> None:
        for event in events:
            if mailbox := self._mailboxes.get(event.request_id):
                mailbox.put(event)

    def _bury(self) -> None:
        for request_id, mailbox in self._mailboxes.items():
            mailbox.put(RequestFailed(request_id, EngineDeadError.code, str(self._death_notice())))

    def _on_loop(self, function: Callable[..., object], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)
