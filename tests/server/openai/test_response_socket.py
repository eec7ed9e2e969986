"""Responses on a socket through the official client: the events of the stream, lanes, chains without storing, and its ends."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.resources.responses.responses import AsyncResponsesConnection
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from chatpage.server import sockets
from chatpage.server.openai import response_socket
from chatpage.server.settings import ServeSettings
from chatpage.session import SessionLimits
from chatpage.session.admission import Admission
from chatpage.store import LOCAL_USER
from tests.server.openai.clients import model_of, official_async, wait_for, wait_until_idle
from tests.server.serving import TIMEOUT_S, Served, serving, with_server
from tests.sessions import Desk

PREVIOUS = "previous_response_id"
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class Line:
    """The client's side of a socket."""

    def __init__(self, socket: AsyncResponsesConnection, model: str) -> None:
        self.socket = socket
        self._model = model

    async def ask(self, text: str | None = None, **fields: Any) -> None:
        """Ask as the client does, and for what it has no name for."""
        given = {} if text is None else {"input": text}
        event: Any = {"type": "response.create", "model": self._model, "max_output_tokens": 8, "ignore_eos": True, "seed": 7}
        await self.socket.send(event | given | fields)

    async def receive(self) -> Any:
        return await asyncio.wait_for(self.socket.recv(), TIMEOUT_S)

    async def events(self) -> list[Any]:
        """Read up to the end of a response."""
        events = [await self.receive()]
        while events[-1].type not in ENDS:
            events.append(await self.receive())
        return events

    async def response(self, text: str | None = None, **fields: Any) -> Any:
        """Ask, and return the response when it has ended."""
        await self.ask(text, **fields)
        end = (await self.events())[-1]
        assert end.type != "error", end
        return end.response


@contextlib.asynccontextmanager
async def dial(served: Served, key: str = "none") -> AsyncIterator[Line]:
    async with official_async(served, key) as client, client.responses.connect() as socket:
        yield Line(socket, model_of(served))


def _cached(response: Any) -> int:
    return int(response.usage.input_tokens_details.cached_tokens)


def _size(response: Any) -> int:
    return int(response.usage.input_tokens + response.usage.output_tokens)


