"""One empty store per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from chatpage.store import LOCAL_USER, Conversation, Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "data" / "chatpage.db") as opened:
        yield opened


@pytest.fixture
def conversation(store: Store) -> Conversation:
    return store.create_conversation(LOCAL_USER, title="Trees")
