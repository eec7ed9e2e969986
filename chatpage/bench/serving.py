"""A `chatpage serve` of its own for benches and trials: started, watched from outside, and ended or killed.

Invariant: when the block is left no process of it is left, however it was left.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

START_S = 180.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that runs."""

    url: str
    process: "subprocess.Popen[str]"
    log: list[str] = field(default_factory=list)  # what it wrote to stderr so far, line by line

    @property
    def ws_url(self) -> str:
        return "ws" + self.url.removeprefix("http") + "/ws"

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that the server used, without its engine, which is a process of its own."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory_bytes(self) -> int:
        """Memory of the server, without its engine."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def children(self) -> list[int]:
        """Its processes: the engine, and what looks after it."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread has just ended; what it began belongs to another now
                found += map(int, (task / "children").read_text().split())
        return found

    def kill(self) -> None:
        """Kill it hard, and wait until its engine has noticed.

        Raises:
            TimeoutError: A process of it lives on.
        """
        children = self.children
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 30
        while left := [pid for pid in children if _is_alive(pid)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the processes {left} outlived their server")
            time.sleep(0.02)


@contextlib.contextmanager
def serving(data: Path, arguments: Sequence[str]) -> Iterator[Serving]:
    """Start `chatpage serve` on a free port.

    Args:
        data: Folder of its database.
        arguments: More of them, such as `--model`.
    """
    command = [sys.executable, "-m", "chatpage", "serve", "--port", "0", "--data", str(data), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace", env=_environment())
    log: list[str] = []
    try:
        yield Serving(_wait_for_url(process, log), process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _wait_for_url(process: "subprocess.Popen[str]", log: list[str]) -> str:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # closed at the end
            for line in process.stderr:
                log.append(line)
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    seen = ""
    while (line := lines.get(timeout=START_S)) is not None:
        seen += line
        if found := re.search(r"chatpage serves on (http://\S+)", line):
            return found[1]
    process.wait()
    raise RuntimeError(f"the server did not start:\n{seen}")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
