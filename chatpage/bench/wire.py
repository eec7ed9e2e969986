"""Measures the server over its wire, on a server of its own: `python -m chatpage.bench.wire [sockets] [storm] [size]`.

    sockets   64 sockets with 8 samples each, then the same while one of them reads nothing
    storm     200 starts and stops per second for a minute, then what is left
    size      a conversation of 2,000 messages beside one of 10, and a search over 100,000 messages

Other arguments go to `chatpage serve`, such as `--model`.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from chatpage.bench.serving import Serving, serving
from chatpage.client import AsyncClient
from chatpage.server.protocol import PROTOCOL, RunCreated, RunDone
from chatpage.server.views import RunParams, RunRequest
from chatpage.store import LOCAL_USER, NewNode, NodeId, Role, RunKind, Store, database_path

NUM_SOCKETS, NUM_SAMPLES, TOKENS = 64, 8, 48
STUCK_ASKS = 100  # each answer is 300 kB
STUCK_S = 12.0  # longer than the server waits for a client that takes nothing
STORM_PER_S, STORM_S, STORM_CHATS = 200, 60.0, 64
MAX_OPEN = 100  # runs; a start and a stop of each may wait for their answers, and more than 256 that wait would be closed
BIG_NODES, SMALL_NODES, SEARCHED_NODES = 2_000, 10, 100_000
LIMITS = ["--max-running-runs", "1000", "--max-queued-runs", "20000"]
LIMITS += ["--server-running-runs", "1000", "--server-queued-runs", "20000"]
Numbers = dict[str, float]


# -- sockets -------------------------------------------------------------------------------------------------------------


async def measure_sockets(server: Serving, num_sockets: int = NUM_SOCKETS, tokens: int = TOKENS) -> Numbers:
    """Stream on many sockets at once, all of them reading, then while one reads nothing."""
    await _stream_all(server, num_sockets, 8, is_one_stuck=False)  # what is slow the first time
    calm = await _stream_all(server, num_sockets, tokens, is_one_stuck=False)
    disturbed = await _stream_all(server, num_sockets, tokens, is_one_stuck=True)
    return {
        "tok/s, all read": calm["tok_s"],
        "tok/s, one reads nothing": disturbed["tok_s"],
        "ratio": disturbed["tok_s"] / calm["tok_s"],
        "slowest ping, ms": disturbed["ping_ms"],
        "memory grown, MiB": disturbed["grown_mib"],
        "close code of the one": disturbed["close_code"],
    }


async def _stream_all(server: Serving, num_sockets: int, tokens: int, *, is_one_stuck: bool) -> Numbers:
    client = AsyncClient(server.url)
    chats = [(await client.create_conversation(title="bench")).id for _ in range(num_sockets)]
    memory = server.memory_bytes
    async with contextlib.AsyncExitStack() as stack:
        stuck = await stack.enter_async_context(_stuck(server)) if is_one_stuck else None
        closing = asyncio.create_task(_close_code(stuck)) if stuck else None
        pings: list[float] = []
        watch = asyncio.create_task(_ping(server, pings))
        began = time.perf_counter()
        counts = await asyncio.gather(*(_stream(client, chat, tokens) for chat in chats[int(is_one_stuck) :]))
        seconds = time.perf_counter() - began
        grown = server.memory_bytes - memory
        watch.cancel()
        code = await closing if closing else 0
    return {"tok_s": sum(counts) / seconds, "ping_ms": max(pings), "grown_mib": grown / 2**20, "close_code": code}


async def _stream(client: AsyncClient, chat: str, tokens: int) -> int:
    params = RunParams(max_tokens=tokens, ignore_eos=True, seed=1)
    request = RunRequest(conversation_id=chat, kind=RunKind.REPLY, input="Tell me a story.", n=NUM_SAMPLES, params=params)
    async with contextlib.aclosing(client.run(request)) as messages:
        async for message in messages:
            if isinstance(message, RunDone):
                return message.usage.completion_tokens if message.usage else 0
    raise AssertionError("a run ends")


@contextlib.asynccontextmanager
async def _stuck(server: Serving) -> AsyncIterator[ClientConnection]:
    """A client that asks for a long conversation again and again, and reads none of it."""
    client = AsyncClient(server.url)
    chat = (await client.create_conversation(title="stuck")).id
    await client.add_message(chat, Role.USER, "word " * 60_000)
    async with _dial(server, max_queue=1, ping_interval=None, close_timeout=1) as socket:
        asking = asyncio.create_task(_ask_again_and_again(socket, chat))
        yield socket
        asking.cancel()


async def _ask_again_and_again(socket: ClientConnection, chat: str) -> None:
    with contextlib.suppress(ConnectionClosed):
        for _ in range(STUCK_ASKS):
            await socket.send(json.dumps({"type": "subscribe", "conversation_id": chat}))
            await asyncio.sleep(0.02)  # one that is asked for again before it was sent is not sent


async def _ping(server: Serving, milliseconds: list[float]) -> None:
    async with _dial(server) as socket:
        while True:
            began = time.perf_counter()
            await socket.send(json.dumps({"type": "ping", "t": began}))
            await _until(socket, "pong")
            milliseconds.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.05)


async def _close_code(socket: ClientConnection) -> int:
    with contextlib.suppress(ConnectionClosed, TimeoutError):
        await asyncio.sleep(STUCK_S)
        async with asyncio.timeout(20):
            while True:
                await socket.recv()
    return socket.close_code or 0


# -- storm ---------------------------------------------------------------------------------------------------------------


async def measure_storm(server: Serving, seconds: float = STORM_S, per_s: float = STORM_PER_S) -> Numbers:
    """Start and stop runs at a steady pace, then count what is left when all have ended."""
    client = AsyncClient(server.url)
    chats = [(await client.create_conversation(title="storm")).id for _ in range(STORM_CHATS)]
    number = 0
    places = asyncio.Semaphore(MAX_OPEN)
    async with _dial(server) as socket:
        reader = asyncio.create_task(_stop_what_starts(socket, places))
        began = time.perf_counter()
        while (now := time.perf_counter() - began) < seconds:
            await places.acquire()
            number += 1
            fields = {
                "conversation_id": chats[number % STORM_CHATS],
                "kind": "reply",
                "input": f"storm {number}",
                "n": 1 if number % 8 else 4,
            }
            await socket.send(json.dumps({"type": "run.create", "client_msg_id": f"s{number}-{began}", **fields}))
            await asyncio.sleep(max(0.0, number / per_s - now))
        took = time.perf_counter() - began
        while (left := _metrics(server))["chatpage_runs_live"]:
            await asyncio.sleep(0.2)
        num_stopped = await _finished(reader)
    return {
        "starts per second": number / took,
        "stops": num_stopped,
        "blocks used afterwards": left['chatpage_blocks{state="used"}'],
        "sequences afterwards": left['chatpage_sequences{state="running"}'] + left['chatpage_sequences{state="waiting"}'],
        "runs afterwards": left["chatpage_runs_live"],
    }


async def _stop_what_starts(socket: ClientConnection, places: asyncio.Semaphore) -> int:
    num_stopped = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            message = json.loads(await socket.recv())
            if message["type"] in ("run.done", "error"):
                places.release()
            if message["type"] == "run.created":
                await socket.send(json.dumps({"type": "run.cancel", "run_id": message["run_id"]}))
                num_stopped += 1
    return num_stopped


async def _finished(reader: "asyncio.Task[int]") -> int:
    reader.cancel()
    return await reader


# -- size ----------------------------------------------------------------------------------------------------------------


def make_conversations(data: Path) -> tuple[str, str]:
    """Write a small conversation, a big one, and many messages to search; return the ids of the first two."""
    with Store(database_path(data)) as store:
        small, big = (_with_branches(store, number) for number in (SMALL_NODES, BIG_NODES))
        for start in range(0, SEARCHED_NODES, 100):
            chat = store.create_conversation(LOCAL_USER, title=f"archive {start}").id
            texts = (f"{' '.join(_words(number, 25))} number {number}" for number in range(start, start + 100))
            store.add_siblings(LOCAL_USER, chat, None, [NewNode(role=Role.USER, text=text) for text in texts])
    return small, big


def _with_branches(store: Store, num_nodes: int) -> str:
    """A conversation whose active path is short, whatever else hangs in its tree."""
    chat = store.create_conversation(LOCAL_USER, title=f"{num_nodes} messages").id
    parent: NodeId | None = None
    for level in range(5):
        num_siblings = max(1, num_nodes // 5)
        new = [
            NewNode(role=Role.USER if level % 2 == 0 else Role.ASSISTANT, text=" ".join(_words(sibling, 30)))
            for sibling in range(num_siblings)
        ]
        parent = store.add_siblings(LOCAL_USER, chat, parent, new).nodes[0].id
    return chat


def _words(number: int, count: int) -> Iterator[str]:
    """Words of which, as in a language, a few are in every message and most in few."""
    chance = random.Random(number)
    for _ in range(count):
        yield _word(int(20_000 ** chance.random()) - 1)


def _word(rank: int) -> str:
    syllables = ("ka", "to", "mi", "ru", "se", "no", "la", "vi")
    return "".join(syllables[rank // 8**place % 8] for place in range(5))


async def measure_size(server: Serving, small: str, big: str) -> Numbers:
    """Compare what a token costs the server, open the big conversation, and search."""
    client = AsyncClient(server.url)
    costs = {small: [], big: []}  # type: dict[str, list[float]]
    for chat in (small, big) * 3:
        costs[chat].append(await _cpu_per_token(server, client, chat))
    opening = [await _open(server, big) for _ in range(5)]
    searching = []
    for words in (_word(300), f"{_word(5)} {_word(40)}", "number 77777", f"{_word(2000)} {_word(100)}", "nothing of the kind"):
        began = time.perf_counter()
        await client.search(words)
        searching.append((time.perf_counter() - began) * 1e3)
    per_token = {chat: statistics.median(values) for chat, values in costs.items()}
    return {
        f"server CPU per token, {SMALL_NODES} messages, us": per_token[small] * 1e6,
        f"server CPU per token, {BIG_NODES} messages, us": per_token[big] * 1e6,
        "ratio": per_token[big] / per_token[small],
        "opening the big one, ms": statistics.median(opening),
        f"search over {SEARCHED_NODES} messages, slowest of 5, ms": max(searching),
    }


async def _cpu_per_token(server: Serving, client: AsyncClient, chat: str) -> float:
    leaf = (await client.tree(chat)).choices[-1].child_id
    params = RunParams(max_tokens=64, ignore_eos=True, seed=1)
    request = RunRequest(conversation_id=chat, kind=RunKind.REPLY, parent_id=leaf, input="Go on.", n=NUM_SAMPLES, params=params)
    before = 0.0
    async with contextlib.aclosing(client.run(request)) as messages:
        async for message in messages:
            if isinstance(message, RunCreated):
                before = server.cpu_s
    return (server.cpu_s - before) / (NUM_SAMPLES * 64)


async def _open(server: Serving, chat: str) -> float:
    """Return the milliseconds from asking for a conversation to having all of it, as a page does."""
    async with _dial(server) as socket:
        began = time.perf_counter()
        await socket.send(json.dumps({"type": "subscribe", "conversation_id": chat}))
        await _until(socket, "tree.patch")
        return (time.perf_counter() - began) * 1e3


# -- tools ---------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _dial(server: Serving, **options: Any) -> AsyncIterator[ClientConnection]:
    options = {"subprotocols": [PROTOCOL], "compression": None, "max_size": None, **options}
    async with connect(server.ws_url, **options) as socket:
        await socket.send(json.dumps({"type": "hello", "client_id": "bench"}))
        await _until(socket, "welcome")
        yield socket


async def _until(socket: ClientConnection, kind: str) -> None:
    while json.loads(await socket.recv())["type"] != kind:
        pass


def _metrics(server: Serving) -> Numbers:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="sockets, storm, size (default: all)")
    parser.add_argument("--storm-seconds", type=float, default=STORM_S)
    options, arguments = parser.parse_known_args()
    for part in options.parts or ["sockets", "storm", "size"]:
        for name, value in _run(part, [*LIMITS, *arguments], options.storm_seconds).items():
            print(f"{part:8} {name:48} {value:>12,.2f}", flush=True)


def _run(part: str, arguments: Sequence[str], storm_s: float) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        ids = make_conversations(Path(folder)) if part == "size" else ("", "")
        with serving(Path(folder), arguments) as server:
            match part:
                case "sockets":
                    return asyncio.run(measure_sockets(server))
                case "storm":
                    return asyncio.run(measure_storm(server, storm_s))
                case "size":
                    return asyncio.run(measure_size(server, *ids))
    sys.exit(f"there is no part {part!r}: choose sockets, storm or size")


if __name__ == "__main__":
    main()
