"""The server that is tried: started, killed in part or whole, drained, started again.

Invariant: the wire leads to the server exactly while one runs.
"""

import asyncio
import contextlib
import os
import queue
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from chatpage.bench.serving import Serving, serving
from chatpage.chaos.processes import Taken, is_engine, taken_by
from chatpage.chaos.wire import Wire
from chatpage.store import database_path

DRAIN_S = 60.0
Numbers = dict[str, float]


class DeadServer(Exception):
    """The server cannot be started any more."""


@dataclass(slots=True)
class Victim:
    """One data folder and the servers on it, one after the other.

    Args:
        data: The folder.
        arguments: For `chatpage serve`.
        wire: Led to the server.
        key: An API key, for the metrics.
    """

    data: Path
    arguments: Sequence[str]
    wire: Wire
    key: str
    errors: list[str] = field(default_factory=list)  # what the servers wrote that tells of a bug
    peaks: dict[str, int] = field(default_factory=lambda: {"server": 0, "engine": 0})
    _running: contextlib.ExitStack | None = None
    _server: Serving | None = None
    _num_lines_read: int = 0

    @property
    def kv(self) -> Path:
        return self.data / "kv"

    @property
    def is_up(self) -> bool:
        return self._server is not None

    @property
    def server(self) -> Serving:
        assert self._server is not None, "the server is down"
        return self._server

    @property
    def engine_pid(self) -> int | None:
        """None while there is none."""
        with contextlib.suppress(OSError):
            return next((pid for pid in self.server.children if is_engine(pid)), None)
        return None

    async def start(self) -> None:
        """Start a server and lead the wire to it.

        Raises:
            DeadServer: It did not start.
        """
        running = contextlib.ExitStack()
        try:
            self._server = await asyncio.to_thread(running.enter_context, serving(self.data, self.arguments))
        except (RuntimeError, queue.Empty) as error:
            raise DeadServer(str(error) or "it said nothing for minutes") from error
        self._running = running
        self._num_lines_read = 0
        self.wire.lead_to(self._server.url)

    async def kill(self) -> None:
        """End server and engine as a power cut would."""
        self.look()
        await asyncio.to_thread(self.server.kill)
        await self._bury()

    def kill_engine(self) -> bool:
        """End the engine alone; False if there is none just now."""
        self.look()
        pid = self.engine_pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    async def drain(self) -> int | None:
        """Ask the server to end, and return its exit status; None if it had to be killed."""
        self.look()
        process = self.server.process
        process.send_signal(signal.SIGTERM)
        deadline = asyncio.get_running_loop().time() + DRAIN_S
        while process.poll() is None and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        status = process.poll()
        if status is None:
            await asyncio.to_thread(self.server.kill)
        await self._bury()
        return status

    async def _bury(self) -> None:
        self.wire.lead_to(None)
        self.wire.cut()
        assert self._running is not None
        await asyncio.to_thread(self._running.close)
        self._read_log()
        self._running = self._server = None

    async def close(self) -> None:
        if self._server is not None:
            await self.drain()

    # -- looking ---------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Taken]:
        """Return what the server and its engine take, and remember their peaks."""
        if self._server is None:
            return {}
        self._read_log()
        pids = {"server": self._server.process.pid, "engine": self.engine_pid}
        found = {name: taken for name, pid in pids.items() if pid is not None and (taken := taken_by(pid)) is not None}
        for name, taken in found.items():
            self.peaks[name] = max(self.peaks[name], taken.peak_bytes)
        return found

    def _read_log(self) -> None:
        if self._server is not None:
            lines = list(self._server.log)
            self.errors += tracebacks(lines[self._num_lines_read :])
            self._num_lines_read = len(lines)

    async def numbers(self) -> Numbers:
        """Read `/metrics`; labels stand behind the name, as in `chatpage_blocks:used`.

        Raises:
            OSError: There is no server.
        """
        try:
            async with httpx.AsyncClient(verify=False, headers={"Authorization": f"Bearer {self.key}"}, timeout=10) as client:
                answer = await client.get(self.server.url + "/metrics")
                answer.raise_for_status()
        except httpx.HTTPError as error:
            raise OSError(f"no metrics: {error or type(error).__name__}") from error
        return {
            ":".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }

    @contextlib.contextmanager
    def database_copy(self) -> Iterator[Path]:
        """Hand out a copy of the database as it lies there, so that looking at it repairs nothing."""
        source = database_path(self.data)
        with tempfile.TemporaryDirectory(prefix="chatpage-chaos-copy-") as folder:
            for path in source.parent.glob(source.name + "*"):
                if not path.name.endswith((".lock", "-shm")):
                    shutil.copy(path, folder)
            yield Path(folder) / source.name


def tracebacks(lines: Sequence[str]) -> list[str]:
    """Return the tracebacks in a log, each with the line before it."""
    found: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            end = number + 1
            while end < len(lines) and (lines[end].startswith((" ", "\t")) or not lines[end].strip()):
                end += 1
            found.append("".join(lines[max(number - 1, 0) : end + 1]).rstrip())
    return found


async def wait_until(holds: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something holds; False if it never did."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
