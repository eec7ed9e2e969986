"""Trees as a server would send them, grown message by message."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from chatpage.server.protocol import ResetOp
from chatpage.server.views import ChoiceView, ConversationView, NodeView
from chatpage.store import NodeStatus, Role
from chatpage.terminal.conversation import Conversation, Node

VIEW = ConversationView(id="c", title="", version=1, created_at=0, updated_at=0, is_pinned=False, tags=())


@dataclass
class Tree:
    """A server's tree, and the conversation in the terminal that shows it."""

    conversation: Conversation = field(default_factory=Conversation)
    nodes: list[NodeView] = field(default_factory=list)
    choices: dict[str | None, str] = field(default_factory=dict)

    def add(self, parent: Node | None, role: str, text: str, *, num_tokens: int = 0, finish_reason: str | None = None) -> Node:
        """Add a message and go to it, as a run does."""
        key, parent_key = f"n{len(self.nodes)}", None if parent is None else parent.key
        view = NodeView(
            id=key,
            parent_id=parent_key,
            role=Role(role),
            text=text,
            status=NodeStatus.COMPLETE,
            created_at=len(self.nodes),
            num_tokens=num_tokens,
            finish_reason=finish_reason,
        )
        self.nodes.append(view)
        self.choices[parent_key] = key
        self.send()
        node = self.conversation.find(key)
        assert node is not None
        self.conversation.tip = node.id
        return node

    def line(self, *texts: str, parent: Node | None = None) -> list[Node]:
        """Add messages one below the other, a user's first."""
        nodes: list[Node] = []
        for i, text in enumerate(texts):
            nodes.append(self.add(nodes[-1] if nodes else parent, "assistant" if i % 2 else "user", text))
        return nodes

    def show(self, node: Node) -> None:
        """Choose a message and all above it."""
        for above in self.conversation.path(node.id):
            parent = None if above.parent_id is None else self.conversation.node(above.parent_id).key
            self.choices[parent] = above.key
        self.send()

    def send(self, nodes: Sequence[NodeView] | None = None) -> None:
        """Have the conversation take the tree, or only some of its nodes."""
        choices = tuple(ChoiceView(parent_id=parent, child_id=child) for parent, child in self.choices.items())
        self.conversation.take(ResetOp(conversation=VIEW, nodes=tuple(self.nodes if nodes is None else nodes), choices=choices))
