"""Whether loading a block is faster than computing it again.

Rule: loading is taken to be faster until this engine has spent a second with it; from then on its tokens per second are
compared with those of prefill, both as measured here. A disk found too slow is tried again after ten minutes.
"""

import time
from collections.abc import Callable

_MIN_EVIDENCE_S = 1.0
_RETRY_S = 600.0
_PREFILL_TOKENS = 64  # a step of fewer tokens says little about prefill
_WEIGHT = 0.2  # of the newest step


class Pace:
    """Compares the two speeds. `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._load_s = 0.0
        self._loaded_tokens = 0
        self._prefill_rate: float | None = None
        self._slow_until: float | None = None

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Take a step of the model into account."""
        if num_tokens < _PREFILL_TOKENS or seconds <= 0:
            return
        rate = num_tokens / seconds
        self._prefill_rate = rate if self._prefill_rate is None else (1 - _WEIGHT) * self._prefill_rate + _WEIGHT * rate

    def note_load(self, num_tokens: int, seconds: float) -> None:
        """Take a finished load into account."""
        self._load_s += seconds
        self._loaded_tokens += num_tokens
        if self._prefill_rate is None or self._load_s < _MIN_EVIDENCE_S:
            return
        if self._loaded_tokens / self._load_s < self._prefill_rate:
            self.avoid_loading()
        self._load_s, self._loaded_tokens = 0.0, 0

    def avoid_loading(self) -> None:
        """Hold loading for slower than computing for a while."""
        self._slow_until = self._clock() + _RETRY_S

    @property
    def is_loading_faster(self) -> bool:
        return self._slow_until is None or self._clock() >= self._slow_until
