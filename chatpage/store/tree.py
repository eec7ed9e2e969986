"""Pure tree logic: from links in any order, broken ones included, to paths, siblings and leaves.

Invariant: every link given is either in the tree, reachable from a root, or hidden below a deleted one; none is lost, whatever
the links look like. A link whose parent is missing becomes a root. A cycle is cut at its oldest link, which becomes a root:

    stored parents    a <- b <- c <- a (cycle), d -> gone (orphan)
    tree              a            d
                      +- b
                         +- c

Siblings stand in the order of (created_at, id). Nothing here recurses: a conversation may be 100,000 nodes deep.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from chatpage.errors import NotFoundError
from chatpage.store.records import NodeId


class Linked(Protocol):
    """What the tree needs to know of a node."""

    @property
    def id(self) -> NodeId: ...
    @property
    def parent_id(self) -> NodeId | None: ...
    @property
    def created_at(self) -> int: ...


class Link(NamedTuple):
    """The least a tree can be built from."""

    id: NodeId
    parent_id: NodeId | None
    created_at: int


N = TypeVar("N", bound=Linked)


@dataclass(frozen=True, slots=True)
class Tree(Generic[N]):
    """The visible nodes of a conversation, joined. Built by `build_tree`."""

    nodes: Mapping[NodeId, N]
    parents: Mapping[NodeId, NodeId | None]  # of all links, hidden ones too; the parent that counts
    children: Mapping[NodeId | None, tuple[NodeId, ...]]  # visible, oldest first; None: the roots; no entry: no child
    choices: Mapping[NodeId | None, NodeId]
    hidden: frozenset[NodeId]

    def siblings(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Return the node and those beside it, oldest first."""
        self._check(node_id)
        return self.children[self.parents[node_id]]

    def chosen(self, parent_id: NodeId | None) -> NodeId | None:
        """Return the child shown below `parent_id` (None: the root level): the chosen one, else the newest, else None."""
        children = self.children.get(parent_id)
        if not children:
            return None
        choice = self.choices.get(parent_id)
        is_child = choice is not None and choice in self.nodes and self.parents[choice] == parent_id
        return choice if is_child else children[-1]

    def path(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Return the ids from the root to the node, both included."""
        self._check(node_id)
        upwards: list[NodeId] = []
        step: NodeId | None = node_id
        while step is not None:
            upwards.append(step)
            step = self.parents[step]
        return tuple(reversed(upwards))

    def leaf_below(self, node_id: NodeId) -> NodeId:
        """Return the leaf one arrives at from the node by following what is shown."""
        self._check(node_id)
        while (child := self.chosen(node_id)) is not None:
            node_id = child
        return node_id

    def active_leaf(self) -> NodeId | None:
        """Return the leaf that is shown; None if the conversation is empty."""
        root = self.chosen(None)
        return None if root is None else self.leaf_below(root)

    def active_path(self) -> tuple[N, ...]:
        """Return the nodes that are shown, root first."""
        leaf = self.active_leaf()
        return () if leaf is None else tuple(self.nodes[node_id] for node_id in self.path(leaf))

    def subtree(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Return the node and everything visible below it, each parent before its children."""
        self._check(node_id)
        return tuple(_walk(self.children, (node_id,)))

    def leaves(self) -> tuple[NodeId, ...]:
        """Return every node without children, so that a walk over them misses no branch."""
        return tuple(node_id for node_id in _walk(self.children, self.children.get(None, ())) if node_id not in self.children)

    def in_order(self) -> tuple[N, ...]:
        """Return every visible node, each parent before its children and siblings oldest first."""
        return tuple(self.nodes[node_id] for node_id in _walk(self.children, self.children.get(None, ())))

    def _check(self, node_id: NodeId) -> None:
        if node_id not in self.nodes:
            raise NotFoundError(f"The conversation has no message {node_id}; it may have been deleted.")


def build_tree(
    links: Iterable[N], choices: Mapping[NodeId | None, NodeId] | None = None, deleted: frozenset[NodeId] = frozenset()
) -> Tree[N]:
    """Join links, in any order, into a tree.

    Args:
        links: The nodes of one conversation; of two with the same id the last counts.
        choices: Parent (None: the root level) to the child shown there; a choice that fits no visible child is passed over.
        deleted: Nodes that are hidden with all that is below them.
    """
    by_id = {link.id: link for link in links}
    parents = resolve_parents(by_id)
    everything: dict[NodeId | None, list[NodeId]] = {}
    for node_id in sorted(by_id, key=lambda node_id: (by_id[node_id].created_at, node_id)):
        everything.setdefault(parents[node_id], []).append(node_id)
    seen = everything
    if deleted:
        seen = {parent: kept for parent, ids in everything.items() if (kept := [i for i in ids if i not in deleted])}
    visible = {node_id: by_id[node_id] for node_id in _walk(seen, seen.get(None, ()))}
    return Tree(
        nodes=visible,
        parents=parents,
        children={parent: tuple(ids) for parent, ids in seen.items() if parent is None or parent in visible},
        choices=dict(choices or {}),
        hidden=frozenset(by_id.keys() - visible.keys()),
    )


def resolve_parents(links: Mapping[NodeId, N]) -> dict[NodeId, NodeId | None]:
    """Return the parent that counts for every link: None for roots, orphans, and the oldest link of each cycle."""
    parents: dict[NodeId, NodeId | None] = {
        node_id: link.parent_id if link.parent_id in links else None for node_id, link in links.items()
    }
    settled: set[NodeId] = set()
    for start in links:
        trail: dict[NodeId, None] = {}
        step: NodeId | None = start
        while step is not None and step not in settled and step not in trail:
            trail[step] = None
            step = parents[step]
        if step is not None and step in trail:
            walked = list(trail)
            cycle = walked[walked.index(step) :]
            parents[min(cycle, key=lambda node_id: (links[node_id].created_at, node_id))] = None
        settled.update(trail)
    return parents


def _walk(children: Mapping[NodeId | None, Iterable[NodeId]], starts: Iterable[NodeId]) -> Iterable[NodeId]:
    """Yield the starts and all below them, depth first, siblings in their order."""
    stack = list(starts)[::-1]
    while stack:
        node_id = stack.pop()
        yield node_id
        stack.extend(list(children.get(node_id, ()))[::-1])
