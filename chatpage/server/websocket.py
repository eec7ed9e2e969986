"""One connection of `chatpage.v1`: messages in, answers and subscriptions out.

    socket ──> reader ──> a task per question ──┐
               (always pending)                 ├─> outbox (bounded) ──> writer ──> socket
               a follower per subscription ─────┘

Invariants: the reader never waits for the client, so pings and disconnects are always seen. Followers wait when the outbox is
full and go on from where they stand, merged: a slow client costs a cursor, never memory, and slows nobody else. A client that
takes nothing for `SEND_S`, or leaves too many questions open, is closed with 1013. Runs live on when a connection ends, and
what was asked before still comes about.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from chatpage import __version__
from chatpage.errors import ChatpageError, InvalidRequestError
from chatpage.server.draining import RETRY_AFTER_MS, SERVICE_RESTART, Drain
from chatpage.server.problems import INTERNAL_CODE, INTERNAL_TEXT, UnauthorizedError, error_message
from chatpage.server.protocol import (
    PROTOCOL,
    ClientMessage,
    ErrorMessage,
    Hello,
    InvalidMessageError,
    Ping,
    Plan,
    Pong,
    PrefixWarm,
    Restarting,
    RunCancel,
    RunCreate,
    RunDelta,
    ServerMessage,
    Subscribe,
    Unsubscribe,
    Welcome,
    parse_client_message,
)
from chatpage.server.revoking import REASON, Credential, Revoker, credential_of
from chatpage.server.security import KEY_SUBPROTOCOL, Auth
from chatpage.server.views import ModelView, RunRequest
from chatpage.session import Session
from chatpage.store import ConversationId, NodeId, RunId, User, UserId

OUTBOX = 16  # messages
MAX_OPEN_QUESTIONS = 256
MAX_TOPICS = 256
SEND_S = 10.0  # without the client taking a byte
HELLO_S = 10.0  # that a client has to say who it is
MERGE_S = 0.016  # deltas of a run that come within this time become one
TRY_AGAIN_LATER, POLICY_VIOLATION = 1013, 1008
Topic = tuple[str, str]
logger = logging.getLogger(__name__)


async def serve_socket(socket: WebSocket) -> None:
    """Endpoint of `/ws`; refuses a wrong key or an unknown subprotocol before it accepts."""
    auth: Auth = socket.app.state.auth
    offered = [name for name in socket.scope["subprotocols"] if not name.startswith(KEY_SUBPROTOCOL)]
    try:
        user = await auth.find_user(socket)
    except UnauthorizedError:
        await socket.close(POLICY_VIOLATION)
        return
    if offered and PROTOCOL not in offered:
        await socket.close(POLICY_VIOLATION)
        return
    await socket.accept(PROTOCOL if offered else None)
    drain: Drain = socket.app.state.drain
    revoker: Revoker = socket.app.state.revoker
    connection = Connection(socket, socket.app.state.session, auth, user)
    with drain.open(connection), revoker.watching(connection, credential_of(auth, socket, user)):
        await connection.serve()


@dataclass(slots=True)
class Subscription:
    """Something a connection follows. What still waits in the outbox of one that ended is not sent."""

    is_active: bool = True
    task: "asyncio.Task[None] | None" = None

    def end(self) -> None:
        self.is_active = False
        if self.task is not None:
            self.task.cancel()


class Connection:
    """A client on its socket. `user` None: its first message must bring the key."""

    def __init__(self, socket: WebSocket, session: Session, auth: Auth, user: User | None) -> None:
        self._socket = socket
        self._session = session
        self._auth = auth
        self._user = user
        self._is_welcome = False
        self._client_id = ""
        self._outbox: asyncio.Queue[tuple[Subscription | None, ServerMessage]] = asyncio.Queue(OUTBOX)
        self._topics: dict[Topic, Subscription] = {}
        self._questions: set[asyncio.Task[None]] = set()
        self._goodbye = asyncio.Event()  # nothing more is sent

    async def serve(self) -> None:
        """Serve until either side closes; nothing of the connection is left afterwards."""
        writer = asyncio.create_task(self._write())
        late = asyncio.create_task(self._close_if_silent())
        try:
            await self._read()
        finally:
            self._goodbye.set()
            followers = [subscription.task for subscription in self._topics.values() if subscription.task is not None]
            await _end(writer, late, *followers)
            await self._finish_questions()

    async def drain(self) -> None:
        """Send what the runs it follows have said to their end, then that the server restarts, and close with 1012."""
        following = [subscription.task for (kind, _), subscription in self._topics.items() if kind == "run"]
        await asyncio.gather(*(task for task in following if task is not None), return_exceptions=True)
        await self._put(Restarting(retry_after_ms=RETRY_AFTER_MS))
        await self._goodbye.wait()

    async def revoke(self) -> None:
        """Close: whoever came in with this login or key may not stay."""
        await self._close(POLICY_VIOLATION, REASON)

    async def _finish_questions(self) -> None:
        """Let what was asked for come about, such as a stop that was the last word of the client; nobody reads the answers."""
        drain = asyncio.create_task(self._drop_answers())
        try:
            await asyncio.gather(*self._questions, return_exceptions=True)
        finally:
            await _end(drain)

    async def _drop_answers(self) -> None:
        while True:
            await self._outbox.get()

    # -- in --------------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        while True:
            frame = await self._socket.receive()
            if frame["type"] == "websocket.disconnect":
                return
            if len(self._questions) >= MAX_OPEN_QUESTIONS:
                await self._close(TRY_AGAIN_LATER, f"{MAX_OPEN_QUESTIONS} messages wait for their answers")
                return
            self._take(frame.get("text"))

    def _take(self, text: str | None) -> None:
        try:
            if text is None:
                raise InvalidMessageError("Binary frames have no meaning here: send JSON as text.")
            message = parse_client_message(text)
        except InvalidMessageError as error:
            self._spawn(self._put(error_message(error, error.ref)))
            return
        ref = message.ref or (message.client_msg_id if isinstance(message, RunCreate) else None)
        try:
            self._begin(message, ref)
        except ChatpageError as error:
            self._spawn(self._put(error_message(error, ref)))

    def _begin(self, message: ClientMessage, ref: str | None) -> None:
        """Begin to answer; what changes the connection itself is done at once, so that messages act in their order."""
        if isinstance(message, Hello):
            self._spawn(self._guard(partial(self._welcome, message), ref))
            return
        if isinstance(message, Ping):
            self._spawn(self._put(Pong(t=message.t)))
            return
        user_id = self._user_id()
        match message:
            case Subscribe():
                self._follow(_topic(message), self._messages(user_id, message), ref)
            case Unsubscribe():
                if subscription := self._topics.pop(_topic(message), None):
                    subscription.end()
            case RunCreate():
                self._spawn(self._guard(partial(self._create, user_id, message), ref))
            case RunCancel():
                cancel = partial(self._session.cancel_run, user_id, RunId(message.run_id), message.sample)
                self._spawn(self._guard(cancel, ref))
            case PrefixWarm():
                conversation_id = ConversationId(message.conversation_id)
                parent_id = None if message.parent_id is None else NodeId(message.parent_id)
                warm = partial(self._session.warm, user_id, conversation_id, parent_id, message.draft)
                self._spawn(self._guard(warm, ref))
            case Plan():
                self._spawn(self._guard(partial(self._plan, user_id, message), ref))

    def _user_id(self) -> UserId:
        if not self._is_welcome or self._user is None:
            raise InvalidRequestError("Say hello first, and wait for welcome.")
        return self._user.id

    async def _welcome(self, message: Hello) -> None:
        if message.token is not None and not self._is_welcome:
            self._user = await self._auth.user_of_key(message.token)
            revoker: Revoker = self._socket.app.state.revoker
            revoker.watch(self, Credential(message.token, is_key=True))
        if self._user is None:
            raise UnauthorizedError("This server needs an API key: send it in hello as token.")
        self._is_welcome = True
        self._client_id = message.client_id
        await self._put(welcome_to(self._session, self._user.id))

    async def _create(self, user_id: UserId, message: RunCreate) -> None:
        created = await self._session.create_run(user_id, _request(message), client=self._client_id)
        await self._put(created)
        topic = ("run", created.run_id)
        if topic not in self._topics:
            follow = Subscribe(run_id=created.run_id)
            self._follow(topic, self._messages(user_id, follow), message.client_msg_id)

    async def _plan(self, user_id: UserId, message: Plan) -> None:
        await self._put(await self._session.plan(user_id, _request(message), ref=message.ref))

    # -- subscriptions ---------------------------------------------------------------------------------------------

    def _messages(self, user_id: UserId, wanted: Subscribe) -> AsyncGenerator[ServerMessage, None]:
        if wanted.run_id is not None:
            return self._session.follow(user_id, RunId(wanted.run_id), wanted.after_seq)
        if wanted.conversation_id is not None:
            return self._session.follow_conversation(user_id, ConversationId(wanted.conversation_id), wanted.after_seq)
        return self._session.follow_kv()

    def _follow(self, topic: Topic, messages: AsyncGenerator[ServerMessage, None], ref: str | None) -> None:
        """Follow a topic; a subscription to the same topic ends."""
        if (old := self._topics.pop(topic, None)) is not None:
            old.end()
        if len(self._topics) >= MAX_TOPICS:
            raise InvalidRequestError(
                f"This connection follows {MAX_TOPICS} things already: unsubscribe from one, then subscribe again."
            )
        subscription = self._topics[topic] = Subscription()
        subscription.task = asyncio.create_task(self._guard(partial(self._forward, subscription, messages), ref))

        def forget(_: "asyncio.Task[None]") -> None:
            if self._topics.get(topic) is subscription:
                del self._topics[topic]

        subscription.task.add_done_callback(forget)

    async def _forward(self, subscription: Subscription, messages: AsyncGenerator[ServerMessage, None]) -> None:
        async with contextlib.aclosing(messages):
            async for message in messages:
                await self._outbox.put((subscription, message))
                if isinstance(message, RunDelta):
                    await asyncio.sleep(MERGE_S)

    # -- out -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _guard(self, work: Callable[[], Awaitable[None]], ref: str | None) -> None:
        """Tell the client what went wrong, if something does."""
        try:
            await work()
        except ChatpageError as error:
            await self._put(error_message(error, ref))
        except Exception:
            logger.exception("A message of a client could not be served")
            await self._put(ErrorMessage(code=INTERNAL_CODE, message=INTERNAL_TEXT, ref=ref))

    async def _put(self, message: ServerMessage) -> None:
        await self._outbox.put((None, message))

    async def _write(self) -> None:
        while True:
            subscription, message = await self._outbox.get()
            if subscription is not None and not subscription.is_active:
                continue
            try:
                async with asyncio.timeout(SEND_S):
                    await self._socket.send_text(message.to_json())
            except TimeoutError:
                await self._close(TRY_AGAIN_LATER, f"nothing was read for {SEND_S:g} s")
                return
            except WebSocketDisconnect:
                return  # the reader sees it too
            if isinstance(message, Restarting):
                await self._close(SERVICE_RESTART, "restarting")
                self._goodbye.set()
                return

    async def _close_if_silent(self) -> None:
        await asyncio.sleep(HELLO_S)
        if not self._is_welcome:
            await self._close(POLICY_VIOLATION, f"no valid hello came within {HELLO_S:g} s")

    async def _close(self, code: int, reason: str) -> None:
        if self._socket.application_state is WebSocketState.CONNECTED:
            with contextlib.suppress(WebSocketDisconnect):  # the client was faster
                await self._socket.close(code, reason)


def welcome_to(session: Session, user_id: UserId) -> Welcome:
    """Say who the server is, and what the user may ask for."""
    info = session.engine.info
    model = ModelView(
        name=info.model,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        vocab_size=info.vocab_size,
        opens_reasoning=session.prompts.opens_reasoning,
    )
    return Welcome(version=__version__, user_id=user_id, limits=session.limits.view(), model=model)


async def _end(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _topic(message: Subscribe | Unsubscribe) -> Topic:
    if message.run_id is not None:
        return "run", message.run_id
    if message.conversation_id is not None:
        return "conversation", message.conversation_id
    return "kv", ""


def _request(message: RunCreate | Plan) -> RunRequest:
    fields = {name: getattr(message, name) for name in RunRequest.model_fields}
    return RunRequest.model_construct(**fields)
