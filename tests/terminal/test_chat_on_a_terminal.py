"""The terminal chat as a person meets it: on a terminal, with colours, columns, and Ctrl-C."""

import pytest

from tests.terminal.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal
from tests.tiny_models import tiny_llama_folder

PROMPT = "› "


def _chat_arguments(*flags: str) -> list[str]:
    model = (
        "--model",
        str(tiny_llama_folder()),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--kv-memory",
        "8MiB",
        "--threads",
        "1",
    )
    return ["-m", "chatpage", "chat", *model, *flags]


@pytest.mark.timeout(240)
def test_ctrl_c_stops_a_reply_keeps_its_text_and_the_chat_goes_on() -> None:
    with PseudoTerminal(_chat_arguments("--max-tokens", "1500")) as terminal:

        def ask(line: str, answer: str, after: int) -> int:
            terminal.send(line)
            return terminal.expect(PROMPT, after=terminal.expect(answer, after=after))

        at = terminal.expect(PROMPT)
        at = ask("/set ignore_eos true\r", "ignore_eos is true", at)
        terminal.send("hello\r")
        at = terminal.expect("hello\r\n", after=at)
        terminal.expect_more(20, after=at)
        streamed = at
        at = ask(CTRL_C, "stopped", at)
        assert "^C" not in terminal.screen[streamed:at], "the key was written into the reply"
        at = ask("/set max_tokens 4\r", "max_tokens is 4.", at)
        at = ask("/continue\r", "4 tokens", at)
        for _ in range(10):  # one that comes just before the prompt reads is taken for the command's
            terminal.send(CTRL_C)
            if terminal.shows("leave with /quit", after=at, within_s=3.0):
                break
        at = terminal.expect(PROMPT, after=terminal.expect("leave with /quit", after=at))
        ask("/tree\r", "◀", at)
        terminal.send(CTRL_D)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.screen


@pytest.mark.timeout(240)
@pytest.mark.parametrize("key", [CTRL_C, CTRL_D])
def test_an_edit_can_be_cancelled(key: str) -> None:
    """Ctrl-C and Ctrl-D in the line of an edit ended the chat, and the tree was gone."""
    with PseudoTerminal(_chat_arguments("--max-tokens", "4")) as terminal:
        at = terminal.expect(PROMPT)
        terminal.send("/set ignore_eos true\r")  # else one reply in hundreds is over before its first word
        at = terminal.expect(PROMPT, after=terminal.expect("ignore_eos is true", after=at))
        terminal.send("hello\r")
        at = terminal.expect(PROMPT, after=terminal.expect("first token", after=at))
        terminal.send("/edit\r")
        at = terminal.expect("hello", after=terminal.expect("edit › ", after=at))
        if key == CTRL_D:
            terminal.send("\x15")  # an empty line is where it means the end
        terminal.send(key)
        at = terminal.expect(PROMPT, after=terminal.expect("cancelled", after=at))
        terminal.send("/tree\r")
        terminal.expect("◀ here", after=at)
        terminal.send("/quit\r")
        assert terminal.wait() == 0


@pytest.mark.timeout(240)
def test_eight_samples_stream_side_by_side_on_a_wide_terminal() -> None:
    with PseudoTerminal(_chat_arguments("--max-tokens", "30", "-n", "8"), columns=200) as terminal:
        terminal.expect(PROMPT)
        terminal.send("hello\r")
        at = terminal.expect("1-8 ")
        headers = [line for line in terminal.screen[:at].splitlines() if line.count("─ ") >= 8 or line.count(" tok") == 8]
        assert len(headers) > 1, "the columns were not drawn while the samples streamed"
        terminal.send("/quit\r")
        assert terminal.wait() == 0


@pytest.mark.timeout(240)
def test_no_color_means_no_color() -> None:
    with PseudoTerminal(_chat_arguments("--max-tokens", "4"), NO_COLOR="1") as terminal:
        terminal.expect(PROMPT)
        terminal.send("hello\r")
        terminal.expect("4 tokens")
        terminal.send("/quit\r")
        assert terminal.wait() == 0
        colors = [f"\x1b[{code}m" for code in (31, 32, 36, "1;32", "1;36")]
        assert not any(color in terminal.screen for color in colors)
