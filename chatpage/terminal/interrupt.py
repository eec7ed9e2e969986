"""Ctrl-C while the engine works.

Invariants: inside the `with` block a SIGINT never raises, so a step of the engine is never left halfway; it sets a flag that is
looked at between two steps. The terminal does not write "^C" into what is being shown meanwhile, and is as before afterwards.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Self


class InterruptFlag:
    """Collects Ctrl-C as a flag while it is active; the handler before it returns afterwards. Blocks may be nested.

    Args:
        on_signal: Called at each Ctrl-C, between two instructions of whatever runs; must not wait.
    """

    def __init__(self, on_signal: Callable[[], None] = lambda: None) -> None:
        self.is_set = False
        self._call = on_signal

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        self._quiet = _without_echo_of_controls()
        self._quiet.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._quiet.__exit__(None, None, None)
        finally:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self.is_set = True
        self._call()


@contextlib.contextmanager
def _without_echo_of_controls() -> Iterator[None]:
    """Have the terminal on stdin, if it is ours to set, show no "^C" for a while."""
    terminal = _own_terminal()
    if terminal is None:
        yield
        return
    import termios

    def set_echo(is_on: int) -> None:
        with contextlib.suppress(termios.error):  # the terminal was closed meanwhile
            settings = termios.tcgetattr(terminal)
            settings[3] = settings[3] & ~termios.ECHOCTL | is_on
            termios.tcsetattr(terminal, termios.TCSANOW, settings)

    before = termios.tcgetattr(terminal)[3] & termios.ECHOCTL
    set_echo(0)
    try:
        yield
    finally:
        set_echo(before)


def _own_terminal() -> int | None:
    """The descriptor of the terminal on stdin; None where there is none, or where it belongs to another job: a job in the
    background that changes the terminal is halted by it."""
    if os.name != "posix" or sys.stdin is None or sys.stdin.closed:
        return None
    try:
        terminal = sys.stdin.fileno()
        return terminal if os.isatty(terminal) and os.tcgetpgrp(terminal) == os.getpgrp() else None
    except OSError:  # a stdin without a descriptor, or a terminal that is not the one of this session
        return None
