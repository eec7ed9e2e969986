"""One trial: users act, faults come, and what must hold is checked while they do, whenever the server is down, and at the end.

Invariant: between two faults the server has answered again, or a violation says that it did not.
"""

import asyncio
import contextlib
import itertools
import random
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chatpage.chaos import deeds
from chatpage.chaos.disks import Disk, small_disk
from chatpage.chaos.faults import CLEAN_EXIT, FAULTS, Faults
from chatpage.chaos.findings import Finding, Findings
from chatpage.chaos.invariants import SERVER, check_database, check_process, check_rest
from chatpage.chaos.ledger import Ledger
from chatpage.chaos.processes import Taken
from chatpage.chaos.report import Report
from chatpage.chaos.user import UNREACHABLE, Surroundings, User
from chatpage.chaos.victim import DeadServer, Victim, wait_until
from chatpage.chaos.weather import Weather
from chatpage.chaos.wire import Wire
from chatpage.client import AsyncClient, ServerError
from chatpage.server.protocol import RunDone
from chatpage.server.views import RunParams, RunRequest
from chatpage.store import RunKind, RunStatus, Store, database_path

FAULTS_PER_REST = 6
LOOK_S = 1.0
WATCHER_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a trial is to be.

    Args:
        seconds: How long users act at least.
        rounds: How often each fault comes at least.
        num_users: How many.
        faults: Names of faults.
        seed: Of everything that is drawn.
        pause_s: Seconds between a recovery and the next fault, on average.
        recovery_s: Seconds within which a server must answer after a fault.
        max_lost_s: Seconds of an unfinished reply that a crash may take.
        disk_bytes: Size of the small file system.
        arguments: More, for `chatpage serve`.
    """

    seconds: float = 60.0
    rounds: int = 0
    num_users: int = 4
    faults: Sequence[str] = FAULTS
    seed: int = 0
    pause_s: float = 8.0
    recovery_s: float = 120.0
    max_lost_s: float = 5.0
    disk_bytes: int = 256 * 2**20
    arguments: Sequence[str] = ()


def run(plan: Plan) -> Report:
    """Run a trial to its end."""
    with _place(plan) as (data, disk):
        return asyncio.run(_run(plan, data, disk))


@contextlib.contextmanager
def _place(plan: Plan) -> Iterator[tuple[Path, Disk | str]]:
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(plan.disk_bytes))
        if isinstance(disk, Disk):
            yield disk.folder, disk
        else:
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chatpage-chaos-"))), disk


async def _run(plan: Plan, data: Path, disk: Disk | str) -> Report:
    ledgers, keys = make_users(data, plan.num_users)
    async with Wire() as wire:
        victim = Victim(data, [*plan.arguments, "--require-login"], wire, keys[0])
        around = Surroundings(Weather(plan.max_lost_s), Findings(), ledgers)
        users = [
            User(
                ledger,
                AsyncClient(wire.url, key=key, patience_s=plan.recovery_s + 30),
                random.Random(f"{plan.seed}/{i}"),
                around,
            )
            for i, (ledger, key) in enumerate(zip(ledgers.values(), keys[1:], strict=True))
        ]
        trial = Trial(plan, victim, disk, users, around)
        try:
            return await trial.run()
        finally:
            await victim.close()


def make_users(data: Path, number: int) -> tuple[dict[str, Ledger], list[str]]:
    """Make users with a key each; the first key is of one more, who only looks whether the server answers."""
    ledgers: dict[str, Ledger] = {}
    keys = []
    with Store(database_path(data)) as store:
        for i in range(-1, number):
            user = store.create_user("watch" if i < 0 else f"user{i}")
            keys.append(store.create_api_key(user.id, "chaos")[1])
            if i >= 0:
                ledgers[user.id] = Ledger(user.name, f"mark{secrets.token_hex(8)}")
    return ledgers, keys


class Trial:
    """Users, faults and checks around one server."""

    def __init__(self, plan: Plan, victim: Victim, disk: Disk | str, users: list[User], around: Surroundings) -> None:
        self._plan = plan
        self._victim = victim
        self._users = users
        self._around = around
        self._watcher = AsyncClient(victim.wire.url, key=victim.key, patience_s=WATCHER_PATIENCE_S)
        self._chance = random.Random(f"{plan.seed}/faults")
        self._faults = Faults(victim, disk, self._chance, around.findings, self._check_database)
        self._report = Report(
            plan.seed, plan.num_users, disk=disk.kind if isinstance(disk, Disk) else "the disk of the machine"
        )
        self._idle: dict[str, Taken] = {}
        self._preemptions: dict[int | None, int] = {}  # by engine, as far as it was asked
        self._end = 0.0

    async def run(self) -> Report:
        """Run it and return the report."""
        await self._victim.start()
        await self._answers(self._plan.recovery_s)
        self._idle = self._victim.look()
        began = time.monotonic()
        self._end = began + self._plan.seconds
        async with self._looking(), self._acting():
            try:
                await self._disturb()
                await self._rest()
            except DeadServer as error:
                self._find("no start", str(error))
        await self._finish()
        self._report.seconds = time.monotonic() - began
        return self._report

    @contextlib.asynccontextmanager
    async def _acting(self) -> AsyncIterator[None]:
        """Let the users act while the block runs."""
        self._around.may_act.set()
        tasks = [asyncio.create_task(self._act(user)) for user in self._users]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome

    async def _act(self, user: User) -> None:
        while True:
            await self._around.may_act.wait()
            user.is_busy = True
            try:
                await deeds.act(user)
            finally:
                user.is_busy = False
            await asyncio.sleep(user.chance.uniform(0, 0.3))

    @contextlib.asynccontextmanager
    async def _looking(self) -> AsyncIterator[None]:
        async def look() -> None:
            while True:
                self._victim.look()
                await asyncio.sleep(LOOK_S)

        task = asyncio.create_task(look())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- faults ----------------------------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        """Cause faults until the time is over, each kind as often as the others, in an order that is drawn."""
        kinds = self._faults.possible(list(self._plan.faults))
        queue: list[str] = []
        for number in itertools.count(1):
            left = self._end - time.monotonic()
            if left <= 0 and number > self._plan.rounds * len(kinds):
                return
            pause = self._chance.expovariate(1 / self._plan.pause_s) if kinds else left
            await asyncio.sleep(pause if left <= 0 else min(left, pause))
            if not kinds:
                continue
            queue = queue or self._chance.sample(kinds, len(kinds))
            await self._disturb_by(queue.pop())
            if number % FAULTS_PER_REST == 0:
                await self._rest()

    async def _disturb_by(self, kind: str) -> None:
        spell = self._around.weather.begin(kind)
        self._around.findings.faults.note(f"{kind} begins")
        word = await self._faults.cause(kind)
        is_back = await self._answers(self._plan.recovery_s)
        spell.end = time.monotonic()
        seconds = spell.end - self._faults.gone_at
        self._around.findings.faults.note(f"{kind} is over, answered again after {seconds:.2f} s; {word}")
        print(f"{kind}: {word or 'done'}, answered again after {seconds:.2f} s", file=sys.stderr, flush=True)
        self._report.recoveries[kind].append(seconds)
        if not is_back:
            self._find("no recovery", f"after {kind} nothing was answered within {self._plan.recovery_s:.0f} s")

    async def _answers(self, within_s: float) -> bool:
        """Wait until a request is answered whole."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        while loop.time() < deadline:
            with contextlib.suppress(ServerError, *UNREACHABLE):
                async with asyncio.timeout_at(deadline):
                    if await self._ask() is RunStatus.COMPLETE:
                        return True
            await asyncio.sleep(0.1)
        return False

    async def _ask(self) -> RunStatus:
        chat = await self._watcher.create_conversation(title="watch")
        params = RunParams(max_tokens=2, ignore_eos=True)
        request = RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Hello", params=params)
        status = RunStatus.RUNNING
        async with contextlib.aclosing(self._watcher.run(request)) as messages:
            async for message in messages:
                if isinstance(message, RunDone):
                    status = message.status
        return status

    # -- checks ----------------------------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Let everybody pause, and look whether the server holds nothing then and every text is there."""
        self._around.may_act.clear()
        if not await wait_until(lambda: not any(user.is_busy for user in self._users), 300):
            self._find("hangs", f"{sum(user.is_busy for user in self._users)} users did not come to an end within 300 s")
            return
        await self._check_rest()
        for user in self._users:
            for conversation_id in list(user.conversations):
                async with user.attempt(f"read {conversation_id}"):
                    await user.read(conversation_id)
        self._report.num_rests += 1
        self._around.may_act.set()

    async def _check_rest(self) -> None:
        deadline = time.monotonic() + self._plan.recovery_s
        found: list[Finding] = []
        while True:
            with contextlib.suppress(OSError):
                numbers = await self._victim.numbers()
                self._preemptions[self._victim.engine_pid] = int(numbers.get("chatpage_preemptions_total", 0))
                found = list(check_rest(numbers))
                for name, taken in self._victim.look().items():
                    if name in self._idle:
                        found += check_process(name, self._idle[name], taken)
                if not found:
                    return
            if time.monotonic() > deadline:
                self._around.findings.add(*found)
                return
            await asyncio.sleep(0.5)

    def _check_database(self) -> None:
        """Look at the database of a server that is down."""
        with self._victim.database_copy() as path:
            self._around.findings.add(*check_database(path, self._around.ledgers, self._around.weather))

    async def _finish(self) -> None:
        """End the server and look at everything for the last time."""
        if self._victim.is_up and (status := await self._victim.drain()) != CLEAN_EXIT:
            self._find("drain", f"at the end the server ended with {status}")
        self._check_database()
        for trace in dict.fromkeys(self._victim.errors):
            self._find("traceback", trace)
        report, faults = self._report, self._faults
        report.counts = self._around.counts
        report.skipped = faults.skipped
        report.num_messages = sum(len(ledger.messages) for ledger in self._around.ledgers.values())
        report.peaks = self._victim.peaks
        report.violations = self._around.findings.violations
        if faults.flushes:
            before, within = (max(column) * 1e3 for column in zip(*faults.flushes, strict=True))
            report.notes.append(f"slow disk: a flush took up to {within:.0f} ms, {before:.0f} ms before")
        report.counts["preemptions"] = sum(self._preemptions.values())
        report.notes.append(f"{faults.num_cut} connections cut, {faults.num_poisoned} files poisoned")

    def _find(self, kind: str, text: str) -> None:
        self._around.findings.add(Finding(kind, SERVER, text))
