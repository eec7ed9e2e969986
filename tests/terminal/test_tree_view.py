"""The picture of a conversation."""

import io

from rich.console import Console

from chatpage.terminal.conversation import Conversation
from chatpage.terminal.tree_view import render_tree


def _draw(conversation: Conversation) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(render_tree(conversation))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_straight_chat_stays_in_one_column_and_branches_are_indented() -> None:
    conversation = Conversation()
    first = conversation.add(None, "user", "one")
    second = conversation.add(first.id, "assistant", "two", token_ids=(5, 6), finish_reason="stop")
    third = conversation.add(second.id, "user", "three")
    conversation.add(third.id, "assistant", "four", token_ids=(7,), finish_reason="abort")
    fifth = conversation.add(third.id, "assistant", "five", token_ids=(8,), finish_reason="length")
    conversation.go(fifth.id)
    assert _draw(conversation) == [
        "conversation",
        "├── #1 user one",
        "├── #2 assistant two  2 tokens",
        "└── #3 user three",
        "    ├── #4 assistant four  1 token  stopped",
        "    └── #5 assistant five  1 token  length  ◀ here",
    ]


def test_a_conversation_of_thousands_of_messages_is_drawn() -> None:
    """Indenting every message would leave no room for text, and drawing by recursion would end at a depth of a thousand."""
    conversation = Conversation()
    for i in range(3000):
        conversation.go(conversation.add(conversation.tip, "user", f"message {i}").id)
    lines = _draw(conversation)
    assert len(lines) == 3001
    assert "message 2999" in lines[-1]


def test_long_and_hostile_texts_become_one_short_line() -> None:
    conversation = Conversation()
    conversation.add(None, "user", "\x1b[31m[bold]" + "word " * 100 + "\nnext")
    (line,) = _draw(conversation)[1:]
    assert len(line) < 90
    assert line.endswith("…")
    assert "[31m[bold]word" in line
    assert "\x1b" not in line
