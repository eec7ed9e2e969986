"""Ctrl-C as a flag."""

import os
import signal

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
