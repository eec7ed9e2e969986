"""Sockets are closed when the login or the key that opened them ends, whoever ended it."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from chatpage.server import revoking
from chatpage.server.protocol import Pong
from chatpage.server.settings import ServeSettings
from chatpage.store import LOCAL_USER, Store
from tests.server.serving import TIMEOUT_S, Served, Wire, dial, with_server

OPEN = ServeSettings(host="0.0.0.0")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revoking, "CHECK_S", 0.05)


async def assert_stays(wire: Wire) -> None:
    """A socket whose key is good outlives many checks."""
    for number in range(5):
        await asyncio.sleep(revoking.CHECK_S)
        await wire.send("ping", t=number)
        await wire.until(Pong)


def other_process(folder: Path) -> Store:
    """Open the database once more, as a command line beside the server does."""
    return Store(folder / "chatpage.db")


def test_a_revoked_key_closes_its_sockets_and_no_others(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        store = served.desk.store
        user = store.create_user("ann")
        (bad_id, bad), (_, good) = store.create_api_key(user.id, "bad"), store.create_api_key(user.id, "good")

        def headers(key: str) -> dict[str, Any]:
            return {"additional_headers": {"Authorization": f"Bearer {key}"}}

        url = f"{served.url.replace('http', 'ws')}/v1/responses"
        async with (
            dial(served, **headers(bad)) as by_header,
            dial(served, hello=False) as by_hello,
            connect(url, **headers(bad)) as responses,
            dial(served, **headers(good)) as other,
        ):
            await by_hello.hello(token=bad)
            await assert_stays(by_header)
            with other_process(tmp_path) as beside:
                beside.revoke_api_key(user.id, bad_id.id)
            assert [await by_header.close_code(), await by_hello.close_code()] == [1008, 1008]
            with pytest.raises(ConnectionClosed):
                await asyncio.wait_for(responses.recv(), TIMEOUT_S)
            assert responses.close_code == 1008
            await assert_stays(other)

    with_server(tmp_path, test, settings=OPEN)


def test_a_logout_closes_the_sockets_of_that_login_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared machine: whoever sits down next must not go on reading what the last user's page still follows."""
    monkeypatch.setattr(revoking, "CHECK_S", 1e9)

    async def test(served: Served) -> None:
        user = served.desk.store.create_user("ann")
        here, elsewhere = (served.desk.store.create_login(user.id, lifetime_s=1000) for _ in range(2))

        def headers(token: str) -> dict[str, str]:
            return {"Cookie": f"chatpage={token}", "Origin": served.url}

        async with (
            dial(served, additional_headers=headers(here)) as socket,
            dial(served, additional_headers=headers(elsewhere)) as other,
            httpx.AsyncClient(base_url=served.url) as http,
        ):
            assert (await http.post("/logout", headers=headers(here))).status_code == 204
            assert await socket.close_code() == 1008
            await other.send("ping", t=1)
            await other.until(Pong)

    with_server(tmp_path, test, settings=OPEN)


def test_a_removed_user_hears_nothing_more_and_what_ran_for_them_leaves_nothing(tmp_path: Path) -> None:
    """`serving` ends by checking that every block was given back."""

    async def test(served: Served) -> None:
        user = served.desk.store.create_user("ann")
        _, key = served.desk.store.create_api_key(user.id, "test")
        async with dial(served, additional_headers={"Authorization": f"Bearer {key}"}) as wire:
            chat = served.desk.store.create_conversation(user.id)
            run = await wire.reply(chat, params={"max_tokens": 1500, "ignore_eos": True})
            await wire.first_texts(run)
            with other_process(tmp_path) as beside:
                beside.delete_user(user.id)
            assert await wire.close_code() == 1008

    with_server(tmp_path, test, settings=OPEN)


def test_a_login_that_expires_closes_its_sockets(tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        user = served.desk.store.create_user("ann")
        token = served.desk.store.create_login(user.id, lifetime_s=2)
        headers = {"Cookie": f"chatpage={token}", "Origin": served.url}
        async with dial(served, additional_headers=headers) as wire:
            assert await wire.close_code() == 1008

    with_server(tmp_path, test, settings=OPEN)


def test_on_loopback_neither_a_stale_cookie_nor_a_made_up_key_is_held_against_anybody(tmp_path: Path) -> None:
    """Clients of OpenAI insist on a key, and browsers keep cookies of a server that needed a login yesterday."""

    async def test(served: Served) -> None:
        url = f"{served.url.replace('http', 'ws')}/v1/responses"
        async with (
            dial(served, additional_headers={"Cookie": "chatpage=stale", "Origin": served.url}) as wire,
            connect(url, additional_headers={"Authorization": "Bearer none"}) as responses,
        ):
            assert (await wire.hello()).user_id == LOCAL_USER
            await assert_stays(wire)
            await responses.ping()

    with_server(tmp_path, test)
