"""The terminal chat on a tiny model: what a session does to the tree, and that nothing a person types ends it."""

import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chatpage.engine.core import Engine
from chatpage.local import LocalClient
from chatpage.sampling_params import SamplingParams
from chatpage.terminal.chat import Chat, last_conversation
from tests.engine.engines import assert_whole, tiny_engine

PROMPT = "› "


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(check_integrity=False)


@pytest.fixture(scope="module")
def client(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalClient]:
    with LocalClient(data_dir=tmp_path_factory.mktemp("chats"), load=lambda _: engine) as opened:
        yield opened
    assert_whole(engine)


@pytest.fixture
def talk(client: LocalClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a chat from piped lines and gives it and what it printed."""

    def run(
        *lines: str | bytes, width: int = 100, system: str | None = None, go_on: str | None = None, **params: Any
    ) -> tuple[Chat, str]:
        data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        console = Console(file=io.StringIO(), width=width, highlight=False)
        settings = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 3} | params
        sampling = SamplingParams(**settings)
        chat = Chat(client, console, params=sampling, model_name="tiny", system=system, conversation_id=go_on)
        chat.run()
        assert isinstance(console.file, io.StringIO)
        return chat, console.file.getvalue()

    return run


def _roles(chat: Chat) -> list[str]:
    return [node.role for node in chat.conversation.active_path]


def test_a_message_gets_an_answer_and_a_line_of_numbers(talk: Any) -> None:
    chat, shown = talk("hello there", "and more")
    assert _roles(chat) == ["user", "assistant", "user", "assistant"]
    assert "› hello there" in shown
    numbers = [line for line in shown.splitlines() if line.startswith("prompt ")]
    assert len(numbers) == 2
    for part in ("cached", "computed", "shared", "first token", "6 tokens"):
        assert part in numbers[1]


def test_a_next_turn_computes_only_what_is_new(talk: Any) -> None:
    _, shown = talk("what nobody said before", "nor this")
    first, second = (line for line in shown.splitlines() if line.startswith("prompt "))
    tokens, cached, computed = (int(part) for part in re.findall(r"(\d+) (?:tokens|cached|computed)", second)[:3])
    assert tokens == cached + computed
    # All of the first prompt and its reply but the last token, which was sampled and never fed to the model.
    assert cached == int(first.split()[1]) + 6 - 1


def test_regenerating_adds_a_sibling_and_computes_no_prompt(talk: Any) -> None:
    chat, shown = talk("hello", "/set seed null", "/regenerate")
    assert [len(chat.conversation.siblings(node.id)) for node in chat.conversation.active_path] == [1, 2]
    assert chat.conversation.tip == 3
    assert ", 0 computed" in [line for line in shown.splitlines() if line.startswith("prompt ")][-1]


def test_samples_are_siblings_and_a_number_chooses_one(talk: Any) -> None:
    chat, shown = talk("/samples 3", "hello", "3", "go on")
    replies = chat.conversation.children(chat.conversation.nodes[0].id)
    assert len(replies) == 3
    assert len({reply.text for reply in replies}) == 3
    assert chat.conversation.active_path[1] == replies[2]
    assert len(chat.conversation.children(replies[2].id)) == 1
    assert "1-3 › 3" in shown


def test_a_number_that_is_no_sample_is_refused_and_can_be_tried_again(talk: Any) -> None:
    chat, shown = talk("hello", "/regenerate 2", "7", "2")
    assert "There is no sample 7; choose 1 to 2" in shown
    assert chat.conversation.tip == 4


def test_without_samples_a_number_is_a_message(talk: Any) -> None:
    chat, _ = talk("42")
    assert chat.conversation.nodes[0].text == "42"


def test_a_fork_inside_a_reply_keeps_its_first_tokens(talk: Any) -> None:
    chat, _ = talk("hello", "/set seed 4", "/fork at 3")
    original, branch = chat.conversation.children(chat.conversation.nodes[0].id)
    end = chat.token_ends(original)[2]
    assert branch.text[:end] == original.text[:end]
    assert branch.text != original.text
    assert branch.num_tokens == 3 + 6
    assert chat.conversation.tip == branch.id


def test_forking_at_a_message_makes_the_next_one_its_child(talk: Any) -> None:
    chat, _ = talk("one", "two", "/fork 2", "other")
    assert [node.text for node in chat.conversation.children(chat.conversation.node(2).id)] == ["two", "other"]


def test_forking_at_a_question_answers_it_again(talk: Any) -> None:
    chat, _ = talk("one", "two", "/fork #1")
    assert len(chat.conversation.children(chat.conversation.node(1).id)) == 2
    assert _roles(chat) == ["user", "assistant"]


def test_editing_a_message_makes_a_sibling_and_keeps_what_hangs_below_the_original(talk: Any) -> None:
    chat, _ = talk("one", "two", "/edit #1 uno", "/go 1")
    first, edited = chat.conversation.children(None)
    assert (first.text, edited.text) == ("one", "uno")
    assert [node.text for node in chat.conversation.active_path[::2]] == ["one", "two"]


def test_editing_the_last_message_computes_only_from_the_edit(talk: Any) -> None:
    _, shown = talk("the same long beginning, then A", "/edit the same long beginning, then B")
    first, second = (line for line in shown.splitlines() if line.startswith("prompt "))
    assert first.split(":")[0] == second.split(":")[0]
    # The letter and what the template writes behind it: <|im_end|> \n <|im_start|> assistant \n
    assert f"{1 + 2 + 1 + len('assistant') + 1} computed" in second


def test_editing_a_reply_puts_words_into_its_mouth(talk: Any) -> None:
    chat, _ = talk("hello", "/edit #2 I would rather sing", "please do")
    edited = chat.conversation.active_path[1]
    assert (edited.role, edited.text, edited.num_tokens) == ("assistant", "I would rather sing", 0)


def test_continuing_goes_on_where_the_reply_ended(talk: Any) -> None:
    short, _ = talk("hello")
    assert short.conversation.node(2).is_partial
    chat, shown = talk("/continue", go_on=short.conversation_id)
    [reply] = chat.conversation.children(chat.conversation.nodes[0].id)
    assert reply.text.startswith(short.conversation.node(2).text)
    assert reply.num_tokens == 12
    assert "6 tokens" in shown


def test_a_chat_goes_on_with_the_conversation_that_was_left(talk: Any, client: LocalClient) -> None:
    left, _ = talk("hello", "/regenerate", "/go 2")
    assert last_conversation(client) == left.conversation_id
    chat, shown = talk("more", go_on=left.conversation_id)
    assert [node.text for node in chat.conversation.active_path[:2]] == [node.text for node in left.conversation.active_path]
    assert "#1 user  hello" in shown
    tree = client.tree(left.conversation_id)
    assert (tree.conversation.title, len(tree.nodes)) == ("hello", 5)


def test_a_chat_in_which_nothing_was_said_leaves_no_conversation(talk: Any, client: LocalClient) -> None:
    before = len(client.list_conversations())
    talk("/help", "/tree", "/bogus")
    assert len(client.list_conversations()) == before


def test_continuing_equals_answering_at_once(talk: Any) -> None:
    in_parts, _ = talk("hello", "/continue", temperature=0.0)
    at_once, _ = talk("hello", temperature=0.0, max_tokens=12)
    assert in_parts.conversation.node(2).text == at_once.conversation.node(2).text


def test_another_system_prompt_starts_a_branch(talk: Any) -> None:
    chat, shown = talk("hi", "/system be brief", "hi", "/system", system="be kind")
    assert [node.text for node in chat.conversation.children(None)] == ["be kind", "be brief"]
    assert _roles(chat) == ["system", "user", "assistant"]
    assert shown.splitlines()[-1] == "be brief"


def test_the_first_message_can_be_edited_without_a_system_prompt(talk: Any) -> None:
    chat, _ = talk("one", "/edit uno")
    assert [node.text for node in chat.conversation.children(None)] == ["one", "uno"]


def test_stats_kv_tree_and_help_are_shown(talk: Any) -> None:
    _, shown = talk("hello", "/regenerate 2", "/kv", "/stats", "/tree", "/help", "/set")
    for part in ("without sharing", "█ shared", "generated tokens", "├── #2 assistant", "/fork [NODE]", "frequency_penalty"):
        assert part in shown


def test_the_kv_of_branches_counts_what_they_share_once(talk: Any, engine: Engine) -> None:
    _, shown = talk("words of this test alone", "/set seed null", "/regenerate 3", "/kv")
    prompt = int(next(line for line in shown.splitlines() if line.startswith("prompt ")).split()[1])
    held = int(next(line for line in shown.splitlines() if line.startswith("held ")).split()[1])
    # Four replies of which 5 tokens have rows; each may have the partial tail of the prompt once more.
    assert prompt < held <= prompt + 4 * 5 + 3 * (prompt % engine.config.block_size)


def test_a_line_that_ends_with_a_backslash_goes_on(talk: Any) -> None:
    chat, _ = talk("first \\", "second")
    assert chat.conversation.nodes[0].text == "first \nsecond"


def test_two_slashes_send_a_line_with_one(talk: Any) -> None:
    chat, _ = talk("//etc/hosts is what?")
    assert chat.conversation.nodes[0].text == "/etc/hosts is what?"


def test_saved_files_can_be_saved_again_but_others_stay(talk: Any, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("precious", encoding="utf-8")
    talk("hello", f"/save {tmp_path}/a.json", "more", f"/save {tmp_path}/a.json", f"/save {tmp_path}/other.md")
    assert len(json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["nodes"]) == 4
    assert (tmp_path / "other.md").read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/bogus", "no command /bogus"),
        ("/regenerate", "no reply to regenerate"),
        ("/continue", "no reply to continue"),
        ("/fork", "nothing to fork"),
        ("/fork 1 2 3", "Write /fork"),
        ("/fork at", "Write /fork"),
        ("/fork 1 at", "Write /fork"),
        ("/edit x", "no message to edit"),
        ("/edit #9 x", "no message to edit"),
        ("/go", "Write /go NODE"),
        ("/go x", "not a whole number"),
        ("/go 9", "no messages yet"),
        ("/samples 0", "n is 0; it must be between 1 and 64"),
        ("/samples many", "not a whole number"),
        ("/set temperature -1", "must be in [0, 100]"),
        ("/set temperature hot", "must be a finite number"),
        ("/set temperature NaN", "must be a finite number"),
        ("/set nope 1", "no sampling parameter 'nope'"),
        ("/set top_p", "Write /set top_p VALUE"),
        ('/set stop ["a", ""]', "empty string"),
        ("/set stop 5", "stop"),
        ('/set stop {"a": 1}', "stop cannot be"),
        ("/set stop_token_ids {}", "stop_token_ids cannot be"),
        ("/set stop " + "[" * 100_000, "too long or too deep"),
        ("/set seed " + "9" * 5000, "too long or too deep"),
        ("/set ignore_eos 1", "must be true or false"),
        ("/set ignore_eos no", "must be true or false"),
        ("/set temperature=-1", "must be in [0, 100]"),
        ("/go " + "9" * 5000, "too large"),
        ("/samples " + "9" * 5000, "too large"),
        ("/fork " + "9" * 5000, "too large"),
        ("/save ~nosuchuser/x.json", "Cannot find ~nosuchuser/x.json"),
        ("/save " + "a" * 300 + ".json", "File name too long"),
        ("/save a\0.json", "null character"),
        ("/set logit_bias 5", "logit_bias"),
        ('/set logit_bias {"x": 1}', "not a whole number"),
        ("/save", "Write /save FILE"),
        ("/tree all", "takes nothing after it"),
        (b"caf\xe9", "not valid UTF-8: byte 0xe9 at position 3"),
        ("x" * 40_000, "the context of the model holds 2048, the answer included"),
    ],
)
def test_a_mistake_is_one_clear_line_and_the_chat_goes_on(talk: Any, line: str | bytes, problem: str) -> None:
    chat, shown = talk(line, "hello")
    assert problem in shown
    assert _roles(chat) == ["user", "assistant"]
    assert len(chat.conversation) == 2


@pytest.mark.parametrize("line", ["/regenerate " + "9" * 5000, "/fork at " + "9" * 5000, "9" * 5000])
def test_a_number_of_thousands_of_digits_behind_a_reply_is_refused(talk: Any, line: str) -> None:
    """Python reads no number of more than 4,300 digits: the ValueError ended the chat and took the tree with it."""
    chat, shown = talk("/samples 2", "hello", line)
    assert "too large" in shown
    assert len(chat.conversation) == 3


def test_a_fork_takes_the_words_behind_at_as_they_are(talk: Any) -> None:
    """Words were split as a shell does, so that an apostrophe was an open quote."""
    _, shown = talk("hello", "/fork at it's  \"so at", "/fork #2 at 1")
    assert """#2 does not say 'it\\'s  "so at';""" in shown
    assert "Branches off #2 after 1 of its tokens" in shown


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature=0.5", "temperature", 0.5),
        ("/set ignore_eos False", "ignore_eos", False),
        ("/set ignore_eos TRUE", "ignore_eos", True),
        ("/set stop ==", "stop", ("==",)),
        ("/set stop=a=b", "stop", ("a=b",)),
    ],
)
def test_settings_are_read_as_people_write_them(talk: Any, line: str, name: str, value: object) -> None:
    chat, _ = talk(line)
    assert getattr(chat.params, name) == value


