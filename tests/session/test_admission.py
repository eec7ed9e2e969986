"""Places of users: so many compute, so many wait, the next is told when to come again; what leaves leaves nothing."""

import asyncio

import pytest

from chatpage.errors import OverloadedError
from chatpage.session import SessionLimits
from chatpage.session.admission import Admission
from chatpage.store import LOCAL_USER, UserId

ANN = UserId("ann")


def test_users_do_not_take_each_others_places() -> None:
    async def test() -> None:
        admission = Admission(SessionLimits(max_running_runs=1, max_queued_runs=1))
        first, second = admission.enter(LOCAL_USER), admission.enter(LOCAL_USER)
        with pytest.raises(OverloadedError, match="2 runs of yours go on or wait; at most 1 run at once and 1 wait"):
            admission.enter(LOCAL_USER)
        other = admission.enter(ANN)
        await asyncio.gather(first.wait(), other.wait())
        waiting = asyncio.create_task(second.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        first.leave()
        await waiting
        assert (admission.num_tickets(LOCAL_USER), admission.num_users) == (1, 2)
        second.leave()
        other.leave()
        assert admission.num_users == 0

    asyncio.run(test())


def test_all_users_together_have_so_many_places_too() -> None:
    """A hundred users within their own limits were a queue without end: each of them waited for all others."""

    async def test() -> None:
        admission = Admission(SessionLimits(server_running_runs=1, server_queued_runs=1))
        first, second = admission.enter(LOCAL_USER), admission.enter(ANN)
        with pytest.raises(OverloadedError, match="The server is busy: 2 runs of its users") as caught:
            admission.enter(UserId("bob"))
        assert caught.value.retry_after_s > 0
        await first.wait()
        waiting = asyncio.create_task(second.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        first.leave()
        await waiting
        second.leave()
        assert (admission.num_users, admission.num_refused) == (0, 1)
        bob = admission.enter(UserId("bob"))
        await bob.wait()
        bob.leave()
        assert admission.num_users == 0

    asyncio.run(test())


def test_a_turn_that_is_not_waited_for_gives_back_the_half_it_has() -> None:
    async def test() -> None:
        admission = Admission(SessionLimits(max_running_runs=1, server_running_runs=1))
        first, second = admission.enter(LOCAL_USER), admission.enter(ANN)
        await first.wait()
        waiting = asyncio.create_task(second.wait())  # it has the turn of its user, not yet one of the server
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        second.leave()
        first.leave()
        for user in (LOCAL_USER, ANN):
            ticket = admission.enter(user)
            await asyncio.wait_for(ticket.wait(), 1)
            ticket.leave()
        assert admission.num_users == 0

    asyncio.run(test())


def test_who_leaves_while_waiting_takes_no_turn_and_leaves_once() -> None:
    async def test() -> None:
        admission = Admission(SessionLimits(max_running_runs=1, max_queued_runs=2))
        first, second, third = (admission.enter(LOCAL_USER) for _ in range(3))
        await first.wait()
        waiting = asyncio.create_task(second.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        second.leave()
        second.leave()
        assert admission.num_tickets(LOCAL_USER) == 2
        first.leave()
        await asyncio.wait_for(third.wait(), 1)
        third.leave()
        assert admission.num_users == 0

    asyncio.run(test())
