"""A conversation as a tree of messages, in memory.

Owns the nodes, which sibling is chosen under each of them, and where the next message goes. Invariants: a node never changes
once it was added, nothing is ever removed, and the tip is a node of the tree or its empty start.

    #1 system ── #2 user ──┬── #3 assistant ── #5 user ── #6 assistant     <- tip
                           └── #4 assistant (a sample that was not chosen)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NewType

from chatpage.errors import NotFoundError

NodeId = NewType("NodeId", int)
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Node:
    """One message.

    Args:
        token_ids: The generated ids of a reply, its end token included; None for a text that a person wrote.
        finish_reason: Why a reply ended ("stop", "length", "abort", "error"); empty for a text that a person wrote.
    """

    id: NodeId
    parent_id: NodeId | None
    role: Role
    text: str
    token_ids: tuple[int, ...] | None = None
    finish_reason: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether the reply stopped before the model ended it, so that it can be continued."""
        return self.finish_reason in ("abort", "length", "error")


class Conversation:
    """A tree of nodes with one active path, which ends at the tip."""

    def __init__(self) -> None:
        self._nodes: dict[NodeId, Node] = {}
        self._children: dict[NodeId | None, list[NodeId]] = {None: []}
        self._chosen: dict[NodeId | None, NodeId] = {}
        self.tip: NodeId | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Every node, oldest first: a parent comes before its children."""
        return tuple(self._nodes.values())

    @property
    def leaves(self) -> tuple[Node, ...]:
        return tuple(node for node in self._nodes.values() if not self._children[node.id])

    def node(self, node_id: int) -> Node:
        """Return a node.

        Raises:
            NotFoundError: There is no such node.
        """
        node = self._nodes.get(NodeId(node_id))
        if node is None:
            known = f"nodes are #1 to #{len(self._nodes)}, see /tree" if self._nodes else "there are no messages yet"
            raise NotFoundError(f"There is no node #{node_id}; {known}.")
        return node

    def children(self, node_id: NodeId | None) -> tuple[Node, ...]:
        return tuple(self._nodes[child] for child in self._children[node_id])

    def siblings(self, node_id: NodeId) -> tuple[Node, ...]:
        """All children of a node's parent, itself included, oldest first."""
        return self.children(self.node(node_id).parent_id)

    def path(self, node_id: NodeId | None) -> tuple[Node, ...]:
        """The messages from the start of the conversation to a node, itself included; empty for the start."""
        path: list[Node] = []
        while node_id is not None:
            path.append(self.node(node_id))
            node_id = path[-1].parent_id
        return tuple(reversed(path))

    @property
    def active_path(self) -> tuple[Node, ...]:
        return self.path(self.tip)

    def latest_leaf(self, node_id: NodeId | None) -> NodeId | None:
        """Follow the chosen children of a node to the end of its branch."""
        while node_id in self._chosen:
            node_id = self._chosen[node_id]
        return node_id

    def add(
        self,
        parent_id: NodeId | None,
        role: Role,
        text: str,
        *,
        token_ids: Sequence[int] | None = None,
        finish_reason: str = "",
    ) -> Node:
        """Hang a new message under a node; the first child of a node becomes its chosen one."""
        if parent_id is not None:
            self.node(parent_id)
        ids = None if token_ids is None else tuple(token_ids)
        node = Node(NodeId(len(self._nodes) + 1), parent_id, role, text, ids, finish_reason)
        self._nodes[node.id] = node
        self._children[node.id] = []
        self._children[parent_id].append(node.id)
        self._chosen.setdefault(parent_id, node.id)
        return node

    def go(self, node_id: NodeId | None) -> None:
        """Move the tip to a node, and choose every node on the way to it."""
        for node in self.path(node_id):
            self._chosen[node.parent_id] = node.id
        self.tip = node_id

    def is_chosen(self, node_id: NodeId) -> bool:
        return self._chosen.get(self.node(node_id).parent_id) == node_id
