"""Who may compute now: the one count of what goes on, whichever interface it came by.

Invariant: a user never has more than `max_running_runs` tickets that compute and `max_queued_runs` more that wait, all users
together never more than `server_running_runs` and `server_queued_runs`; one that has left holds nothing, and of a user who has
none nothing is kept. Who is refused is told when to come again, and a place is kept for that moment.

    enter ──> waits for its turn ──> computes ──> leave
      └── one too many: OverloadedError with the seconds to wait; after `close`: RestartingError
"""

import asyncio
import math

from chatpage.errors import OverloadedError, RestartingError
from chatpage.session.gate import Gate
from chatpage.session.limits import SessionLimits
from chatpage.store.records import UserId


class Ticket:
    """The place of one run or stateless request. Made by `Admission.enter`."""

    def __init__(self, admission: "Admission", user_id: UserId, *slots: asyncio.Semaphore) -> None:
        self._admission = admission
        self._user_id = user_id
        self._slots = slots
        self._taken: list[asyncio.Semaphore] = []
        self._has_left = False

    async def wait(self) -> None:
        """Return when it may compute. What a cancelled wait has taken is given back when the ticket leaves."""
        for slots in self._slots:  # the user's own first, so that nobody waits with what others could use
            await slots.acquire()
            self._taken.append(slots)

    def leave(self) -> None:
        """Give the place back; a second time does nothing."""
        if self._has_left:
            return
        self._has_left = True
        for slots in self._taken:
            slots.release()
        self._admission.forget(self._user_id)


class Admission:
    """Counts what goes on; used on the event loop only."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._slots: dict[UserId, asyncio.Semaphore] = {}
        self._gates: dict[UserId, Gate] = {}
        self._server_slots = asyncio.Semaphore(limits.server_running_runs)
        self._server_gate = Gate(limits.server_running_runs + limits.server_queued_runs)
        self._closed = asyncio.Event()
        self.num_refused = 0

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
        return len(self._gates)

    def num_tickets(self, user_id: UserId) -> int:
        """How much a user has going on, running or waiting."""
        gate = self._gates.get(user_id)
        return 0 if gate is None else gate.num_taken

    def enter(self, user_id: UserId, client: str = "") -> Ticket:
        """Take a place, running or waiting.

        Args:
            user_id: Who asks.
            client: Tells those of one user apart that are told to come again; what has no name is one client.

        Raises:
            OverloadedError: The user, or all users together, have too much going on.
            RestartingError: It was closed.
        """
        if self.is_closed:
            raise RestartingError
        limits = self._limits
        gate = self._gates.get(user_id) or Gate(limits.max_running_runs + limits.max_queued_runs)
        if not gate.has_place_for(client):
            raise self._refusal(
                gate.promise(client),
                f"{gate.num_taken} runs of yours go on or wait; at most {limits.max_running_runs} run at once and "
                f"{limits.max_queued_runs} wait. Stop one, or try again",
            )
        if not self._server_gate.has_place_for(user_id):
            raise self._refusal(
                self._server_gate.promise(user_id),
                f"The server is busy: {self._server_gate.num_taken} runs of its users go on or wait; at most "
                f"{limits.server_running_runs} run at once and {limits.server_queued_runs} wait. Try again",
            )
        gate.take(client)
        self._server_gate.take(user_id)
        self._gates[user_id] = gate
        slots = self._slots.setdefault(user_id, asyncio.Semaphore(limits.max_running_runs))
        return Ticket(self, user_id, slots, self._server_slots)

    def _refusal(self, wait_s: float, problem: str) -> OverloadedError:
        self.num_refused += 1
        return OverloadedError(f"{problem} in {math.ceil(wait_s)} s.", retry_after_s=wait_s)

    def forget(self, user_id: UserId) -> None:
        """Note that a ticket of a user has left; called by the ticket."""
        self._server_gate.give_back()
        gate = self._gates[user_id]
        gate.give_back()
        if not gate.num_taken:
            del self._gates[user_id]
            del self._slots[user_id]
