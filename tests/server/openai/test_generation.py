"""Requests that no conversation keeps: whoever goes away at whatever stage leaves nothing behind; users have their limits."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from chatpage.errors import OverloadedError
from chatpage.sampling_params import SamplingParams
from chatpage.server.openai.generation import generate
from chatpage.session import SessionLimits
from chatpage.session.admission import Admission
from chatpage.store import LOCAL_USER, UserId
from tests.server.openai.clients import EXACT, HELLO, kv, model_of, official, plain, until, wait_for, wait_until_idle
from tests.server.serving import Served, serving
from tests.sessions import Desk, with_desk

LONG = 1500  # tokens, which nobody waits for


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Served]:
    """A server where a user computes one thing at once, and one may wait."""

    def prepare(desk: Desk) -> None:
        desk.session.admission = Admission(SessionLimits(max_running_runs=1, max_queued_runs=1))

    with serving(tmp_path, prepare=prepare) as served:
        yield served


def _chat(served: Served, **fields: Any) -> bytes:
    """Return a request as it goes over the wire."""
    body = json.dumps({"model": model_of(served), "messages": HELLO, "max_tokens": LONG, "ignore_eos": True} | fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def _connect(served: Served) -> socket.socket:
    url = httpx.URL(served.url)
    return socket.create_connection((url.host, url.port or 80), timeout=60)


def _read_until(connection: socket.socket, wanted: bytes) -> bytes:
    data = b""
    while wanted not in data:
        received = connection.recv(65536)
        assert received, f"the server closed before {wanted!r}: {data[-500:]!r}"
        data += received
    return data


def test_a_client_that_leaves_in_the_middle_of_a_stream_stops_it(narrow: Served) -> None:
    with _connect(narrow) as connection:
        connection.sendall(_chat(narrow, stream=True, n=3))
        _read_until(connection, b'"index":2')
    assert wait_until_idle(narrow)["generated_tokens"] < 3 * LONG


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_stops_it(narrow: Served) -> None:
    with _connect(narrow) as connection:
        connection.sendall(_chat(narrow, n=3))
        wait_for(narrow, num_running=3)
    assert wait_until_idle(narrow)["generated_tokens"] < 3 * LONG


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_computed_stops_it(narrow: Served, stream: bool) -> None:
    with _connect(narrow) as connection:
        connection.sendall(_chat(narrow, stream=stream, messages=[{"role": "user", "content": "x" * 1900}], max_tokens=100))
        until(lambda: kv(narrow)["prompt_tokens"] > 0)
    wait_until_idle(narrow)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_is_queued_touches_nobody_else(narrow: Served, stream: bool) -> None:
    """Elsewhere, to cancel a request that waited ended the one that ran."""
    with _connect(narrow) as running:
        running.sendall(_chat(narrow, stream=True, max_tokens=300))
        _read_until(running, b'"content":""')
        with _connect(narrow) as queued:
            queued.sendall(_chat(narrow, stream=stream))
            _wait_for_tickets(narrow, 2)
        _wait_for_tickets(narrow, 1)
        assert kv(narrow)["num_running"] == 1
        _read_until(running, b"[DONE]")
    assert wait_until_idle(narrow)["generated_tokens"] == 300


@pytest.mark.parametrize("size", [10, 100, 10_000])
def test_a_request_that_is_cut_off_leaves_nothing(narrow: Served, size: int) -> None:
    with _connect(narrow) as connection:
        connection.sendall(_chat(narrow, stream=True)[:size])
    assert wait_until_idle(narrow)["generated_tokens"] < LONG


def test_a_response_that_is_not_stored_ends_with_its_client(narrow: Served) -> None:
    options: dict[str, Any] = {"model": model_of(narrow), "input": "Hi", "store": False, "max_output_tokens": LONG}
    with official(narrow) as client, client.responses.create(**options, extra_body=EXACT, stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
    assert wait_until_idle(narrow)["generated_tokens"] < LONG


def test_several_prompts_of_one_request_end_together(narrow: Served) -> None:
    body = {"model": model_of(narrow), "prompt": ["a", "b", "c"], "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with plain(narrow) as http, http.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    assert wait_until_idle(narrow)["generated_tokens"] < 3 * LONG


def test_a_user_has_so_many_requests_and_the_next_is_told_when_to_come_back(narrow: Served) -> None:
    with _connect(narrow) as first, _connect(narrow) as second:
        for connection in (first, second):
            connection.sendall(_chat(narrow, stream=True))
        _wait_for_tickets(narrow, 2)
        with official(narrow) as client, pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=model_of(narrow), messages=HELLO)
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.response.headers["retry-after"] == "1"
        with official(narrow) as client, pytest.raises(openai.RateLimitError):
            client.responses.create(model=model_of(narrow), input="Conversations count with the rest.")
    wait_until_idle(narrow)
    assert narrow.desk.store.list_conversations(LOCAL_USER, deleted=True) == (), "a refused response leaves no conversation"
    assert narrow.desk.store.list_conversations(LOCAL_USER) == ()


def test_an_engine_that_is_gone_is_503(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        asyncio.run_coroutine_threadsafe(served.desk.running.close(), served.loop).result(60)
        for path, body in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/responses", {"input": "Hi"})):
            answer = httpx.post(f"{served.url}{path}", json={"model": model_of(served)} | body, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
            assert answer.headers["retry-after"] == "1"
        assert served.desk.session.admission.num_users == 0


def test_an_engine_that_dies_on_the_way_is_told_in_the_stream(tmp_path: Path) -> None:
    with serving(tmp_path) as served, official(served) as client:
        options: dict[str, Any] = {"model": model_of(served), "messages": HELLO, "max_tokens": 300, "extra_body": EXACT}
        with client.chat.completions.create(**options, stream=True) as stream:
            chunks = iter(stream)
            next(chunks)
            asyncio.run_coroutine_threadsafe(served.desk.running.close(), served.loop)
            with pytest.raises(openai.APIError, match="not running"):
                list(chunks)


def test_readers_that_stop_give_their_place_back(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.session.admission = Admission(SessionLimits(max_running_runs=1, max_queued_runs=0))
        params = SamplingParams(max_tokens=LONG, ignore_eos=True, n=2)
        events = generate(desk.session, LOCAL_USER, [[1, 2, 3], [1, 2, 4]], params)
        async with aclosing(events):
            await anext(events)
            with pytest.raises(OverloadedError, match="1 runs of yours"):
                await anext(generate(desk.session, LOCAL_USER, [[1]], params))
            other = generate(desk.session, UserId("ann"), [[1]], SamplingParams(max_tokens=1, ignore_eos=True))
            assert [number async for number, _ in other][-1] == 0, "another user has places of his own"
        assert desk.session.admission.num_users == 0

    with_desk(tmp_path, test)


def _wait_for_tickets(served: Served, num: int) -> None:
    """Return when the local user has so much going on."""
    until(lambda: served.desk.session.admission.num_tickets(LOCAL_USER) == num)
