"""The terminal chat on a server: the same chat, the conversation on the other side."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from chatpage import cli
from chatpage.client import Client
from chatpage.errors import InvalidRequestError, NotFoundError
from chatpage.sampling_params import SamplingParams
from chatpage.store import LOCAL_USER
from chatpage.terminal.chat import Chat, last_conversation
from tests.server.serving import Served, serving

PARAMS = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True, seed=3)


def _talk(
    served: Served, monkeypatch: pytest.MonkeyPatch, *lines: str, conversation_id: str | None = None, url: str | None = None
) -> tuple[Chat, str]:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode()), encoding="utf-8"))
    shown = io.StringIO()
    with Client(url or served.url, patience_s=0.5) as client:
        console = Console(file=shown, width=100, highlight=False)
        chat = Chat(client, console, params=PARAMS, model_name="tiny", conversation_id=conversation_id)
        chat.run()
    return chat, shown.getvalue()


def test_every_command_works_on_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        lines = ("hello", "/samples 3", "/regenerate", "2", "/continue", "/fork #2 at 3", "/edit #1 hi", "/system be kind")
        chat, shown = _talk(served, monkeypatch, *lines, "/kv", "/stats", "/tree", f"/save {tmp_path}/a.md")
        assert "went wrong" not in shown
        assert "Goes on from sample 2" in shown
        assert "without sharing" in shown
        store = served.desk.store
        tree = store.get_tree(LOCAL_USER, chat.conversation_id).tree  # type: ignore[arg-type]
        assert len(tree.nodes) == len(chat.conversation) == 2 + 3 + 3 + 3 + 4 + 1


def test_a_chat_goes_on_where_another_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        with Client(served.url) as client, pytest.raises(NotFoundError, match="no conversation to go on with"):
            last_conversation(client)
        left, _ = _talk(served, monkeypatch, "hello")
        with Client(served.url) as client:
            client.create_conversation(title="newer")
            assert last_conversation(client) != left.conversation_id
        chat, shown = _talk(served, monkeypatch, "more", conversation_id=left.conversation_id)
        assert "#1 user  hello" in shown
        assert len(chat.conversation) == 4


def test_a_server_that_goes_away_ends_no_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as served:
        shown = io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b""), encoding="utf-8"))
        client = Client(served.url, patience_s=0.2)
        chat = Chat(client, Console(file=shown, width=100), params=PARAMS, model_name="tiny")
        chat.obey("hello")
    with client:
        chat.obey("more")
        chat.obey("/stats")
    assert shown.getvalue().count("cannot be reached") == 1
    assert len(chat.conversation) == 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--url", "localhost:8642"], "is no address of a server"),
        (["--url", "http://x", "--data", "/tmp"], "leave out --data"),
        (["--key", "cp-x"], "A key is for a server"),
    ],
)
def test_flags_that_do_not_fit_are_refused(arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chatpage", "chat", *arguments])
    with pytest.raises(InvalidRequestError, match=problem):
        cli.app(standalone_mode=False)
