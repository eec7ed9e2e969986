"""The official client beside the one server of a module."""

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.server.openai.clients import model_of, official, plain
from tests.server.serving import Served


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with official(server) as client:
        yield client


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with plain(server) as client:
        yield client


@pytest.fixture
def model(server: Served) -> str:
    return model_of(server)
