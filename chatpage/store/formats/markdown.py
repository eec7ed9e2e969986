"""Markdown, for people: the shown path of a conversation. It is written, never read."""

from chatpage.store.records import ConversationTree, NodeStatus

NAME = "markdown"


def write(opened: ConversationTree) -> str:
    """Return the conversation as a document."""
    parts = [f"# {opened.conversation.title or 'Conversation'}"]
    for node in opened.tree.active_path():
        end = "" if node.status is NodeStatus.COMPLETE else f" ({node.status})"
        parts += [f"## {str(node.role).capitalize()}{end}", node.text.strip()]
    return "\n\n".join(parts) + "\n"
