"""Runs a program in a pseudo terminal, as a person would see it."""

import codecs
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
CTRL_C = "\x03"
CTRL_D = "\x04"

# Makes the terminal on stdin the one whose Ctrl-C reaches the program, then becomes the program.
_TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"


def _environment() -> dict[str, str]:
    """Ours, less the size of our own terminal, which would hide the size of the one that is made."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}


class PseudoTerminal:
    """A program on a terminal of a given size; leaving the block ends it."""

    def __init__(self, arguments: Sequence[str], *, columns: int = 100, lines: int = 40, **environment: str) -> None:
        self._main, child = os.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, sys.executable, *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={**_environment(), "PYTHONPATH": paths, "TERM": "xterm-256color", "LANG": "C.UTF-8", **environment},
        )
        os.close(child)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read can end inside a character
        self.screen = ""  # everything that was shown, with its control characters

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    def send(self, text: str) -> None:
        os.write(self._main, text.encode("utf-8", "surrogateescape"))

    def shows(self, text: str, *, after: int = 0, within_s: float) -> bool:
        """Whether `text` is shown behind position `after` in time."""
        deadline = time.monotonic() + within_s
        while self.screen.find(text, after) < 0 and time.monotonic() < deadline:
            if select.select([self._main], [], [], 0.1)[0]:
                self._read()
        return self.screen.find(text, after) >= 0

    def expect(self, text: str, *, after: int = 0, timeout_s: float = 90.0) -> int:
        """Wait until `text` is shown behind position `after`; return the position behind it."""
        deadline = time.monotonic() + timeout_s
        while (found := self.screen.find(text, after)) < 0:
            assert time.monotonic() < deadline, f"{text!r} was not shown in {timeout_s} s; the screen:\n{self.screen[after:]}"
            assert self._read(), f"the program ended before it showed {text!r}; the screen:\n{self.screen[after:]}"
        return found + len(text)

    def expect_more(self, num_characters: int, *, after: int, timeout_s: float = 90.0) -> None:
        """Wait until so many characters are shown behind position `after`."""
        deadline = time.monotonic() + timeout_s
        while len(self.screen) < after + num_characters:
            assert time.monotonic() < deadline, f"only {len(self.screen) - after} characters came in {timeout_s} s"
            assert self._read(), f"the program ended; the screen:\n{self.screen[after:]}"

    def wait(self, timeout_s: float = 60.0) -> int:
        """Read until the program ends; return its exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, f"the program did not end in {timeout_s} s; the screen:\n{self.screen}"
        return self._process.wait(timeout_s)

    def _read(self) -> bool:
        """Take what is there, waiting at most a second; False once the program has closed the terminal."""
        ready, _, _ = select.select([self._main], [], [], 1.0)
        if not ready:
            return True
        try:
            data = os.read(self._main, 65536)
        except OSError:  # how Linux says that the other side is closed
            return False
        self.screen += self._decoder.decode(data)
        return bool(data)
