"""Ctrl-C as a flag."""

import contextlib
import os
import signal
import sys
import termios

import pytest

from chatpage.terminal.interrupt import InterruptFlag


def test_ctrl_c_sets_the_flag_and_raises_nothing() -> None:
    with InterruptFlag() as interrupt:
        assert not interrupt.is_set
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.is_set


def test_outside_the_block_ctrl_c_raises_again() -> None:
    with InterruptFlag():
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def _echoes_controls(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHOCTL)


def test_the_terminal_shows_no_control_keys_meanwhile_and_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    main, child = os.openpty()
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())  # as if it were the terminal of this process
    with open(child) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(child)
        with contextlib.suppress(ZeroDivisionError), InterruptFlag():
            with InterruptFlag():
                assert not _echoes_controls(child)
            assert not _echoes_controls(child)
            raise ZeroDivisionError
        assert _echoes_controls(child)
        assert termios.tcgetattr(child) == before
        monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
        with InterruptFlag():
            assert _echoes_controls(child), "a job in the background must not touch the terminal: it would be halted"
    os.close(main)
