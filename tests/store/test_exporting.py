"""Exporting: what is written is read back as the same tree."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chatpage.errors import InvalidRequestError, NotFoundError
from chatpage.store import (
    EXPORT_FORMATS,
    FILE_SUFFIXES,
    LOCAL_USER,
    Conversation,
    ConversationId,
    NewNode,
    NodeStatus,
    Role,
    Store,
    export_conversations,
    import_file,
)
from tests.store.helpers import add, assistant, outline, shown, tree_of, user


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """Another store, to import into."""
    with Store(tmp_path / "other" / "chatpage.db") as opened:
        yield opened


@pytest.fixture
def branched(store: Store) -> Conversation:
    """Two roots, siblings at every level, one deleted branch, an older sibling chosen."""
    made = store.create_conversation(LOCAL_USER, title="Träume 🌳", tags=["x"], params={"top_p": 0.9}, is_pinned=True)
    system = add(store, made, None, NewNode(role=Role.SYSTEM, text="Be brief."))
    question = add(store, made, system, "What is `</script>`?\n\n- a\n- b")
    first = add(store, made, question, assistant("first", token_ids=[1, 2, 3]))
    add(store, made, question, assistant("second", token_ids=[4], status=NodeStatus.ABORTED))
    failed = add(store, made, question, assistant("third", status=NodeStatus.STREAMING))
    store.finish_node(failed, NodeStatus.ERROR, finish_reason="error", detail="a kernel refused")
    store.delete_node(LOCAL_USER, made.id, add(store, made, question, assistant("deleted")))
    follow = add(store, made, first, user("next"))
    streamed = add(
        store, made, follow, NewNode(role=Role.ASSISTANT, status=NodeStatus.STREAMING, model="smol", params={"n": 1})
    )
    store.append_partial(streamed, "streamed", [9])
    store.finish_node(streamed, NodeStatus.COMPLETE, finish_reason="stop", usage={"prompt_tokens": 7}, timing={"ttft_ms": 1.5})
    add(store, made, None, "another root")
    store.choose_node(LOCAL_USER, made.id, first)
    return store.get_conversation(LOCAL_USER, made.id)


def write(store: Store, folder: Path, format: str) -> Path:
    path = folder / ("export" + FILE_SUFFIXES[format])
    with path.open("w", encoding="utf-8") as stream:
        export_conversations(store, LOCAL_USER, stream, format=format)
    return path


def test_our_own_format_loses_nothing(store: Store, other: Store, tmp_path: Path, branched: Conversation) -> None:
    """Token ids too: a reply that is tokenised again is another prefix, and everything after it is computed again."""
    report = import_file(other, LOCAL_USER, write(store, tmp_path, "chatpage"))
    assert report.num_skipped == 0
    (copy,) = other.list_conversations(LOCAL_USER)
    original, back = tree_of(store, branched.id), tree_of(other, copy.id)
    assert (back.nodes, back.children) == (original.nodes, original.children)
    assert back.active_path() == original.active_path()
    for name in ("id", "title", "tags", "is_pinned", "params", "created_at", "updated_at"):
        assert getattr(copy, name) == getattr(branched, name)


@pytest.mark.parametrize("format", ["chatgpt", "openwebui"])
def test_other_tree_formats_keep_the_tree_its_texts_and_what_is_shown(
    store: Store, other: Store, tmp_path: Path, branched: Conversation, format: str
) -> None:
    report = import_file(other, LOCAL_USER, write(store, tmp_path, format))
    assert report.num_skipped == 0
    (copy,) = other.list_conversations(LOCAL_USER)
    assert outline(tree_of(other, copy.id)) == outline(tree_of(store, branched.id))
    assert shown(other, copy.id) == shown(store, branched.id)
    assert copy.title == branched.title
    streamed = tree_of(other, copy.id).active_path()[-1]
    assert (streamed.model, streamed.status) == ("smol", NodeStatus.COMPLETE)
    cut = next(node for node in tree_of(other, copy.id).in_order() if node.text == "second")
    assert cut.status is NodeStatus.INTERRUPTED


def test_sillytavern_keeps_the_shown_path_and_its_siblings(
    store: Store, other: Store, tmp_path: Path, branched: Conversation
) -> None:
    import_file(other, LOCAL_USER, write(store, tmp_path, "sillytavern"))
    (copy,) = other.list_conversations(LOCAL_USER)
    assert shown(other, copy.id) == shown(store, branched.id)
    path = tree_of(store, branched.id).active_path()
    assert [str(node.role) for node in tree_of(other, copy.id).active_path()] == [str(node.role) for node in path]
    again = write(other, tmp_path, "sillytavern")
    with Store(tmp_path / "third.db") as third:
        import_file(third, LOCAL_USER, again)
        (last,) = third.list_conversations(LOCAL_USER)
        assert outline(tree_of(third, last.id)) == outline(tree_of(other, copy.id))


@pytest.mark.parametrize("format", ["chatpage", "chatgpt", "openwebui", "sharegpt"])
def test_many_conversations_are_one_list(store: Store, other: Store, tmp_path: Path, format: str) -> None:
    for number in range(3):
        conversation = store.create_conversation(LOCAL_USER, title=f"number {number}")
        add(store, conversation, add(store, conversation, None, f"question {number}"), assistant("answer"))
    path = write(store, tmp_path, format)
    assert len(json.loads(path.read_text())) == 3
    assert import_file(other, LOCAL_USER, path).num_added == 3
    assert {found.title for found in other.list_conversations(LOCAL_USER)} == {"number 0", "number 1", "number 2"}


def test_our_own_export_imported_where_it_came_from_adds_nothing(store: Store, tmp_path: Path, branched: Conversation) -> None:
    report = import_file(store, LOCAL_USER, write(store, tmp_path, "chatpage"))
    assert (report.num_unchanged, report.num_added, report.num_nodes_added) == (1, 0, 0)
    assert store.get_conversation(LOCAL_USER, branched.id) == branched


def test_a_purged_conversation_comes_back_from_its_export(store: Store, tmp_path: Path, branched: Conversation) -> None:
    before = tree_of(store, branched.id)
    path = write(store, tmp_path, "chatpage")
    store.delete_conversation(LOCAL_USER, branched.id)
    store.purge_deleted(before=2**53)
    import_file(store, LOCAL_USER, path)
    assert tree_of(store, branched.id).nodes == before.nodes


def test_markdown_is_the_shown_path_for_people(store: Store, conversation: Conversation) -> None:
    question = add(store, conversation, None, "What is `x`?")
    add(store, conversation, question, assistant("other"))
    add(store, conversation, question, assistant("A *letter*.\n", status=NodeStatus.ABORTED))
    stream = io.StringIO()
    export_conversations(store, LOCAL_USER, stream, format="markdown", conversation_ids=[conversation.id])
    assert stream.getvalue() == "# Trees\n\n## User\n\nWhat is `x`?\n\n## Assistant (aborted)\n\nA *letter*.\n"


def test_what_cannot_be_exported_says_why(store: Store) -> None:
    stream = io.StringIO()
    with pytest.raises(InvalidRequestError, match="'pdf' is no format"):
        export_conversations(store, LOCAL_USER, stream, format="pdf")
    with pytest.raises(InvalidRequestError, match="holds one conversation, not 0"):
        export_conversations(store, LOCAL_USER, stream, format="sillytavern")
    with pytest.raises(NotFoundError, match="There is no conversation gone"):
        export_conversations(store, LOCAL_USER, stream, conversation_ids=[ConversationId("gone")])


@pytest.mark.parametrize("format", EXPORT_FORMATS)
def test_an_empty_conversation_can_be_exported(store: Store, conversation: Conversation, format: str) -> None:
    stream = io.StringIO()
    export_conversations(store, LOCAL_USER, stream, format=format)
    assert stream.getvalue()


def test_another_users_conversation_is_not_exported(store: Store, conversation: Conversation) -> None:
    bob = store.create_user("bob").id
    stream = io.StringIO()
    assert export_conversations(store, bob, stream).num_written == 0
    with pytest.raises(NotFoundError):
        export_conversations(store, bob, stream, conversation_ids=[conversation.id])
