"""The same users without faults, for hours, and what the server takes meanwhile.

Invariants: users keep a bounded number of conversations and delete the oldest for good, so that a server in order holds as much
at the end as after its start; the first tenth is not judged, since caches fill then.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from chatpage.chaos import deeds
from chatpage.chaos.findings import Finding, Findings, Violation
from chatpage.chaos.invariants import SERVER, check_database, check_rest
from chatpage.chaos.ledger import Key
from chatpage.chaos.trial import make_users
from chatpage.chaos.user import Surroundings, User
from chatpage.chaos.victim import Victim
from chatpage.chaos.weather import Weather
from chatpage.chaos.wire import Wire
from chatpage.client import AsyncClient
from chatpage.store import Store, database_path
from chatpage.store.records import now

KEPT_CONVERSATIONS = 6  # of a user
WARM_UP = 0.1  # of the time
NUM_MOMENTS = 400
MAX_SILENT_S = 300.0  # a machine that has other things to do may keep a server from answering for a while
PURGE_S, PURGED_AFTER_S = 20.0, 60.0
# How much more the last quarter may take than the first: a share of it, and an amount that is too little to tell.
ALLOWED = {
    "server_memory_bytes": (0.05, 8 * 2**20),
    "engine_memory_bytes": (0.05, 8 * 2**20),
    "server_files": (0.0, 8),
    "engine_files": (0.0, 8),
    "server_threads": (0.0, 4),
    "engine_threads": (0.0, 4),
    "database_bytes": (0.15, 4 * 2**20),
    "kv_bytes": (0.10, 16 * 2**20),
}


@dataclass(frozen=True, slots=True)
class Moment:
    """What the server took at one moment."""

    at_s: float
    server_memory_bytes: int
    engine_memory_bytes: int
    server_files: int
    engine_files: int
    server_threads: int
    engine_threads: int
    database_bytes: int
    kv_bytes: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Trend:
    """How a quantity went: medians of the first and last quarter after the warm-up, and how much a line through all grows."""

    name: str
    first: float
    last: float
    per_hour: float

    @property
    def is_flat(self) -> bool:
        share, amount = ALLOWED[self.name]
        return self.last - self.first <= max(share * self.first, amount)


@dataclass(slots=True)
class SoakReport:
    """The series and what it says."""

    num_users: int
    seconds: float = 0.0
    series: list[Moment] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    violations: Sequence[Violation] = ()

    @property
    def trends(self) -> list[Trend]:
        return trends(self.series)

    def to_dict(self) -> dict[str, Any]:
        return {
            "users": self.num_users,
            "seconds": round(self.seconds, 1),
            "counts": dict(sorted(self.counts.items())),
            "trends": [asdict(trend) | {"is_flat": trend.is_flat} for trend in self.trends],
            "series": [asdict(moment) for moment in self.series],
            "violations": [violation.to_dict() for violation in self.violations],
        }

    def render(self) -> str:
        """Return it as lines of text."""
        tokens = self.series[-1].generated_tokens if self.series else 0
        lines = [f"{self.num_users} users for {self.seconds:.0f} s, {tokens:,} tokens generated", ""]
        lines += [f"  {count:7,}  {name}" for name, count in sorted(self.counts.items())]
        lines += ["", f"  {'':<20} {'first quarter':>14} {'last quarter':>14} {'per hour':>12}"]
        for trend in self.trends:
            unit, name = (2**20, " MiB") if trend.name.endswith("bytes") else (1, "    ")
            numbers = f"{trend.first / unit:10,.1f}{name} {trend.last / unit:10,.1f}{name} {trend.per_hour / unit:+8,.2f}{name}"
            lines.append(f"  {trend.name.removesuffix('_bytes'):<20} {numbers}  {'flat' if trend.is_flat else 'GROWS'}")
        lines += [f"VIOLATION {violation.finding}" for violation in self.violations]
        return "\n".join([*lines, "", f"{len(self.violations)} violations"])

    def write_csv(self, path: Path) -> None:
        """Write the series."""
        names = [column.name for column in fields(Moment)]
        rows = [",".join(str(getattr(moment, name)) for name in names) for moment in self.series]
        path.write_text("\n".join([",".join(names), *rows]) + "\n")


def trends(series: Sequence[Moment]) -> list[Trend]:
    """Say how each quantity went; none with fewer than eight moments after the warm-up."""
    judged = series[int(len(series) * WARM_UP) :]
    if len(judged) < 8:
        return []
    quarter = len(judged) // 4
    times = [moment.at_s / 3600 for moment in judged]
    found = []
    for name in ALLOWED:
        values = [float(getattr(moment, name)) for moment in judged]
        slope = statistics.linear_regression(times, values).slope
        found.append(Trend(name, statistics.median(values[:quarter]), statistics.median(values[-quarter:]), slope))
    return found


async def run(data: Path, *, seconds: float, num_users: int, think_s: float, seed: int, arguments: Sequence[str]) -> SoakReport:
    """Run a soak to its end.

    Args:
        data: Folder for the server.
        seconds: How long.
        num_users: How many act.
        think_s: Seconds between two things that a user does, on average.
        seed: Of everything that is drawn.
        arguments: More, for `chatpage serve`.
    """
    ledgers, keys = make_users(data, num_users)
    around = Surroundings(Weather(0.0), Findings(), ledgers)
    async with Wire() as wire:
        victim = Victim(data, [*arguments, "--require-login"], wire, keys[0])
        await victim.start()
        try:
            users = [
                User(ledger, AsyncClient(wire.url, key=key), random.Random(f"{seed}/{i}"), around)
                for i, (ledger, key) in enumerate(zip(ledgers.values(), keys[1:], strict=True))
            ]
            report = SoakReport(num_users)
            began = time.monotonic()
            async with _acting(users, think_s), _purging(data):
                await _sample(victim, around, report.series, seconds)
            await _check_rest(victim, around)
            report.seconds = time.monotonic() - began
        finally:
            await victim.close()
        with victim.database_copy() as path:
            around.findings.add(*check_database(path, ledgers, around.weather, is_purged=True))
    around.findings.add(*(Finding("traceback", SERVER, trace) for trace in victim.errors))
    around.findings.add(*(Finding("grows", SERVER, str(trend)) for trend in report.trends if not trend.is_flat))
    report.counts, report.violations = dict(around.counts), around.findings.violations
    return report


@contextlib.asynccontextmanager
async def _acting(users: Sequence[User], think_s: float) -> AsyncIterator[None]:
    end = asyncio.Event()

    async def act(user: User) -> None:
        while not end.is_set():
            await deeds.act(user)
            while len(user.conversations) > KEPT_CONVERSATIONS:
                await _delete_oldest(user)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), user.chance.expovariate(1 / think_s))

    tasks = [asyncio.create_task(act(user)) for user in users]
    try:
        yield
    finally:
        end.set()
        await asyncio.gather(*tasks)


async def _delete_oldest(user: User) -> None:
    conversation_id = user.conversations.pop(0)
    key: Key = ("deleted", conversation_id)
    async with user.attempt(f"delete-oldest {conversation_id}"):
        with user.ledger.changing(key, True):
            await user.client.delete_conversation(conversation_id)


@contextlib.asynccontextmanager
async def _purging(data: Path) -> AsyncIterator[None]:
    """Remove for good what was deleted a while ago, again and again."""

    async def purge() -> None:
        while True:
            await asyncio.sleep(PURGE_S)
            await asyncio.to_thread(_purge, data)

    task = asyncio.create_task(purge())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _purge(data: Path) -> None:
    with Store(database_path(data)) as store:
        store.purge_deleted(before=now() - int(PURGED_AFTER_S * 1e6))


async def _sample(victim: Victim, around: Surroundings, series: list[Moment], seconds: float) -> None:
    began = answered = time.monotonic()
    interval = max(1.0, seconds / NUM_MOMENTS)
    while (at_s := time.monotonic() - began) < seconds:
        try:
            taken, numbers = victim.look(), await victim.numbers()
        except OSError as error:
            around.counts["moments without an answer"] += 1
            if time.monotonic() > answered + MAX_SILENT_S:
                around.findings.add(Finding("silent", SERVER, f"no answer for {MAX_SILENT_S:.0f} s: {error}"))
                return
            await asyncio.sleep(interval)
            continue
        answered = time.monotonic()
        server, engine = taken["server"], taken["engine"]
        database = database_path(victim.data)
        series.append(
            Moment(
                at_s=round(at_s, 1),
                server_memory_bytes=server.memory_bytes,
                engine_memory_bytes=engine.memory_bytes,
                server_files=server.num_files,
                engine_files=engine.num_files,
                server_threads=server.num_threads,
                engine_threads=engine.num_threads,
                database_bytes=_size(database.parent.glob(database.name + "*")),
                kv_bytes=_size(victim.kv.rglob("*.safetensors")),
                generated_tokens=int(numbers["chatpage_generated_tokens_total"]),
            )
        )
        await asyncio.sleep(interval)


def _size(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # it was removed just now
            total += path.stat().st_size
    return total


async def _check_rest(victim: Victim, around: Surroundings) -> None:
    """Look what is held when nobody wants anything any more."""
    deadline = time.monotonic() + 60
    while found := list(check_rest(await victim.numbers())):
        if time.monotonic() > deadline:
            around.findings.add(*found)
            return
        await asyncio.sleep(0.5)
