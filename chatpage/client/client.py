"""A client of `chatpage.v1` on asyncio that loses nothing when its connection breaks.

Invariant: whatever a run says is yielded once. A run is asked for with a `client_msg_id`, so asking again after a broken
connection starts no second one, and it is followed from the last `seq` that was seen; a snapshot replaces what came before it.

    client = AsyncClient("http://127.0.0.1:8642")
    request = RunRequest(conversation_id=conversation_id, kind=RunKind.REPLY, input="Hi", n=4)
    async for message in client.run(request):
        ...
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from chatpage.client.conversations import Conversations
from chatpage.client.http import ServerError
from chatpage.errors import RestartingError
from chatpage.server.protocol import (
    PROTOCOL,
    ClientMessage,
    ConversationMessage,
    ErrorMessage,
    Hello,
    Plan,
    PlanResult,
    RunCancel,
    RunCreate,
    RunCreated,
    RunDelta,
    RunDone,
    RunMessage,
    RunSnapshot,
    SampleDone,
    ServerMessage,
    Subscribe,
    TreePatch,
    Welcome,
    parse_server_message,
)
from chatpage.server.views import RunRequest

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
POLICY_VIOLATION = 1008
_LOST = (ConnectionClosed, InvalidHandshake, OSError, TimeoutError)


class AsyncClient(Conversations):
    """Starts, follows and stops runs, and does all else with conversations.

    Args:
        url: Of the server, "http://..." or "https://...".
        key: API key, where the server needs one.
        patience_s: Seconds without any connection after which a call gives up.
    """

    def __init__(self, url: str, *, key: str | None = None, patience_s: float = 60.0) -> None:
        super().__init__(url, key)
        self._url = "ws" + url.removeprefix("http").rstrip("/") + "/ws"
        self._key = key
        self._patience_s = patience_s
        self._client_id = secrets.token_hex(8)

    async def run(self, request: RunRequest) -> AsyncGenerator[RunCreated | RunMessage, None]:
        """Start a run and yield `run.created`, then its messages up to `run.done`. Leaving early does not stop the run.

        Raises:
            ServerError: The server refused the run.
            OSError, TimeoutError, ConnectionClosed: There was no connection for `patience_s`.
        """
        create = RunCreate.model_validate(_fields(request) | {"client_msg_id": request.client_msg_id or secrets.token_hex(16)})
        async with contextlib.aclosing(self._persist(create)) as messages:
            async for message in messages:
                if isinstance(message, RunCreated):
                    created = message
                    break
        yield created
        async with contextlib.aclosing(self.follow(created.run_id)) as followed:
            async for news in followed:
                yield news

    async def follow(self, run_id: str, after_seq: int | None = None) -> AsyncGenerator[RunMessage, None]:
        """Yield the messages of a run after `after_seq` up to `run.done`; None: a snapshot first. Raises as `run` does."""
        subscribe = Subscribe(run_id=run_id, after_seq=after_seq)
        async with contextlib.aclosing(self._persist(subscribe)) as messages:
            async for message in messages:
                if isinstance(message, RunSnapshot | RunDelta | SampleDone | RunDone):
                    yield message
                if isinstance(message, RunDone):
                    return

    async def follow_conversation(
        self, conversation_id: str, after_version: int | None = None
    ) -> AsyncGenerator[ConversationMessage, None]:
        """Yield the changes of a conversation after `after_version` and its runs as they start; None: the whole tree first.

        Never ends by itself. Raises as `run` does.
        """
        subscribe = Subscribe(conversation_id=conversation_id, after_seq=after_version)
        async with contextlib.aclosing(self._persist(subscribe)) as messages:
            async for message in messages:
                if isinstance(message, TreePatch | RunCreated):
                    yield message

    async def welcome(self) -> Welcome:
        """Ask the server what it is, which model answers, and what a user may ask for. Raises as `run` does."""
        async with contextlib.aclosing(self._persist()) as messages:
            async for message in messages:
                if isinstance(message, Welcome):
                    return message
        raise AssertionError("the messages end by an error only")

    async def cancel(self, run_id: str, sample: int | None = None) -> None:
        """Stop a run, or one sample of it, and return when it has ended; its text stays. Raises as `run` does."""
        questions = RunCancel(run_id=run_id, sample=sample), Subscribe(run_id=run_id)
        async with contextlib.aclosing(self._persist(*questions)) as messages:
            async for message in messages:
                if isinstance(message, RunDone) or has_ended(message, sample):
                    return

    async def plan(self, request: RunRequest) -> PlanResult:
        """Ask what a run would cost now. Raises as `run` does."""
        async with contextlib.aclosing(self._persist(Plan.model_validate(_fields(request)))) as messages:
            async for message in messages:
                if isinstance(message, PlanResult):
                    return message
        raise AssertionError("the messages end by an error only")

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _persist(self, *questions: ClientMessage) -> AsyncGenerator[ServerMessage, None]:
        """Ask, and yield what comes; connect and ask again whenever the connection breaks."""
        loop = asyncio.get_running_loop()
        seq: int | None = None
        pause, last_connected = FIRST_PAUSE_S, loop.time()
        while True:
            try:
                async with self._connect() as socket:
                    welcome = await self._hello(socket)
                    pause, last_connected = FIRST_PAUSE_S, loop.time()
                    for question in questions:
                        await socket.send(_resumed(question, seq).to_json())
                    yield welcome
                    while True:
                        message = await _receive(socket)
                        last_connected = loop.time()
                        if isinstance(message, RunSnapshot | RunDelta | SampleDone | RunDone):
                            seq = message.seq
                        elif isinstance(message, TreePatch):
                            seq = message.version
                        yield message
            except _LOST as error:
                _raise_if_refused(error)
                if loop.time() - last_connected > self._patience_s:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _connect(self) -> connect:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        return connect(
            self._url,
            subprotocols=[Subprotocol(PROTOCOL)],
            additional_headers=headers,
            compression=None,
            max_size=None,  # a snapshot is as long as its texts
        )

    async def _hello(self, socket: ClientConnection) -> Welcome:
        await socket.send(Hello(client_id=self._client_id).to_json())
        while not isinstance(message := await _receive(socket), Welcome):
            pass
        return message


async def _receive(socket: ClientConnection) -> ServerMessage:
    message = parse_server_message(await socket.recv())
    if isinstance(message, ErrorMessage) and message.code == RestartingError.code:
        raise ConnectionResetError(message.message)
    if isinstance(message, ErrorMessage):
        wait_s = None if message.retry_after_ms is None else message.retry_after_ms / 1e3
        raise ServerError(message.code, message.message, retryable=message.retryable, retry_after_s=wait_s)
    return message


def _resumed(question: ClientMessage, seq: int | None) -> ClientMessage:
    is_continued = isinstance(question, Subscribe) and seq is not None
    return question.model_copy(update={"after_seq": seq}) if is_continued else question


def has_ended(message: ServerMessage, sample: int | None) -> bool:
    """Whether a message says that a sample of its run has ended; None: no sample, so never."""
    match message:
        case SampleDone():
            return message.sample == sample
        case RunSnapshot():
            return any(view.sample == sample and view.finish_reason is not None for view in message.samples)
        case _:
            return False


def _raise_if_refused(error: Exception) -> None:
    """Raise if trying again would end the same way."""
    if isinstance(error, InvalidStatus) and error.response.status_code in (401, 403, 404):
        raise ServerError("forbidden", "The server refused the connection: the key, or the address, is wrong.") from error
    if isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code == POLICY_VIOLATION:
        raise ServerError("forbidden", f"The server closed the connection: {error.rcvd.reason}.") from error


def _fields(request: RunRequest) -> dict[str, object]:
    return {name: getattr(request, name) for name in RunRequest.model_fields}
