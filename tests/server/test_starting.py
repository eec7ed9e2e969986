"""What is answered while a server starts: a page to browsers, when to come again to programs, and nobody is refused."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from chatpage.engine.models import default_model
from chatpage.engine.models.cache_dir import CACHE_DIR_VARIABLE
from chatpage.server.serve import open_socket, url_of
from chatpage.server.settings import ServeSettings
from chatpage.server.starting import answering_meanwhile

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    return tmp_path


def while_starting(test: Callable[[str, httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run a test against a server that starts; whoever comes when it has is not refused."""

    async def run() -> None:
        with open_socket(ServeSettings(port=0)) as listener:
            async with answering_meanwhile(listener), httpx.AsyncClient() as http:
                await test(url_of(listener), http)
            with socket.create_connection(listener.getsockname()) as late:
                accepted, _ = listener.accept()
                with accepted:
                    assert accepted.getpeername() == late.getsockname()

    asyncio.run(run())


def test_a_browser_sees_that_the_model_is_loaded_and_asks_again_by_itself() -> None:
    """The address took connections and answered nothing until the model was there: the page was white for minutes."""

    async def test(url: str, http: httpx.AsyncClient) -> None:
        for path in ("/", "/login"):
            answer = await http.get(url + path, headers=BROWSER)
            assert answer.status_code == 503
            assert answer.headers["refresh"] == "1"
            assert answer.headers["cache-control"] == "no-store"
            assert "Loading the model" in answer.text

    while_starting(test)


def test_a_browser_sees_how_much_of_the_model_has_arrived(cache: Path) -> None:
    folder = cache / "models" / (default_model.MODEL_NAME + ".download")
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(bytes(34_000_000))

    async def test(url: str, http: httpx.AsyncClient) -> None:
        text = (await http.get(url, headers=BROWSER)).text
        assert "Fetching the model: 34 of 92 MB" in text
        assert '<progress max="92000000" value="34000000">' in text

    while_starting(test)


def test_a_program_is_told_to_ask_again() -> None:
    async def test(url: str, http: httpx.AsyncClient) -> None:
        answer = await http.get(f"{url}/api/conversations")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert (answer.json()["error"]["code"], answer.json()["error"]["retryable"]) == ("restarting", True)
        answer = await http.post(f"{url}/v1/chat/completions", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "restarting")
        assert (await http.get(f"{url}/health")).json() == {"status": "degraded", "engine": "starting", "saving": "ok"}
        answer = await http.get(f"{url}/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "starting"})

    while_starting(test)


def test_a_socket_waits_for_the_application_and_then_comes_again() -> None:
    """One that was refused at once would come again ever later, and miss the moment when the server is there."""
    waiting: list[asyncio.Task[None]] = []

    async def come(url: str) -> None:
        async with connect(url.replace("http", "ws") + "/ws"):
            raise AssertionError("nobody can be served yet")

    async def test(url: str, http: httpx.AsyncClient) -> None:
        waiting.append(asyncio.create_task(come(url)))
        await http.get(url)
        await asyncio.sleep(0.2)
        assert not waiting[0].done()

    async def run() -> None:
        with open_socket(ServeSettings(port=0)) as listener:
            async with answering_meanwhile(listener), httpx.AsyncClient() as http:
                await test(url_of(listener), http)
            with pytest.raises(InvalidStatus):
                await waiting[0]

    asyncio.run(run())
