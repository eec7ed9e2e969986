"""The pure tree: whatever the links look like, nothing is lost and nothing loops."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatpage.errors import NotFoundError
from chatpage.store.records import NodeId
from chatpage.store.tree import Link, Tree, build_tree


def link(node_id: str, parent_id: str | None, created_at: int = 0) -> Link:
    return Link(NodeId(node_id), None if parent_id is None else NodeId(parent_id), created_at)


def build(links: list[Link], deleted: str = "", **choices: str) -> Tree[Link]:
    chosen = {None if parent == "root" else NodeId(parent): NodeId(child) for parent, child in choices.items()}
    return build_tree(links, chosen, frozenset(NodeId(node_id) for node_id in deleted))


BRANCHES = [link("a", None, 1), link("b", "a", 2), link("c", "a", 3), link("d", "b", 4), link("e", "c", 5)]


@st.composite
def any_links(draw: st.DrawFn) -> list[Link]:
    """Links among twelve ids, to themselves, in circles and to nowhere as chance has it."""
    ids = [NodeId(f"n{number}") for number in range(draw(st.integers(0, 12)))]
    parents = st.sampled_from([None, NodeId("gone"), *ids])
    return [Link(node_id, draw(parents), draw(st.integers(0, 3))) for node_id in ids]


def test_paths_siblings_and_leaves_of_a_tree_with_two_branches() -> None:
    tree = build(BRANCHES)
    assert tree.path(NodeId("d")) == ("a", "b", "d")
    assert tree.siblings(NodeId("b")) == ("b", "c")
    assert tree.leaves() == ("d", "e")
    assert tree.subtree(NodeId("b")) == ("b", "d")


def test_without_a_choice_the_newest_child_is_shown() -> None:
    assert build(BRANCHES).active_leaf() == "e"


def test_a_choice_is_followed_and_the_rest_of_the_path_below_it() -> None:
    assert [node.id for node in build(BRANCHES, a="b").active_path()] == ["a", "b", "d"]


@pytest.mark.parametrize("choice", ["gone", "a", "e", "d"])
def test_a_choice_that_is_no_child_is_passed_over(choice: str) -> None:
    assert build(BRANCHES, a=choice).active_leaf() == "e"


def test_siblings_of_the_same_moment_are_ordered_by_id() -> None:
    tree = build([link("z", None), link("y", None), link("x", None)])
    assert tree.children[None] == ("x", "y", "z")


def test_an_orphan_becomes_a_root() -> None:
    """A message whose parent was lost once made the whole conversation unreadable elsewhere; here it only loses its place."""
    tree = build([link("a", None, 1), link("b", "gone", 2)])
    assert tree.children[None] == ("a", "b")


def test_a_cycle_is_cut_at_its_oldest_link() -> None:
    tree = build([link("a", "c", 1), link("b", "a", 2), link("c", "b", 3), link("d", "c", 4)])
    assert tree.path(NodeId("d")) == ("a", "b", "c", "d")


def test_a_node_that_is_its_own_parent_is_a_root() -> None:
    assert build([link("a", "a")]).path(NodeId("a")) == ("a",)


def test_a_deleted_node_hides_all_below_it_and_leaves_its_siblings() -> None:
    tree = build(BRANCHES, deleted="b", a="b")
    assert tree.hidden == {"b", "d"}
    assert tree.active_leaf() == "e"
    with pytest.raises(NotFoundError, match="has no message d"):
        tree.path(NodeId("d"))


def test_a_hundred_thousand_messages_in_a_row_do_not_recurse() -> None:
    links = [link(f"n{number}", f"n{number - 1}" if number else None, number) for number in range(100_000)]
    tree = build_tree(links)
    assert tree.active_leaf() == "n99999"
    assert len(tree.path(NodeId("n99999"))) == len(tree.subtree(NodeId("n0"))) == 100_000


@given(any_links(), st.randoms(use_true_random=False))
def test_rows_in_any_order_build_the_same_tree(links: list[Link], chance: random.Random) -> None:
    """A page once trusted the order of its rows, and a reply that came before its question was attached to nothing."""
    shuffled = list(links)
    chance.shuffle(shuffled)
    tree, other = build_tree(links), build_tree(shuffled)
    assert (tree.parents, tree.children, tree.active_leaf()) == (other.parents, other.children, other.active_leaf())


@given(any_links())
def test_every_link_is_reached_from_a_root_exactly_once(links: list[Link]) -> None:
    tree = build_tree(links)
    assert sorted(node.id for node in tree.in_order()) == sorted(node.id for node in links)


@given(any_links())
def test_going_through_all_leaves_misses_no_node(links: list[Link]) -> None:
    tree = build_tree(links)
    assert {node_id for leaf in tree.leaves() for node_id in tree.path(leaf)} == {node.id for node in links}


@given(any_links(), st.sets(st.integers(0, 11)))
def test_what_is_not_visible_is_hidden_and_never_both(links: list[Link], deleted: set[int]) -> None:
    tree = build_tree(links, {}, frozenset(NodeId(f"n{number}") for number in deleted))
    assert tree.nodes.keys() | tree.hidden == {node.id for node in links}
    assert not tree.nodes.keys() & tree.hidden
    for node_id in tree.nodes:
        assert not any(f"n{number}" in tree.path(node_id) for number in deleted)
