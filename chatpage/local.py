"""The client without a server: engine, conversations and session in this process, behind the same methods.

Invariant: what a program does with a `Client` it can do with a `LocalClient`, and the other way round; conversations lie where
`chatpage serve` looks for them, so the page shows them too.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import httpx

from chatpage.client import AsyncClient, Client
from chatpage.client.blocking import LoopThread
from chatpage.client.client import has_ended
from chatpage.client.http import Http
from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.engine.loop import AsyncEngine
from chatpage.engine.models.tokenizer import load_tokenizer
from chatpage.server.app import create_app
from chatpage.server.protocol import ConversationMessage, PlanResult, RunCreated, RunMessage, Welcome
from chatpage.server.settings import ServeSettings
from chatpage.server.views import RunRequest
from chatpage.server.websocket import welcome_to
from chatpage.session import Session
from chatpage.store import LOCAL_USER, ConversationId, RunId, Store, database_path

URL = "http://127.0.0.1"


class SessionClient(AsyncClient):
    """An `AsyncClient` of a session in this process, as the local user."""

    def __init__(self, session: Session) -> None:
        super().__init__(URL)
        app = create_app(session, ServeSettings())
        self._http = Http(URL, None, transport=httpx.ASGITransport(app, raise_app_exceptions=False))
        self._session = session

    async def run(self, request: RunRequest) -> AsyncGenerator[RunCreated | RunMessage, None]:
        created = await self._session.create_run(LOCAL_USER, request)
        yield created
        async with contextlib.aclosing(self.follow(created.run_id)) as messages:
            async for message in messages:
                yield message

    async def follow(self, run_id: str, after_seq: int | None = None) -> AsyncGenerator[RunMessage, None]:
        async with contextlib.aclosing(self._session.follow(LOCAL_USER, RunId(run_id), after_seq)) as messages:
            async for message in messages:
                yield message

    async def follow_conversation(
        self, conversation_id: str, after_version: int | None = None
    ) -> AsyncGenerator[ConversationMessage, None]:
        messages = self._session.follow_conversation(LOCAL_USER, ConversationId(conversation_id), after_version)
        async with contextlib.aclosing(messages):
            async for message in messages:
                yield message

    async def cancel(self, run_id: str, sample: int | None = None) -> None:
        await self._session.cancel_run(LOCAL_USER, RunId(run_id), sample)
        async with contextlib.aclosing(self.follow(run_id)) as messages:
            async for message in messages:
                if has_ended(message, sample):
                    return

    async def plan(self, request: RunRequest) -> PlanResult:
        return await self._session.plan(LOCAL_USER, request)

    async def welcome(self) -> Welcome:
        return welcome_to(self._session, LOCAL_USER)


class LocalClient(Client):
    """A `Client` whose server is this process.

    Args:
        config: Of the engine.
        data_dir: Folder of the conversations; None: the platform's folder for user data.
        load: Makes the engine, on its thread; the default loads the model of `config`.

    Raises:
        ModelError, ConfigError: As `Engine.load`.
        StoreError: The database cannot be opened.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        data_dir: Path | None = None,
        *,
        load: Callable[[EngineConfig | None], Engine] = Engine.load,
    ) -> None:
        self._hint = ""
        self._thread = LoopThread("chatpage-local")
        self._ends = contextlib.AsyncExitStack()
        try:
            self._client = self._thread.wait(self._open(config, data_dir, load))
        except BaseException:
            self.close()
            raise

    @property
    def hint(self) -> str:
        return self._hint

    def close(self) -> None:
        """End what runs, with its text stored, then the engine. Closing twice is fine."""
        if not self._thread.is_closed:
            self._thread.wait(self._ends.aclose())
        super().close()

    async def _open(
        self,
        config: EngineConfig | None,
        data_dir: Path | None,
        load: Callable[[EngineConfig | None], Engine],
    ) -> AsyncClient:
        store = self._ends.enter_context(Store(database_path(data_dir)))

        def load_and_look(config: EngineConfig | None) -> Engine:
            engine = load(config)
            if engine.model.is_interim:
                self._hint = "First start: C++ kernels are being compiled; the next start will be several times faster."
            return engine

        engine = AsyncEngine(config, load=load_and_look)
        await self._ends.enter_async_context(engine)
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(engine.info.tokenizer_path))
        session = Session(engine, store, tokenizer)
        self._ends.push_async_callback(session.close)
        return SessionClient(session)
