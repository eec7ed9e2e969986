"""A crowd of clients that want more than there is: lean ones, since they share the machine with the server they press.

    polite    asks, and if it is refused waits as it was told and asks again; then asks for the next thing
    rude      asks every so many seconds, whatever it is told
    deaf      asks for much and reads nothing, and comes back whenever it is thrown out

Invariant: every question is counted once by how it ended: served, refused, failed, or left when the crowd went home.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from chatpage.server.protocol import PROTOCOL

PING_S = 5.0
ANSWER_S = 120.0  # that a question may take; then it counts as hanging
DEAF_PAUSE_S, DEAF_ASKS = 0.05, 100
WORDS = ("stone", "river", "evening", "lamp", "road", "letter", "winter", "harbour", "wheel", "garden", "paper", "bell")


@dataclass(frozen=True, slots=True)
class Stream:
    """A reply that was heard to its end."""

    asked: float
    first: float
    last: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first - self.asked

    @property
    def tok_s(self) -> float | None:
        """Tokens per second between the first that was heard and the last; None for a reply that came at once."""
        return (self.num_tokens - 1) / (self.last - self.first) if self.last > self.first and self.num_tokens > 1 else None


@dataclass(slots=True)
class Account:
    """What a crowd met with."""

    num_asked: int = 0
    streams: list[Stream] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)  # to wait
    tellings: list[int] = field(default_factory=list)  # of polite clients: how often until they were served
    most_told: int = 0  # times to one polite client in a row, served or not
    pongs_s: list[float] = field(default_factory=list)
    num_pings: int = 0
    num_left: int = 0
    problems: Counter[str] = field(default_factory=Counter)  # that must not be


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks.

    Args:
        url: Of the server.
        key: Of the user.
        conversation_id: Where.
        max_tokens: Of each reply.
        model: The model that answers, for requests over HTTP.
    """

    url: str
    key: str
    conversation_id: str
    max_tokens: int
    model: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def dial(self, **options: Any) -> connect:
        address = "ws" + self.url.removeprefix("http") + "/ws"
        known = {"subprotocols": [Subprotocol(PROTOCOL)], "compression": None, "ping_interval": None, "open_timeout": 60}
        return connect(address, additional_headers=self.headers, **{**known, **options})


Outcome = Stream | float | None  # served, refused with the seconds to wait, or neither
Ask = Callable[[], Coroutine[Any, Any, Outcome]]


