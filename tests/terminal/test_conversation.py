"""The conversation tree: nodes stay, siblings gather, one path is active."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatpage.errors import NotFoundError
from chatpage.terminal.conversation import Conversation, Node


def _talk(conversation: Conversation, *texts: str) -> list[Node]:
    """Add a chain of messages below the tip, user first, and go to its end."""
    nodes: list[Node] = []
    for i, text in enumerate(texts):
        parent = nodes[-1].id if nodes else conversation.tip
        nodes.append(conversation.add(parent, "assistant" if i % 2 else "user", text))
    conversation.go(nodes[-1].id)
    return nodes


def test_the_active_path_runs_from_the_start_to_the_tip() -> None:
    conversation = Conversation()
    nodes = _talk(conversation, "a", "b", "c")
    assert conversation.active_path == tuple(nodes)
    assert conversation.path(None) == ()


def test_adding_beside_a_node_keeps_both_and_moves_nothing() -> None:
    conversation = Conversation()
    question, first = _talk(conversation, "q", "one")
    second = conversation.add(question.id, "assistant", "two")
    assert conversation.siblings(first.id) == (first, second)
    assert conversation.tip == first.id
    assert conversation.is_chosen(first.id)
    assert not conversation.is_chosen(second.id)


def test_going_to_a_node_chooses_its_branch_down_to_the_leaf_seen_last() -> None:
    conversation = Conversation()
    question, first = _talk(conversation, "q", "one")
    second = conversation.add(question.id, "assistant", "two")
    conversation.go(second.id)
    below = _talk(conversation, "more", "answer")
    conversation.go(first.id)
    assert conversation.latest_leaf(second.id) == below[-1].id
    conversation.go(conversation.latest_leaf(second.id))
    assert conversation.active_path == (question, second, *below)
    assert conversation.latest_leaf(question.id) == below[-1].id


def test_leaves_are_the_ends_of_all_branches() -> None:
    conversation = Conversation()
    question, first = _talk(conversation, "q", "one")
    second = conversation.add(question.id, "assistant", "two")
    other_start = conversation.add(None, "user", "elsewhere")
    assert conversation.leaves == (first, second, other_start)


def test_an_unknown_node_is_refused_with_the_numbers_there_are() -> None:
    conversation = Conversation()
    with pytest.raises(NotFoundError, match="no messages yet"):
        conversation.node(1)
    _talk(conversation, "a", "b")
    with pytest.raises(NotFoundError, match="#1 to #2"):
        conversation.add(conversation.node(2).id + 1, "user", "x")  # type: ignore[arg-type]
    assert len(conversation) == 2


@pytest.mark.parametrize(
    ("reason", "is_partial"), [("stop", False), ("", False), ("abort", True), ("length", True), ("error", True)]
)
def test_a_reply_that_did_not_end_by_itself_is_partial(reason: str, is_partial: bool) -> None:
    assert Conversation().add(None, "assistant", "x", finish_reason=reason).is_partial is is_partial


@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=40))
def test_every_node_is_on_exactly_one_path_from_the_start(choices: list[int]) -> None:
    conversation = Conversation()
    for choice in choices:
        parents = [None, *(node.id for node in conversation.nodes)]
        conversation.go(conversation.add(parents[choice % len(parents)], "user", "x").id)
    seen = {node.id for leaf in conversation.leaves for node in conversation.path(leaf.id)}
    assert seen == {node.id for node in conversation.nodes}
    assert sum(len(conversation.children(p)) for p in (None, *(n.id for n in conversation.nodes))) == len(conversation)
    for node in conversation.nodes:
        path = conversation.path(node.id)
        assert path[0].parent_id is None
        assert all(below.parent_id == above.id for above, below in pairwise(path))
