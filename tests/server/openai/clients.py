"""Clients of the API of OpenAI for tests: the official ones as they are, and plain HTTP for what they would not send."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from tests.server.serving import Served

TIMEOUT_S = 60.0
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
EXACT: dict[str, Any] = {"ignore_eos": True}  # what the official client sends by `extra_body`


def model_of(served: Served) -> str:
    return served.desk.running.info.model


@contextlib.contextmanager
def official(served: Served, key: str = "none") -> Iterator[OpenAI]:
    """Open the official client; it does not try again, so that tests see the first answer."""
    with OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def official_async(served: Served, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


@contextlib.contextmanager
def plain(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=TIMEOUT_S) as client:
        yield client


def kv(served: Served) -> dict[str, int]:
    """Return the block memory in numbers."""
    stats: dict[str, int] = httpx.get(f"{served.url}/api/kv", timeout=TIMEOUT_S).json()["stats"]
    return stats


def until(is_so: Callable[[], bool]) -> None:
    """Return when it is so."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def wait_for(served: Served, **wanted: int) -> dict[str, int]:
    """Return the block memory when it shows these numbers."""
    deadline = time.monotonic() + TIMEOUT_S
    while any((stats := kv(served))[name] != value for name, value in wanted.items()):
        assert time.monotonic() < deadline, f"wanted {wanted}, got {stats}"
        time.sleep(0.005)
    return stats


def wait_until_idle(served: Served) -> dict[str, int]:
    """Return when nothing runs, nothing waits, every block was given back, and no user has a place."""
    stats = wait_for(served, num_running=0, num_waiting=0, blocks_used=0)
    until(lambda: served.desk.session.admission.num_users == 0)
    return stats
