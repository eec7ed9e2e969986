"""What happens to the server.

Invariant: when a fault has ended its cause is gone, and a server runs; whether it serves again is for the trial to see.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from chatpage.chaos.disks import Disk
from chatpage.chaos.findings import Finding, Findings
from chatpage.chaos.invariants import SERVER
from chatpage.chaos.poison import poison_blocks, poison_state
from chatpage.chaos.victim import DeadServer, Victim, tracebacks

CLEAN_EXIT = 0
FAULTS = ("kill_server", "kill_engine", "drain", "cut", "full_disk", "slow_disk", "poison_up", "poison_down")


@dataclass(slots=True)
class Faults:
    """Does to a server what a fault is called.

    Args:
        victim: The server.
        disk: Where its folder lies; a text says why it lies on no file system of its own.
        check: Looks at the database while the server is down.
        skipped: Gets the faults that cannot be caused here, with why.
    """

    victim: Victim
    disk: Disk | str
    chance: random.Random
    findings: Findings
    check: Callable[[], None]
    skipped: dict[str, str] = field(default_factory=dict)
    flushes: list[tuple[float, float]] = field(default_factory=list)  # seconds of one, before a slow spell and within
    gone_at: float = 0.0  # when the cause of the last fault was gone
    num_cut: int = 0
    num_poisoned: int = 0

    def possible(self, wanted: list[str]) -> list[str]:
        """Return the faults that can be caused here; the others go to `skipped`."""
        if isinstance(self.disk, str):
            self.skipped |= dict.fromkeys(("full_disk", "slow_disk"), f"no small file system could be mounted: {self.disk}")
        elif not self.disk.is_real:
            self.skipped["slow_disk"] = f"{self.disk.kind} lies in memory and cannot be slow"
        self.skipped = {name: why for name, why in self.skipped.items() if name in wanted}
        return [name for name in wanted if name not in self.skipped]

    async def cause(self, name: str) -> str:
        """Cause a fault and end it; return a word about it."""
        causes: dict[str, Callable[[], Awaitable[str]]] = {kind: getattr(self, f"_{kind}") for kind in FAULTS}
        self.gone_at = 0.0
        word = await causes[name]()
        self.gone_at = self.gone_at or time.monotonic()
        return word

    async def _start(self) -> None:
        self.gone_at = time.monotonic()
        await self.victim.start()

    async def _kill_server(self) -> str:
        await self.victim.kill()
        self.check()
        await self._start()
        return ""

    async def _kill_engine(self) -> str:
        return "" if self.victim.kill_engine() else "there was none"

    async def _drain(self) -> str:
        status = await self.victim.drain()
        if status != CLEAN_EXIT:
            text = "it had to be killed" if status is None else f"it ended with status {status}"
            self.findings.add(Finding("drain", SERVER, f"after SIGTERM {text}"))
        self.check()
        await self._start()
        return ""

    async def _cut(self) -> str:
        times = self.chance.randrange(1, 4)
        cut = 0
        for _ in range(times):
            cut += self.victim.wire.cut()
            await asyncio.sleep(self.chance.uniform(0, 0.5))
        self.num_cut += cut
        return f"{cut} connections"

    async def _full_disk(self) -> str:
        assert isinstance(self.disk, Disk)
        is_killed = self.chance.random() < 0.4
        word = ""
        with self.disk.full():
            await asyncio.sleep(self.chance.uniform(1, 5))
            if is_killed:
                await self.victim.kill()
                word = await self._start_on_full()
        self.gone_at = time.monotonic()
        if not self.victim.is_up:
            self.check()
            await self._start()
        return word

    async def _start_on_full(self) -> str:
        """Start while the disk is full: it serves, or says why it cannot."""
        try:
            await self.victim.start()
        except DeadServer as error:
            if tracebacks(str(error).splitlines(keepends=True)):
                self.findings.add(Finding("traceback", SERVER, f"started on a full disk: {error}"))
            return "killed, and would not start before there was room"
        return "killed, and started while it was full"

    async def _slow_disk(self) -> str:
        assert isinstance(self.disk, Disk)
        try:
            before = await asyncio.to_thread(self.disk.flush_s)
        except OSError as error:
            self.findings.add(Finding("disk full", SERVER, f"by nothing but the server: {error}"))
            return "it was full already"
        with self.disk.busy():
            await asyncio.sleep(self.chance.uniform(1, 3))
            within = await asyncio.to_thread(self.disk.flush_s)
            await asyncio.sleep(self.chance.uniform(0, 2))
        self.flushes.append((before, within))
        return f"a flush took {before * 1e3:.1f} ms before, {within * 1e3:.1f} ms within"

    async def _poison_up(self) -> str:
        damaged = await asyncio.to_thread(poison_blocks, self.victim.kv, self.chance)
        self.num_poisoned += damaged
        return f"{damaged} files"

    async def _poison_down(self) -> str:
        await self.victim.kill()
        self.check()
        damaged = await asyncio.to_thread(poison_blocks, self.victim.kv, self.chance)
        others = poison_state(self.victim.data, self.chance)
        self.num_poisoned += damaged + len(others)
        await self._start()
        return ", ".join([f"{damaged} files", *others])