def test_the_events_are_those_of_the_stream_and_the_chain_is_the_same(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        async with dial(served) as line, official_async(served) as client:
            await line.ask("One")
            events = await line.events()
            numbers = [event.sequence_number for event in events]
            assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
            assert numbers == sorted(set(numbers))
            first = events[-1].response
            second = await line.response("Two", previous_response_id=first.id)
            assert _cached(second) == _size(first) - 1, "all but what is new, and the last token, which was never computed"
            assert (await client.responses.retrieve(second.id)).output_text == second.output_text, "and it is there over HTTP"

    with_server(tmp_path, test)


def test_a_prompt_is_warmed_and_gone_on_from(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        async with dial(served) as line:
            await line.socket.response.create(model=model_of(served), input="A long story", generate=False)
            events = await line.events()
            assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
            warm = events[-1].response
            assert warm.output == []
            assert _cached(await line.response("And?", previous_response_id=warm.id)) == warm.usage.input_tokens

    with_server(tmp_path, test)


@pytest.mark.parametrize("generate", [True, False])
def test_what_is_not_stored_can_be_gone_on_from_on_its_socket_alone(tmp_path: Path, generate: bool) -> None:
    async def test(served: Served) -> None:
        async with dial(served) as line, dial(served) as other:
            first = await line.response("One", store=False, generate=generate)
            second = await line.response("Two", store=False, previous_response_id=first.id)
            assert _cached(second) >= _size(first) - 1
            await line.ask("Two", previous_response_id=first.id)
            assert (await line.receive()).error.code == "previous_response_not_found", "what was not kept cannot be kept now"
            await other.ask("Two", store=False, previous_response_id=first.id)
            assert (await other.receive()).error.code == "previous_response_not_found"
        assert served.desk.store.list_conversations(LOCAL_USER) == ()

    with_server(tmp_path, test)


def test_lanes_run_side_by_side_and_each_in_its_order(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        async with dial(served) as line:
            for text, lane in (("1", "a"), ("2", "a"), ("3", "b"), ("4", None)):
                await line.ask(text, max_output_tokens=60, **({} if lane is None else {"stream_id": lane}))
            events: list[Any] = []
            while sum(event.type == "response.incomplete" for event in events) < 4:
                events.append(await line.receive())
        lanes = [event.stream_id for event in events]
        assert set(lanes) == {"a", "b", None}
        changes = sum(one != other for one, other in itertools.pairwise(lanes))
        assert changes > 3, "lanes do not wait for each other"
        in_a = [event.type for event in events if event.stream_id == "a" and event.type in ("response.created", *ENDS)]
        assert in_a == ["response.created", "response.incomplete"] * 2, "one lane is first come, first served"

    with_server(tmp_path, test)


def test_a_stored_response_outlives_its_socket_and_is_read_on_another(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        text, number, response_id = "", 0, ""
        async with dial(served) as line:
            await line.ask("Hi", max_output_tokens=200)
            while not text:
                event = await line.receive()
                number = event.sequence_number
                if event.type == "response.created":
                    response_id = event.response.id
                text += event.delta if event.type == "response.output_text.delta" else ""
        async with dial(served) as line:
            ask: Any = {"type": "response.retrieve", "response_id": response_id, "starting_after": number, "stream_id": "again"}
            await line.socket.send(ask)
            events = await line.events()
        text += "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert {event.stream_id for event in events} == {"again"}
        assert text == events[-1].response.output_text
        assert events[-1].response.usage.output_tokens == 200

    with_server(tmp_path, test)


def test_what_is_not_stored_ends_with_its_socket_running_or_queued(tmp_path: Path) -> None:
    def prepare(desk: Desk) -> None:
        desk.session.admission = Admission(SessionLimits(max_running_runs=1, max_queued_runs=2))

    with serving(tmp_path, prepare=prepare) as served:

        async def leave() -> None:
            async with dial(served) as line:
                for lane in "abcd":
                    await line.ask("Hi", max_output_tokens=1500, store=False, stream_id=lane)
                    if lane == "a":
                        await line.receive()
                while (event := await line.receive()).type != "error":
                    pass
                assert (event.status, event.error.code, event.stream_id) == (429, "rate_limit_exceeded", "d")
                assert event.headers == {"Retry-After": "1"}, "the header that it has over HTTP"
                await asyncio.to_thread(wait_for, served, num_running=1)

        asyncio.run(leave())
        assert wait_until_idle(served)["generated_tokens"] < 1500


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        ("{", "invalid_request", None),
        ("[]", "invalid_request", None),
        ("[" * 100_000, "invalid_request", None),
        ({"type": "response.sing"}, "invalid_request", None),
        ({"type": ["response.create"]}, "invalid_request", None),
        ({"type": "response.create", "input": "Hi", "tools": [{}]}, "unsupported_parameter", "tools"),
        ({"type": "response.create", "input": "Hi", "mood": 1}, "unknown_parameter", "mood"),
        ({"type": "response.create", "input": "Hi", "background": True}, "invalid_parameter", None),
        ({"type": "response.create", "input": "Hi", "stream": False}, "invalid_parameter", None),
        ({"type": "response.create", "input": "Hi", "model": "gpt-9"}, "model_not_found", "model"),
        ({"type": "response.create", "input": "x" * 2100}, "context_length_exceeded", None),
        ({"type": "response.create"}, "invalid_parameter", None),
        ({"type": "response.create", "input": "Hi", PREVIOUS: "resp_1"}, "previous_response_not_found", PREVIOUS),
        ({"type": "response.retrieve", "response_id": "resp_1"}, "response_not_found", None),
        ({"type": "response.retrieve"}, "missing_required_parameter", "response_id"),
    ],
)
def test_what_is_wrong_is_told_and_the_socket_stays_open(
    server: Served, message: str | dict[str, Any], code: str, param: str | None
) -> None:
    async def test() -> None:
        async with dial(server) as line:
            if isinstance(message, str):
                await line.socket.send_raw(message)
            else:
                await line.socket.send(message | {"stream_id": "a"})  # type: ignore[arg-type]
            event = await line.receive()
            assert (event.type, event.error.code, event.error.param) == ("error", code, param), event
            assert event.status in (400, 404)
            assert isinstance(message, str) or event.stream_id == "a"
            assert (await line.response("Still here")).output_text

    asyncio.run(test())


def test_steering_is_answered_in_the_words_of_the_protocol(server: Served) -> None:
    async def test() -> None:
        async with dial(server) as line:
            await line.socket.response.steer(input="No, stop", previous_response_id="resp_1")
            event = await line.receive()
            assert (event.type, event.error.code) == ("response.steer.failed", "steering_not_supported")
            assert event.steer.input == "No, stop"

    asyncio.run(test())


def test_foreign_pages_and_wrong_keys_are_refused_before_they_are_let_in(server: Served, tmp_path: Path) -> None:
    async def refused(served: Served, **headers: str) -> bool:
        url = served.url.replace("http", "ws") + "/v1/responses"
        try:
            async with connect(url, additional_headers=headers):
                return False
        except InvalidStatus as error:
            return error.response.status_code == 403

    assert asyncio.run(refused(server, Origin="http://evil.example"))
    assert asyncio.run(refused(server, Authorization="Bearer cp-wrong"))
    assert not asyncio.run(refused(server))
    with serving(tmp_path, settings=ServeSettings(host="0.0.0.0")) as guarded:
        assert asyncio.run(refused(guarded))
        assert asyncio.run(refused(guarded, Authorization="Bearer none"))
        ann = guarded.desk.store.create_user("ann")
        _, key = guarded.desk.store.create_api_key(ann.id, name="test")
        assert not asyncio.run(refused(guarded, Authorization=f"Bearer {key}"))


def test_a_client_that_reads_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stands still must cost no more than the buffers of its connection."""
    monkeypatch.setattr(response_socket, "SEND_S", 0.2)
    monkeypatch.setattr(sockets, "CLOSE_S", 0.2)
    num_asked = 1024

    async def test(served: Served) -> None:
        async with official_async(served) as client:
            labels = {f"{i}": "x" * 500 for i in range(16)}
            made = await client.responses.create(
                model=model_of(served), input="Hi", instructions="x" * 1500, metadata=labels, max_output_tokens=1
            )
        url = served.url.replace("http", "ws") + "/v1/responses"
        async with connect(url, compression=None) as socket:
            socket.transport.pause_reading()
            for i in range(num_asked):
                ask = {"type": "response.retrieve", "response_id": made.id, "stream_id": f"{i % 64}"}
                await socket.send(json.dumps(ask))
            while served.server.server_state.connections:
                await asyncio.sleep(0.01)
            socket.transport.resume_reading()
            num_read = 0
            with contextlib.suppress(ConnectionClosed):
                while True:
                    num_read += "response.incomplete" in str(await asyncio.wait_for(socket.recv(), TIMEOUT_S))
            assert num_read < num_asked
            assert socket.close_code in (1013, 1006), "cut off at last, since it did not even read that it was closed"

    with_server(tmp_path, test)


def test_everything_was_given_back(server: Served) -> None:
    wait_until_idle(server)
