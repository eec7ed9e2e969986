"""Ctrl-C while the engine works.

Invariant: inside the `with` block a SIGINT never raises, so a step of the engine is never left halfway; it sets a flag that
is looked at between two steps.
"""

import signal
from types import FrameType, TracebackType
from typing import Self


class InterruptFlag:
    """Collects Ctrl-C as a flag while it is active; the handler before it returns afterwards."""

    def __init__(self) -> None:
        self.is_set = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self.is_set = True
