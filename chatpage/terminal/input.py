"""Reads what a person types or pipes in, one message at a time.

Invariant: what is returned is valid Unicode; bytes that are not UTF-8 raise, and the next call reads on behind them.
"""

import sys
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from chatpage.terminal.streams import check_stdin
from chatpage.terminal.text import check_unicode, clean, decode

_CONTINUED = "\\"


class LineReader:
    """Reads from the terminal with history and editing, or from a pipe.

    A line that ends with a backslash goes on in the next one; pasting several lines into a terminal gives one message.
    """

    def __init__(self, console: Console) -> None:
        check_stdin()
        self._console = console
        self._is_terminal = sys.stdin.isatty()
        self._pipe: BinaryIO | None = None if self._is_terminal else sys.stdin.buffer
        self._has_line_editing = self._is_terminal and _enable_line_editing()
        self._has_color = self._has_line_editing and bool(console.color_system) and not console.no_color

    @property
    def can_prefill(self) -> bool:
        """Whether a person can be given a text to change."""
        return self._has_line_editing

    def read(self, prompt: str, *, prefill: str = "") -> str:
        """Return the next message without its last newline.

        Args:
            prompt: Shown before the cursor.
            prefill: A text to start from, if `can_prefill`.

        Raises:
            EOFError: There is nothing more.
            InvalidRequestError: It is not valid UTF-8.
        """
        if prefill:
            _prefill(prefill)
        try:
            text = self._read_line(prompt)
        finally:
            if prefill:
                _prefill(None)
        while text.endswith(_CONTINUED):
            text = text[:-1]
            try:
                text += "\n" + self._read_line("… ")
            except EOFError:  # ends this message, not the chat
                break
        return text

    def _read_line(self, prompt: str) -> str:
        if self._pipe is None:
            return check_unicode(self._ask(prompt), "The input")
        line = self._pipe.readline()
        if not line:
            raise EOFError
        text = decode(line, "The input").rstrip("\r\n")
        self._console.print(Text.assemble((prompt, "bold green"), clean(text)), soft_wrap=True)
        return text

    def _ask(self, prompt: str) -> str:
        """Ask on the terminal; the prompt goes through `input`, so that line editing knows how wide it is."""
        try:
            return input(_colored(prompt) if self._has_color else prompt)
        except UnicodeDecodeError as error:
            return decode(error.object, "The input")


def _colored(prompt: str) -> str:
    """Bold green; the marks \\x01 and \\x02 tell readline what has no width."""
    return f"\x01\x1b[1;32m\x02{prompt}\x01\x1b[0m\x02"


def _enable_line_editing() -> bool:
    try:
        import readline
    except ImportError:  # Windows has its own line editing
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return True


def _prefill(text: str | None) -> None:
    import readline

    readline.set_startup_hook(None if text is None else lambda: readline.insert_text(text))
