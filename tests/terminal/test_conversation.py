"""The tree in the terminal: the server's, with numbers that stay, siblings that gather, and one active path."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatpage.errors import NotFoundError
from chatpage.terminal.conversation import Conversation
from tests.terminal.trees import Tree


def test_the_active_path_runs_from_the_start_to_the_tip() -> None:
    tree = Tree()
    nodes = tree.line("a", "b", "c")
    assert tree.conversation.active_path == tuple(nodes)
    assert tree.conversation.path(None) == ()


def test_a_message_beside_another_keeps_both_and_is_the_one_that_is_shown() -> None:
    tree = Tree()
    question, first = tree.line("q", "one")
    second = tree.add(question, "assistant", "two")
    assert tree.conversation.siblings(first.id) == (first, second)
    assert tree.conversation.is_chosen(second.id)
    assert not tree.conversation.is_chosen(first.id)


def test_going_to_a_message_leads_to_the_end_of_the_branch_that_was_shown_there() -> None:
    tree = Tree()
    question, first = tree.line("q", "one")
    second = tree.add(question, "assistant", "two")
    below = tree.line("more", "answer", parent=second)
    tree.show(first)
    assert tree.conversation.latest_leaf(second.id) == below[-1].id
    assert tree.conversation.latest_leaf(question.id) == first.id
    tree.show(second)
    assert tree.conversation.latest_leaf(None) == below[-1].id


def test_numbers_stay_when_the_tree_is_read_again_whatever_the_order() -> None:
    tree = Tree()
    nodes = tree.line("a", "b", "c", "d")
    tree.send(list(reversed(tree.nodes)))
    assert tree.conversation.nodes == tuple(nodes)
    tree.send(tree.nodes[:2])  # the others were deleted by somebody else
    assert tree.conversation.nodes == tuple(nodes[:2])
    assert tree.conversation.tip == nodes[1].id
    later = tree.add(nodes[1], "user", "e")
    assert later.id == 5


def test_leaves_are_the_ends_of_all_branches() -> None:
    tree = Tree()
    question, first = tree.line("q", "one")
    second = tree.add(question, "assistant", "two")
    other_start = tree.add(None, "user", "elsewhere")
    assert tree.conversation.leaves == (first, second, other_start)


def test_an_unknown_node_is_refused_with_the_numbers_there_are() -> None:
    with pytest.raises(NotFoundError, match="no messages yet"):
        Conversation().node(1)
    tree = Tree()
    tree.line("a", "b")
    with pytest.raises(NotFoundError, match="#1 to #2"):
        tree.conversation.node(3)


@pytest.mark.parametrize(
    ("reason", "is_partial"), [("stop", False), (None, False), ("abort", True), ("length", True), ("error", True)]
)
def test_a_reply_that_did_not_end_by_itself_is_partial(reason: str | None, is_partial: bool) -> None:
    assert Tree().add(None, "assistant", "x", finish_reason=reason).is_partial is is_partial


@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=40))
def test_every_node_is_on_exactly_one_path_from_the_start(choices: list[int]) -> None:
    tree = Tree()
    for choice in choices:
        parents = [None, *tree.conversation.nodes]
        tree.add(parents[choice % len(parents)], "user", "x")
    conversation = tree.conversation
    seen = {node.id for leaf in conversation.leaves for node in conversation.path(leaf.id)}
    assert seen == {node.id for node in conversation.nodes}
    assert sum(len(conversation.children(p)) for p in (None, *(n.id for n in conversation.nodes))) == len(conversation)
    for node in conversation.nodes:
        path = conversation.path(node.id)
        assert path[0].parent_id is None
        assert all(below.parent_id == above.id for above, below in pairwise(path))
