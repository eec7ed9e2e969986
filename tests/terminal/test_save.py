"""Saved conversations."""

import json
from pathlib import Path

import pytest

from chatpage.errors import InvalidRequestError
from chatpage.terminal.conversation import Conversation
from chatpage.terminal.save import read_path, save
from tests.terminal.trees import Tree


@pytest.fixture
def conversation() -> Conversation:
    tree = Tree()
    question = tree.add(None, "user", "Grüße\n")
    tree.add(question, "assistant", "not chosen", num_tokens=2, finish_reason="stop")
    tree.add(question, "assistant", "chosen", num_tokens=1, finish_reason="length")
    return tree.conversation


def test_json_holds_the_whole_tree(conversation: Conversation, tmp_path: Path) -> None:
    save(conversation, "tiny", tmp_path / "chat.json", may_replace=False)
    saved = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    assert (saved["model"], saved["tip"]) == ("tiny", 3)
    assert [(n["id"], n["parent_id"], n["role"], n["text"], n["num_tokens"]) for n in saved["nodes"]] == [
        (1, None, "user", "Grüße\n", 0),
        (2, 1, "assistant", "not chosen", 2),
        (3, 1, "assistant", "chosen", 1),
    ]


def test_markdown_holds_the_active_path(conversation: Conversation, tmp_path: Path) -> None:
    save(conversation, "tiny", tmp_path / "chat.md", may_replace=False)
    assert (tmp_path / "chat.md").read_text(
        encoding="utf-8"
    ) == "# Chat with tiny\n\n## You\n\nGrüße\n\n## Assistant\n\nchosen\n"


def test_a_file_that_is_not_ours_stays(conversation: Conversation, tmp_path: Path) -> None:
    (tmp_path / "chat.md").write_text("precious", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match="exists"):
        save(conversation, "tiny", tmp_path / "chat.md", may_replace=False)
    assert (tmp_path / "chat.md").read_text(encoding="utf-8") == "precious"
    save(conversation, "tiny", tmp_path / "chat.md", may_replace=True)
    assert "chosen" in (tmp_path / "chat.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["chat", "chat.txt", "no/such/folder/chat.md", "a" * 300 + ".md", "a\0.md"])
def test_what_cannot_be_written_is_an_error_and_leaves_nothing(conversation: Conversation, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"must end in|Cannot write|null character"):
        save(conversation, "tiny", tmp_path / name, may_replace=False)
    assert list(tmp_path.iterdir()) == []


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="Cannot find ~nosuchuser/x"):
        read_path("~nosuchuser/x.json")
    assert read_path("~/x.json").is_absolute()
