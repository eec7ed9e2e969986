"""An engine in a process of its own, seen from the bench: started, asked, watched, ended.

Invariant: when `close` returns no process of it is left.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from chatpage.bench import machine
from chatpage.bench.peers.interface import CannotError, Setup
from chatpage.bench.peers.registry import OURS
from chatpage.bench.peers.worker import write_setup
from chatpage.bench.workloads import Material, Sizes
from chatpage.errors import EngineStepError

_MODULE = "chatpage.bench.peers.worker"
_END_S = 20.0
_SPIN_VARIABLE = "GOMP_SPINCOUNT"


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """What a workload gave on an engine once.

    Args:
        numbers: By name; without those that `reason` explains.
        reason: Why there are no (other) numbers.
        foreign: Share of the machine that other processes took meanwhile, if known.
        first_ids: The first tokens of the last greedy run.
    """

    numbers: dict[str, float]
    reason: str = ""
    foreign: float | None = None
    first_ids: tuple[int, ...] = ()


class PeerProcess:
    """Runs the adapter of one engine."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self.facts: dict[str, str] = {}
        self.max_len: int | None = None
        self.start = Played({})
        self._setup = setup
        self._log = setup.scratch / f"{name}.log"
        self._log_stream = self._log.open("ab")
        self._pid = 0  # of the process that computes
        self._process: subprocess.Popen[str] | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the process that obeys, and of the one that computes, if that is another."""
        return tuple(dict.fromkeys(pid for pid in (self._process.pid if self._process else 0, self._pid) if pid))

    def prepare(self) -> None:
        """Convert the weights, in a process that ends then.

        Raises:
            CannotError: The engine has no way to serve these weights.
            EngineStepError: It went wrong.
        """
        self._process = self._start()
        self._ask({"prepare": self.name, "setup": write_setup(self._setup)})
        self._end()

    def load(self, sizes: Sizes, vocab_size: int) -> None:
        """Load the model in a fresh process, and note how long that took and what it needs.

        Raises:
            CannotError: The engine has no way to serve these weights.
            EngineStepError: It went wrong.
        """
        self._end()
        others = machine.OthersWatch(())
        started = time.perf_counter()
        self._process = self._start()
        call = {"load": self.name, "setup": write_setup(self._setup), "sizes": dataclasses.asdict(sizes)}
        answer = self._ask(call | {"vocab_size": vocab_size})
        seconds = answer["ready_s"] or time.perf_counter() - started
        self._pid = answer["pid"]
        self.facts = answer["facts"]
        self.max_len = answer["max_len"]
        numbers = {"ready s": seconds} | _known("ready MiB", machine.resident_mib(self._pid))
        self.start = Played(numbers, foreign=others.share(self.pids))

    def warm_up(self, material: Material) -> None:
        """Run once what is slow the first time."""
        self._ask({"warm_up": True, "material": dataclasses.asdict(material)})

    def play(self, workload: str, material: Material) -> Played:
        """Play a workload once, and watch the machine meanwhile.

        Raises:
            EngineStepError: It went wrong.
        """
        is_peak_known = machine.reset_peak(self._pid)
        others = machine.OthersWatch(self.pids)
        answer = self._ask({"play": workload, "material": dataclasses.asdict(material)})
        foreign = others.share()
        numbers = answer["numbers"]
        if workload == "W4" and is_peak_known and numbers:
            numbers |= _known("peak MiB", machine.peak_mib(self._pid))
        return Played(numbers, answer["reason"], foreign, tuple(answer["first_ids"]))

    def close(self) -> None:
        self._end()
        self._log_stream.close()

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_stream,
            text=True,
            env=environment_of(self.name, self._setup.threads),
            start_new_session=True,  # an interrupt at the terminal is for the bench, which ends its engines
        )

    def _ask(self, call: dict[str, Any]) -> Any:
        process = self._process
        assert process is not None, "it is started first"
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        try:
            print(json.dumps(call), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineStepError(f"its process ended ({process.wait()}): {self._last_words()}")
        answer = json.loads(line)
        if "cannot" in answer:
            raise CannotError(answer["cannot"])
        if "failed" in answer:
            raise EngineStepError(answer["failed"])
        return answer["ok"]

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

    def _end(self) -> None:
        """End the process and everything it started."""
        process, self._process, self._pid = self._process, None, 0
        if process is None:
            return
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def environment_of(name: str, threads: int) -> dict[str, str]:
    """Return the environment of an engine's process: that of the bench, but every engine with its own habits of waiting."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if not name.startswith(OURS):
        environment.pop(_SPIN_VARIABLE, None)  # chatpage's command line shortens it, for itself
    return environment


def _known(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
