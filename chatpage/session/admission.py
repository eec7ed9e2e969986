"""Who may compute now: the one count of what a user has going on, whichever interface it came by.

Invariant: a user never has more than `max_running_runs` tickets that compute and `max_queued_runs` more that wait; one that
has left holds nothing, and of a user who has none nothing is kept.

    enter ──> waits for its turn ──> computes ──> leave
      └── one too many: OverloadedError; after `close`: RestartingError
"""

import asyncio
from collections import Counter

from chatpage.errors import OverloadedError, RestartingError
from chatpage.session.limits import SessionLimits
from chatpage.store.records import UserId


class Ticket:
    """The place of one run or stateless request. Made by `Admission.enter`."""

    def __init__(self, admission: "Admission", user_id: UserId, slots: asyncio.Semaphore) -> None:
        self._admission = admission
        self._user_id = user_id
        self._slots = slots
        self._has_slot = False
        self._has_left = False

    async def wait(self) -> None:
        """Return when it may compute. Cancelling the wait takes no slot."""
        await self._slots.acquire()
        self._has_slot = True

    def leave(self) -> None:
        """Give the place back; a second time does nothing."""
        if self._has_left:
            return
        self._has_left = True
        if self._has_slot:
            self._slots.release()
        self._admission.forget(self._user_id)


class Admission:
    """Counts what users have going on; used on the event loop only."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._slots: dict[UserId, asyncio.Semaphore] = {}
        self._num_tickets: Counter[UserId] = Counter()
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Let nobody in any more; who is in may stay."""
        self._closed.set()

    async def wait_until_closed(self) -> None:
        await self._closed.wait()

    @property
    def num_users(self) -> int:
        """Users that have something going on."""
        return len(self._num_tickets)

    def num_tickets(self, user_id: UserId) -> int:
        """How much a user has going on, running or waiting."""
        return self._num_tickets.get(user_id, 0)

    def enter(self, user_id: UserId) -> Ticket:
        """Take a place, running or waiting.

        Raises:
            OverloadedError: The user has too much going on.
            RestartingError: It was closed.
        """
        if self.is_closed:
            raise RestartingError
        num, limits = self.num_tickets(user_id), self._limits
        if num >= limits.max_running_runs + limits.max_queued_runs:
            raise OverloadedError(
                f"{num} runs of yours go on or wait; at most {limits.max_running_runs} run at once and "
                f"{limits.max_queued_runs} wait. Try again when one has ended, or stop one."
            )
        self._num_tickets[user_id] += 1
        slots = self._slots.setdefault(user_id, asyncio.Semaphore(limits.max_running_runs))
        return Ticket(self, user_id, slots)

    def forget(self, user_id: UserId) -> None:
        """Note that a ticket of a user has left; called by the ticket."""
        self._num_tickets[user_id] -= 1
        if not self._num_tickets[user_id]:
            del self._num_tickets[user_id]
            del self._slots[user_id]
