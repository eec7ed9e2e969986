"""A number of places, and for whoever finds none the moment when one will be kept.

Invariants: never more places are taken than there are. Who was told to come at a moment, and comes then, goes before everybody
who was told a later one, or nothing, or comes too early; coming again and again moves nobody's moment, neither one's own nor
that of others. A place is never kept longer for who does not come than for `LONGEST_AGAIN_S + GRACE_S`.

    places are given back    x    x    x    x       measured while all are taken
    promises                 a    b    c    d       one for each, in the order of asking; kept for GRACE_S
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

GRACE_S = 5.0  # that a place is kept for who was told to come
LONGEST_S, SHORTEST_S = 60.0, 0.2  # that anybody is told to wait
LONGEST_AGAIN_S = 5.0  # that who came as told, and found none, is told; a place is kept for it from then on
MAX_PROMISES = 10_000
_MEASURED_S = 30.0
_MIN_MEASURED, _MAX_MEASURED = 4, 4096
_UNMEASURED_S = 1.0  # between two places, as long as nothing was measured


@dataclass(slots=True)
class _Promise:
    due: float
    until: float
    num_missed: int = 0  # times that it came as told, and no place was free


class Gate:
    """Lets so many in at once.

    Args:
        num_places: How many.
        clock: Seconds, rising.
    """

    def __init__(self, num_places: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_places = num_places
        self.num_taken = 0
        self._clock = clock
        self._promises: dict[Hashable, _Promise] = {}  # in the order of their moments
        self._last_due = 0.0
        self._given_back: deque[float] = deque(maxlen=_MAX_MEASURED)  # when places were given back that others waited for
        self._measured_since = 0.0

    @property
    def num_free(self) -> int:
        return self.num_places - self.num_taken

    @property
    def num_promises(self) -> int:
        return len(self._promises)

    def has_place_for(self, who: Hashable) -> bool:
        """Whether `who` may take a place now: one is free, and it is not kept for others whose moment has come."""
        if self.num_free <= 0:
            return False
        return sum(1 for _ in itertools.islice(self._due_before(who, self._clock()), self.num_free)) < self.num_free

    def take(self, who: Hashable) -> None:
        """Take a place; only after `has_place_for`."""
        assert self.num_free > 0, "no place is free"
        self.num_taken += 1
        self._promises.pop(who, None)
        now = self._clock()
        if self.num_free == 0 and not (self._given_back and self._given_back[-1] > now - _MEASURED_S):
            self._given_back.clear()
            self._measured_since = now

    def give_back(self) -> None:
        """Give a place back."""
        if self.num_free == 0 or self._promises:
            self._given_back.append(self._clock())
        self.num_taken -= 1

    def promise(self, who: Hashable) -> float:
        """Return in how many seconds a place is kept for `who`; what was promised before stands."""
        now = self._clock()
        promise = self._promises.get(who)
        if promise is not None and promise.due > now:
            return max(SHORTEST_S, promise.due - now)
        if promise is not None and promise.until >= now:
            # It came as told, but places are given back later than expected. What is given back while it is away is kept for
            # it, else it would go to those who never stop asking; so it is away for a short time only.
            wait_s = min(SHORTEST_S * 2.0 ** min(promise.num_missed, 10), LONGEST_AGAIN_S)
            promise.num_missed += 1
            promise.until = now + wait_s + GRACE_S
            return wait_s
        self._forget_expired(now)
        interval_s = self._interval_s(now)
        num_before = sum(1 for _ in self._due_before(who, now))
        due = min(max(self._last_due, now + num_before * interval_s) + interval_s, now + LONGEST_S)
        if len(self._promises) < MAX_PROMISES:
            self._promises.pop(who, None)
            self._promises[who] = _Promise(due, due + GRACE_S)
            self._last_due = due
        return max(SHORTEST_S, due - now)

    def _due_before(self, who: Hashable, now: float) -> Iterator[_Promise]:
        """Yield the promises whose moment has come and is not over, up to that of `who`."""
        for other, promise in self._promises.items():
            if promise.due > now or (other == who and promise.until >= now):
                return
            if promise.until >= now:
                yield promise

    def _forget_expired(self, now: float) -> None:
        expired = []
        for who, promise in self._promises.items():
            if promise.due > now:
                break
            if promise.until < now:
                expired.append(who)
        for who in expired:
            del self._promises[who]

    def _interval_s(self, now: float) -> float:
        """Return the seconds between two places that are given back, as measured a short while ago."""
        since = max(self._measured_since, now - _MEASURED_S)
        if len(self._given_back) == _MAX_MEASURED:
            since = max(since, self._given_back[0])
        while self._given_back and self._given_back[0] < since:
            self._given_back.popleft()
        if len(self._given_back) < _MIN_MEASURED:
            return _UNMEASURED_S
        measured_s: float = now - since
        return min(measured_s / len(self._given_back), LONGEST_S)
