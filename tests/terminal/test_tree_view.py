"""The picture of a conversation."""

import io

from rich.console import Console

from chatpage.server.views import NodeView
from chatpage.store import NodeStatus, Role
from chatpage.terminal.conversation import Conversation
from chatpage.terminal.tree_view import render_tree
from tests.terminal.trees import Tree


def _draw(conversation: Conversation) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(render_tree(conversation))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_straight_chat_stays_in_one_column_and_branches_are_indented() -> None:
    tree = Tree()
    first = tree.add(None, "user", "one")
    second = tree.add(first, "assistant", "two", num_tokens=2, finish_reason="stop")
    third = tree.add(second, "user", "three")
    tree.add(third, "assistant", "four", num_tokens=1, finish_reason="abort")
    tree.add(third, "assistant", "five", num_tokens=1, finish_reason="length")
    assert _draw(tree.conversation) == [
        "conversation",
        "├── #1 user one",
        "├── #2 assistant two  2 tokens",
        "└── #3 user three",
        "    ├── #4 assistant four  1 token  stopped",
        "    └── #5 assistant five  1 token  length  ◀ here",
    ]


def test_a_conversation_of_thousands_of_messages_is_drawn() -> None:
    """Indenting every message would leave no room for text, and drawing by recursion would end at a depth of a thousand."""
    nodes = [
        NodeView(
            id=f"n{i}",
            parent_id=f"n{i - 1}" if i else None,
            role=Role.USER,
            text=f"message {i}",
            status=NodeStatus.COMPLETE,
            created_at=i,
            num_tokens=0,
        )
        for i in range(3000)
    ]
    tree = Tree()
    tree.send(nodes)
    lines = _draw(tree.conversation)
    assert len(lines) == 3001
    assert "message 2999" in lines[-1]


def test_long_and_hostile_texts_become_one_short_line() -> None:
    tree = Tree()
    tree.add(None, "user", "\x1b[31m[bold]" + "word " * 100 + "\nnext")
    (line,) = _draw(tree.conversation)[1:]
    assert len(line) < 90
    assert "…" in line
    assert "[31m[bold]word" in line
    assert "\x1b" not in line
