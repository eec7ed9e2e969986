"""Search: what users type is text, and a hit opens the branch that holds it."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatpage.errors import InvalidRequestError
from chatpage.store import LOCAL_USER, Conversation, NewNode, NodeStatus, Role, SearchHit, Store
from tests.store.helpers import add, assistant, shown


def marked(hit: SearchHit) -> list[str]:
    return [hit.snippet[start:end] for start, end in hit.highlights]


def test_a_hit_names_its_conversation_and_marks_the_words(store: Store, conversation: Conversation) -> None:
    node_id = add(store, conversation, None, "The quick brown fox")
    (hit,) = store.search(LOCAL_USER, "fox quick")
    assert (hit.conversation_id, hit.title, hit.node_id, hit.role) == (conversation.id, "Trees", node_id, Role.USER)
    assert marked(hit) == ["quick", "fox"]


def test_the_branch_that_holds_the_hit_can_be_opened(store: Store, conversation: Conversation) -> None:
    """Search led to a conversation and then showed another branch of it, where the words were not to be found."""
    root = add(store, conversation, None, "root")
    hidden = add(store, conversation, root, "the needle")
    leaf = add(store, conversation, hidden, "below")
    add(store, conversation, root, "shown instead")
    (hit,) = store.search(LOCAL_USER, "needle")
    assert (hit.node_id, hit.leaf_id) == (hidden, leaf)
    store.choose_node(LOCAL_USER, hit.conversation_id, hit.leaf_id)
    assert shown(store, conversation.id) == ["root", "the needle", "below"]


def test_the_last_word_may_be_unfinished(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, "elephants")
    assert len(store.search(LOCAL_USER, "eleph")) == 1
    assert store.search(LOCAL_USER, "eleph ") == ()
    assert store.search(LOCAL_USER, "eleph x") == ()


def test_accents_and_case_do_not_matter(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, "Crème Brûlée")
    assert marked(store.search(LOCAL_USER, "creme BRULEE")[0]) == ["Crème", "Brûlée"]


def test_quotes_ask_for_a_phrase(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, "red apple, green pear")
    assert len(store.search(LOCAL_USER, '"green pear"')) == 1
    assert store.search(LOCAL_USER, '"apple pear"') == ()


@pytest.mark.parametrize("query", ["日本", "東京タワー", "สวัสดี"])
def test_scripts_without_spaces_are_found_inside_sentences(store: Store, conversation: Conversation, query: str) -> None:
    add(store, conversation, None, "先週、日本の東京タワーへ行きました。สวัสดีครับ")
    (hit,) = store.search(LOCAL_USER, query)
    assert marked(hit) == [query]
    assert store.search(LOCAL_USER, query + " 大阪") == ()


SYNTAX = [
    '"',
    '""',
    "AND",
    "a OR NOT",
    "NEAR(a b)",
    "text:secret",
    "owner_id:x",
    "a*",
    "^a",
    "-a",
    "(",
    "{a b}:c",
    "\0",
    "'; --",
]


@pytest.mark.parametrize("query", SYNTAX)
def test_query_syntax_is_only_text(store: Store, conversation: Conversation, query: str) -> None:
    add(store, conversation, None, "secret and or not near")
    store.search(LOCAL_USER, query)  # raises nothing


@given(query=st.text(max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
def test_no_query_is_a_syntax_error(store: Store, query: str) -> None:
    assert store.search(LOCAL_USER, query) == ()


def test_operators_are_looked_for_as_words(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, "this and that")
    add(store, conversation, None, "this")
    assert len(store.search(LOCAL_USER, "this AND that")) == 1
    assert store.search(LOCAL_USER, "this NOT that") == ()


def test_only_what_can_be_opened_is_found(store: Store, conversation: Conversation) -> None:
    root = add(store, conversation, None, "needle root")
    branch = add(store, conversation, root, "branch")
    add(store, conversation, branch, "needle below")
    store.delete_node(LOCAL_USER, conversation.id, branch)
    assert [hit.node_id for hit in store.search(LOCAL_USER, "needle")] == [root]
    store.restore_node(LOCAL_USER, conversation.id, branch)
    assert len(store.search(LOCAL_USER, "needle")) == 2


def test_another_users_messages_are_not_found(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, "needle")
    bob = store.create_user("bob").id
    theirs = store.create_conversation(bob)
    store.add_node(bob, theirs.id, None, NewNode(role=Role.USER, text="needle of bob 日本"))
    assert [hit.conversation_id for hit in store.search(LOCAL_USER, "needle")] == [conversation.id]
    assert [hit.conversation_id for hit in store.search(bob, "needle")] == [theirs.id]
    assert store.search(LOCAL_USER, "日本") == ()


def test_a_reply_is_found_when_it_has_ended_and_not_twice(store: Store, conversation: Conversation) -> None:
    reply = add(store, conversation, None, NewNode(role=Role.ASSISTANT, status=NodeStatus.STREAMING))
    store.append_partial(reply, "needle", [1])
    assert store.search(LOCAL_USER, "needle") == ()
    store.finish_node(reply, NodeStatus.ABORTED)
    assert len(store.search(LOCAL_USER, "needle")) == 1
    store.reopen_node(LOCAL_USER, conversation.id, reply)
    assert store.search(LOCAL_USER, "needle") == ()
    store.finish_node(reply, NodeStatus.COMPLETE, text=" thread")
    assert len(store.search(LOCAL_USER, "needle thread")) == 1


def test_hits_come_newest_first_up_to_the_limit_and_from_one_conversation_if_asked(
    store: Store, conversation: Conversation
) -> None:
    other = store.create_conversation(LOCAL_USER)
    ids = [add(store, place, None, f"needle {number}") for number, place in enumerate([conversation, other, conversation])]
    assert [hit.node_id for hit in store.search(LOCAL_USER, "needle", limit=2)] == [ids[2], ids[1]]
    found = store.search(LOCAL_USER, "needle", conversation_id=conversation.id)
    assert [hit.node_id for hit in found] == [ids[2], ids[0]]


def test_a_message_in_two_conversations_is_found_in_both(store: Store, conversation: Conversation) -> None:
    add(store, conversation, None, assistant("needle"))
    fork = store.fork_conversation(LOCAL_USER, conversation.id)
    assert {hit.conversation_id for hit in store.search(LOCAL_USER, "needle")} == {conversation.id, fork.id}


def test_bounds_are_checked(store: Store) -> None:
    with pytest.raises(InvalidRequestError, match="has 1001 characters; at most 1000"):
        store.search(LOCAL_USER, "x" * 1001)
    with pytest.raises(InvalidRequestError, match="limit is 0"):
        store.search(LOCAL_USER, "x", limit=0)
