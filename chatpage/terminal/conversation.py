"""A conversation as a person in a terminal sees it: the tree that the server keeps, with short numbers.

Invariants: a message keeps its number as long as the chat goes on; numbers rise with the time of messages, so a parent's is
lower than its children's; the tip is a message of the tree or its empty start.

    #1 system ── #2 user ──┬── #3 assistant ── #5 user ── #6 assistant     <- tip
                           └── #4 assistant (a sample that was not chosen)
"""

from dataclasses import dataclass
from typing import NewType

from chatpage.errors import NotFoundError
from chatpage.server.protocol import ResetOp
from chatpage.server.views import NodeView
from chatpage.store import NodeStatus, Role

NodeId = NewType("NodeId", int)


@dataclass(frozen=True, slots=True)
class Node:
    """One message.

    Args:
        id: Its number here.
        key: Its id on the server.
        num_tokens: Of a reply; 0 for a text that a person wrote.
        finish_reason: Why a reply ended ("stop", "length", "abort", "error"); empty for a text that a person wrote.
    """

    id: NodeId
    parent_id: NodeId | None
    role: Role
    text: str
    key: str
    num_tokens: int = 0
    finish_reason: str = ""

    @property
    def is_partial(self) -> bool:
        """Whether the reply stopped before the model ended it, so that it can be continued."""
        return self.finish_reason in ("abort", "length", "error")


class Conversation:
    """A tree of nodes with one active path, which ends at the tip."""

    def __init__(self) -> None:
        self._numbers: dict[str, NodeId] = {}
        self._nodes: dict[NodeId, Node] = {}
        self._children: dict[NodeId | None, list[NodeId]] = {None: []}
        self._chosen: dict[NodeId | None, NodeId] = {}
        self.tip: NodeId | None = None

    def __len__(self) -> int:
        return len(self._nodes)

    def take(self, tree: ResetOp) -> None:
        """Become what the server has; a tip that is gone moves to the end of the branch that is shown."""
        for view in sorted(tree.nodes, key=lambda view: (view.created_at, view.id)):
            self._numbers.setdefault(view.id, NodeId(len(self._numbers) + 1))
        nodes = sorted(map(self._node, tree.nodes), key=lambda node: node.id)
        self._nodes = {node.id: node for node in nodes}
        self._children = {None: [], **{node.id: [] for node in nodes}}
        for node in nodes:
            self._children[node.parent_id].append(node.id)
        self._chosen = {
            None if choice.parent_id is None else self._numbers[choice.parent_id]: self._numbers[choice.child_id]
            for choice in tree.choices
            if choice.child_id in self._numbers
        }
        if self.tip not in self._nodes:
            self.tip = self.latest_leaf(None)

    def _node(self, view: NodeView) -> Node:
        reason = view.finish_reason or ("error" if view.status is NodeStatus.INTERRUPTED else "")
        parent_id = None if view.parent_id is None else self._numbers[view.parent_id]
        return Node(self._numbers[view.id], parent_id, view.role, view.text, view.id, view.num_tokens, reason)

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
            known = f"nodes are #1 to #{max(self._nodes)}, see /tree" if self._nodes else "there are no messages yet"
            raise NotFoundError(f"There is no node #{node_id}; {known}.")
        return node

    def find(self, key: str) -> Node | None:
        """Return the node with this id on the server, if it is there."""
        return self._nodes.get(self._numbers.get(key, NodeId(0)))

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
        """Follow the shown children of a node to the end of its branch."""
        while (shown := self._shown_child(node_id)) is not None:
            node_id = shown
        return node_id

    def is_chosen(self, node_id: NodeId) -> bool:
        return self._shown_child(self.node(node_id).parent_id) == node_id

    def _shown_child(self, node_id: NodeId | None) -> NodeId | None:
        children = self._children.get(node_id, ())
        chosen = self._chosen.get(node_id)
        return chosen if chosen in children else children[-1] if children else None
