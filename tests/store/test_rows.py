"""Reading part of a tree: it must say what the whole tree says, whatever the rows look like."""

from collections.abc import Iterator

import pytest
import sqlite_utils
from hypothesis import given
from hypothesis import strategies as st

from chatpage.errors import NotFoundError
from chatpage.store import LOCAL_USER, ConversationId, NodeId
from chatpage.store.conversations import insert_conversation
from chatpage.store.migrations import migrations
from chatpage.store.rows import load_path, load_shape, point_at, save_choices
from chatpage.store.tree import Link
from tests.store.test_tree import any_links

CHAT = ConversationId("chat")


@pytest.fixture(scope="module")
def db() -> Iterator[sqlite_utils.Database]:
    with sqlite_utils.Database(memory=True) as opened:
        migrations.apply(opened)
        yield opened


def fill(db: sqlite_utils.Database, links: list[Link], deleted: set[NodeId], choices: dict[NodeId | None, NodeId]) -> None:
    insert_conversation(db, LOCAL_USER, CHAT, title="")
    for link in links:
        db.execute(
            "INSERT INTO nodes (id, owner_id, parent_id, role, text, token_ids, status, created_at)"
            " VALUES (?, ?, ?, 'user', '', x'', 'complete', ?)",
            (link.id, LOCAL_USER, link.parent_id, link.created_at),
        )
    point_at(db, CHAT, [link.id for link in links])
    for node_id in deleted:
        db.execute("UPDATE conversation_nodes SET deleted_at = 1 WHERE node_id = ?", (node_id,))
    save_choices(db, CHAT, choices)


@given(links=any_links(), data=st.data())
def test_a_path_alone_is_the_path_of_the_whole_tree(db: sqlite_utils.Database, links: list[Link], data: st.DataObject) -> None:
    ids = [link.id for link in links]
    some_id = st.sampled_from([*ids, NodeId("gone")])
    deleted = data.draw(st.sets(some_id, max_size=3))
    choices = data.draw(st.dictionaries(st.one_of(st.none(), some_id), some_id, max_size=4))
    db.begin()
    try:
        fill(db, links, deleted, choices)
        whole = load_shape(db, CHAT)
        assert load_path(db, CHAT, None).choices.get(None) == whole.choices.get(None)
        for node_id in [*ids, NodeId("nowhere")]:
            part = load_path(db, CHAT, node_id)
            if node_id not in whole.nodes:
                with pytest.raises(NotFoundError):
                    part.path(node_id)
                continue
            path = whole.path(node_id)
            assert part.path(node_id) == path
            assert {step: part.parents[step] for step in path} == {step: whole.parents[step] for step in path}
            for step in (None, *path):
                assert part.choices.get(step) == whole.choices.get(step)
    finally:
        db.rollback()
