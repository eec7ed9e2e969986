"""What was deleted long ago leaves the database; what was deleted lately can come back."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatpage.errors import NotFoundError
from chatpage.server.purging import purge_daily
from chatpage.store import LOCAL_USER, ConversationId, NewNode, Role, Store, database_path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(database_path(tmp_path)) as store:
        yield store


def deleted_conversation(store: Store, *, days_ago: float) -> ConversationId:
    conversation = store.create_conversation(LOCAL_USER, title="Gone").id
    store.add_siblings(LOCAL_USER, conversation, None, [NewNode(role=Role.USER, text="Something said")])
    store.delete_conversation(LOCAL_USER, conversation)
    moment = int((time.time() - days_ago * 86_400) * 1e6)
    sql = "UPDATE conversations SET deleted_at = ? WHERE id = ?"
    store.database.write(lambda db: db.execute(sql, (moment, conversation))).result()
    return conversation


def purge(store: Store, keep_days: int) -> None:
    async def once() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(purge_daily(store, keep_days), 1)

    asyncio.run(once())


def test_what_was_deleted_long_ago_is_removed_and_the_rest_can_be_restored(store: Store) -> None:
    old, recent = (deleted_conversation(store, days_ago=days) for days in (31, 29))
    purge(store, keep_days=30)
    store.restore_conversation(LOCAL_USER, recent)
    assert store.get_path(LOCAL_USER, recent)[0].text == "Something said"
    with pytest.raises(NotFoundError):
        store.restore_conversation(LOCAL_USER, old)
    assert store.database.read(lambda db: db["nodes"].count).result() == 1


def test_a_store_that_cannot_be_written_is_tried_again_another_day(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    deleted_conversation(store, days_ago=31)
    store.close()
    purge(store, keep_days=30)
    assert "could not be removed for good" in caplog.text