class Talker:
    """One socket with one question at a time."""

    def __init__(self, client: Client, socket: ClientConnection, account: Account) -> None:
        self._client = client
        self._socket = socket
        self._account = account
        self._answer: asyncio.Future[Outcome] | None = None
        self._message_id = ""
        self._run_id: str | None = None
        self._asked = self._first = self._last = 0.0
        self._num_tokens = 0

    async def ask(self) -> Outcome:
        """Ask, and return how it ended."""
        self._message_id, self._run_id, self._num_tokens = secrets.token_hex(8), None, 0
        self._answer = asyncio.get_running_loop().create_future()
        self._asked = time.perf_counter()
        fields = {"client_msg_id": self._message_id, "conversation_id": self._client.conversation_id, "kind": "reply"}
        params = {"max_tokens": self._client.max_tokens, "ignore_eos": True}
        await self._send({"type": "run.create", **fields, "input": words(), "params": params})
        async with asyncio.timeout(ANSWER_S):
            return await self._answer

    @property
    def _is_asking(self) -> bool:
        return self._answer is not None and not self._answer.done()

    async def stop(self) -> None:
        """Stop what goes on."""
        while self._answer is not None and not self._answer.done():
            if self._run_id is not None:
                await self._send({"type": "run.cancel", "run_id": self._run_id})
                await asyncio.wait({self._answer}, timeout=ANSWER_S)
                return
            await asyncio.sleep(0.05)  # the answer to the question itself is on its way

    async def ping(self) -> None:
        while True:
            self._account.num_pings += 1
            await self._send({"type": "ping", "t": time.perf_counter()})
            await asyncio.sleep(PING_S)

    async def read(self) -> None:
        """Hear what comes, until the connection ends."""
        async for frame in self._socket:
            self._hear(json.loads(frame))

    async def _send(self, message: dict[str, Any]) -> None:
        await self._socket.send(json.dumps(message))

    def _hear(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "run.delta" if message["run_id"] == self._run_id:
                self._tokens(sum(entry[2] for entry in message["d"]))
            case "run.snapshot" if message["run_id"] == self._run_id:
                self._tokens(sum(view["num_tokens"] for view in message["samples"]) - self._num_tokens)
            case "run.done" if message["run_id"] == self._run_id:
                self._done(message)
            case "run.created" if message.get("client_msg_id") == self._message_id:
                self._run_id = message["run_id"]
            case "pong":
                self._account.pongs_s.append(time.perf_counter() - message["t"])
            case "error":
                self._refused(message)

    def _tokens(self, number: int) -> None:
        if number <= 0:
            return
        self._last = time.perf_counter()
        self._first = self._last if self._num_tokens == 0 else self._first
        self._num_tokens += number

    def _done(self, message: dict[str, Any]) -> None:
        if message["status"] == "complete":
            self._settle(Stream(self._asked, self._first, self._last, self._num_tokens))
        else:
            if message["status"] != "aborted":
                self._account.problems[f"a run ended as {message['status']}: {message.get('error')}"] += 1
            elif self._is_asking:  # it was stopped, and is not counted by who asked and was cancelled
                self._account.num_left += 1
            self._settle(None)

    def _refused(self, message: dict[str, Any]) -> None:
        wait_ms = message.get("retry_after_ms")
        if message["code"] == "overloaded" and message.get("retryable") and wait_ms:
            self._settle(wait_ms / 1e3)
        else:
            self._account.problems[f"refused without a time to come again: {message}"[:300]] += 1
            self._settle(None)

    def _settle(self, outcome: Outcome) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(outcome)


class Crowd:
    """Clients that act until they are sent home."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._home = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, act: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(act)
        task.add_done_callback(self._ended)  # at once: others wait for what it does
        self._tasks.append(task)

    async def go_home(self) -> None:
        """Stop what goes on, and hang up."""
        self._home.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.account.problems[f"a client ended by {type(error).__name__}: {error}"[:300]] += 1

    # -- on sockets ------------------------------------------------------------------------------------------------

    async def polite(self, client: Client, pause_s: float = 0.0) -> None:
        await self._on_socket(client, lambda ask: self._ask_politely(ask, pause_s))

    async def rude(self, client: Client, interval_s: float, after_s: float) -> None:
        await self._on_socket(client, lambda ask: self._ask_rudely(ask, interval_s, after_s))

    async def _on_socket(self, client: Client, behave: Callable[[Ask], Coroutine[Any, Any, None]]) -> None:
        async with client.dial() as socket:
            talker = Talker(client, socket, self.account)
            await say_hello(socket)
            reading, pinging = asyncio.create_task(talker.read()), asyncio.create_task(talker.ping())
            behaving = asyncio.create_task(behave(talker.ask))
            leaving = asyncio.create_task(self._home.wait())
            await asyncio.wait({reading, behaving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                self.account.problems[f"the server closed a socket with {socket.close_code} {socket.close_reason}"] += 1
            else:
                pinging.cancel()
                with contextlib.suppress(ConnectionClosed):
                    await talker.stop()
            for task in (pinging, behaving, leaving):
                task.cancel()
            await asyncio.gather(pinging, behaving, leaving, return_exceptions=True)
            await socket.close()
            await asyncio.gather(reading, return_exceptions=True)

    async def deaf(self, client: Client) -> None:
        """Ask for a long conversation again and again, and read none of it."""
        while not self._home.is_set():
            with contextlib.suppress(ConnectionClosed, OSError, TimeoutError):
                async with client.dial(max_queue=1, close_timeout=1) as socket:
                    await say_hello(socket)
                    for _ in range(DEAF_ASKS):
                        await asyncio.sleep(DEAF_PAUSE_S)
                        await socket.send(json.dumps({"type": "subscribe", "conversation_id": client.conversation_id}))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._home.wait(), 20)
                    socket.transport.abort()

    # -- over HTTP -------------------------------------------------------------------------------------------------

    async def polite_http(self, client: Client) -> None:
        async with httpx.AsyncClient(headers=client.headers, verify=False, timeout=ANSWER_S) as http:
            await self._until_home(self._ask_politely(lambda: self._post(http, client), 0.0))

    async def rude_http(self, client: Client, interval_s: float, after_s: float) -> None:
        async with httpx.AsyncClient(headers=client.headers, verify=False, timeout=ANSWER_S) as http:
            await self._until_home(self._ask_rudely(lambda: self._post(http, client), interval_s, after_s))

    async def _until_home(self, behave: Coroutine[Any, Any, None]) -> None:
        behaving, leaving = asyncio.create_task(behave), asyncio.create_task(self._home.wait())
        await asyncio.wait({behaving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (behaving, leaving):
            task.cancel()
        outcomes = await asyncio.gather(behaving, leaving, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    async def _post(self, http: httpx.AsyncClient, client: Client) -> Outcome:
        messages = [{"role": "user", "content": words()}]
        body = {"model": client.model, "messages": messages, "max_tokens": client.max_tokens}
        asked = time.perf_counter()
        answer = await http.post(client.url + "/v1/chat/completions", json={**body, "ignore_eos": True})
        ended = time.perf_counter()
        if answer.status_code == httpx.codes.OK:
            return Stream(asked, ended, ended, answer.json()["usage"]["completion_tokens"])
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS and answer.headers.get("Retry-After", "0") != "0":
            return float(answer.headers["Retry-After"])
        self.account.problems[f"HTTP {answer.status_code} {dict(answer.headers)}: {answer.text}"[:300]] += 1
        return None

    # -- manners ---------------------------------------------------------------------------------------------------

    async def _ask_politely(self, ask: Ask, pause_s: float) -> None:
        num_told = 0
        while not self._home.is_set():
            outcome = await self._counted(ask)
            if isinstance(outcome, float):
                num_told += 1
                self.account.most_told = max(self.account.most_told, num_told)
                await asyncio.sleep(outcome)
                continue
            if isinstance(outcome, Stream):
                self.account.tellings.append(num_told)
            num_told = 0
            await asyncio.sleep(pause_s)

    async def _ask_rudely(self, ask: Ask, interval_s: float, after_s: float) -> None:
        moment = time.perf_counter() + after_s
        while not self._home.is_set():
            await asyncio.sleep(max(0.0, moment - time.perf_counter()))
            moment = max(moment, time.perf_counter()) + interval_s
            await self._counted(ask)

    async def _counted(self, ask: Ask) -> Outcome:
        self.account.num_asked += 1
        try:
            outcome = await ask()
        except asyncio.CancelledError:
            self.account.num_left += 1
            raise
        except TimeoutError:
            self.account.problems[f"a question had no answer within {ANSWER_S:g} s"] += 1
            return None
        if isinstance(outcome, Stream):
            self.account.streams.append(outcome)
        elif isinstance(outcome, float):
            self.account.told_s.append(outcome)
        return outcome


async def say_hello(socket: ClientConnection) -> None:
    """Say who one is, and wait for the welcome."""
    await socket.send(json.dumps({"type": "hello", "client_id": secrets.token_hex(8)}))
    await asyncio.wait_for(socket.recv(), ANSWER_S)


def words() -> str:
    """Return something to say that nobody has said before."""
    return " ".join([secrets.token_hex(3), *(secrets.choice(WORDS) for _ in range(20))])


def rates(streams: Sequence[Stream]) -> list[float]:
    """Return the speeds of the streams that have one, slowest first."""
    return sorted(rate for stream in streams if (rate := stream.tok_s) is not None)
