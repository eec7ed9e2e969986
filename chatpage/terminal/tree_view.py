"""Draws a conversation as a tree: every branch, which path is active, and where the next message goes."""

from rich.text import Text
from rich.tree import Tree

from chatpage.terminal.conversation import Conversation, Node, NodeId
from chatpage.terminal.text import clean, count

_EXCERPT = 60
_ROLE_STYLE = {"system": "magenta", "user": "green", "assistant": "cyan", "tool": "blue"}


def render_tree(conversation: Conversation) -> Tree:
    """Render the whole tree. A message without siblings stays in the column of the one before it, so long chats stay narrow."""
    active = {node.id for node in conversation.active_path}
    top = Tree(Text("conversation", "bold" if conversation.tip is None else ""), guide_style="dim")
    pending: list[tuple[Tree, NodeId | None]] = [(top, None)]  # children of the node go into this part of the picture
    while pending:
        part, parent_id = pending.pop()
        children = conversation.children(parent_id)
        for child in children:
            below = part.add(_label(conversation, child, is_active=child.id in active))
            continues_column = len(children) == 1 and len(conversation.children(child.id)) == 1
            pending.append((part if continues_column else below, child.id))
    return top


def _label(conversation: Conversation, node: Node, *, is_active: bool) -> Text:
    excerpt = " ".join(clean(node.text).split())
    if len(excerpt) > _EXCERPT:
        excerpt = excerpt[: _EXCERPT - 1] + "…"
    label = Text.assemble(
        (f"#{node.id} ", "bold" if is_active else "dim"),
        (f"{node.role} ", _ROLE_STYLE[node.role] if is_active else "dim"),
        (excerpt, "" if is_active else "dim"),
    )
    if node.num_tokens:
        label.append(f"  {count(node.num_tokens, 'token')}", "dim")
    if node.is_partial:
        label.append("  stopped" if node.finish_reason == "abort" else f"  {node.finish_reason}", "yellow dim")
    if node.id == conversation.tip:
        label.append("  ◀ here", "bold yellow")
    return label