def test_a_fault_of_ours_is_one_line_and_the_tree_stays(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("chatpage.terminal.commands.render_tree", fail)
    chat, shown = talk("hello", "/tree", "more")
    assert "Something went wrong: RuntimeError: two lines; the conversation is kept.\n" in shown
    assert _roles(chat) == ["user", "assistant"] * 2


def test_ctrl_c_during_a_command_or_a_prompt_leads_back_to_the_prompt(talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("chatpage.terminal.commands.render_memory", interrupt)
    chat, shown = talk("hello", "/kv", "more")
    assert shown.count("leave with /quit") == 1
    assert len(chat.conversation) == 4
    monkeypatch.setattr("chatpage.terminal.chat.run_answer", interrupt)
    chat, shown = talk("hello", "again")
    assert shown.count("leave with /quit") == 2


def test_the_end_of_input_behind_a_backslash_ends_the_message_alone(talk: Any) -> None:
    chat, _ = talk("hello \\")
    assert chat.conversation.nodes[0].text == "hello "


def test_a_start_without_kernels_says_that_the_next_one_is_faster(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "First start: C++ kernels are being compiled"
    with LocalClient(data_dir=tmp_path, load=lambda _: engine) as client:
        assert client.hint == ""
    monkeypatch.setattr(engine, "model", dataclasses.replace(engine.model, is_interim=True))
    with LocalClient(data_dir=tmp_path, load=lambda _: engine) as client:
        assert client.hint.startswith(hint)


def test_more_samples_than_the_engine_runs_at_once_are_refused_and_nothing_is_added(talk: Any) -> None:
    chat, shown = talk("/samples 64", "hello")
    assert "at most 32 samples per run" in shown
    assert len(chat.conversation) == 0


def test_escape_sequences_in_a_pasted_text_are_not_echoed(talk: Any) -> None:
    _, shown = talk("look \x1b]0;owned\x07 here", "/tree", "/go 1")
    assert "\x1b" not in shown
    assert "\x07" not in shown
