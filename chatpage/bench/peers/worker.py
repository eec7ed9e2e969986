"""The process of one engine: `python -m chatpage.bench.peers.worker`, which reads calls as JSON lines and answers each.

Invariant: only answers go out on the pipe; what libraries print goes to the log. It ends when its parent closes the pipe.

    parent ──> {"prepare" | "load": name, "setup", "sizes", "vocab_size"}  ──> worker
    parent ──> {"play" | "warm_up": workload, "material"}                  ──> worker ──> {"ok" | "cannot" | "failed": ...}
"""

import dataclasses
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import IO, Any

from chatpage.bench.peers.interface import CannotError, Peer, Setup
from chatpage.bench.peers.registry import ENTRIES
from chatpage.bench.playing import Player
from chatpage.bench.workloads import Material, Sizes


class Worker:
    """Obeys calls on one engine."""

    def __init__(self) -> None:
        self._peer: Peer | None = None
        self._player: Player | None = None

    def obey(self, call: dict[str, Any]) -> dict[str, Any]:
        """Do what a call says; whatever goes wrong is an answer, not an end."""
        try:
            return {"ok": self._do(call)}
        except CannotError as reason:
            return {"cannot": str(reason)}
        except Exception as error:  # noqa: BLE001 - an engine may raise anything, and the others must go on
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()

    def _do(self, call: dict[str, Any]) -> Any:
        if "prepare" in call:
            return ENTRIES[call["prepare"]].load().prepare(read_setup(call["setup"]))
        if "load" in call:
            return self._load(call)
        assert self._player is not None, "an engine is loaded first"
        material = Material(**call["material"])
        if "warm_up" in call:
            return self._player.warm_up(material)
        numbers, reason = self._player.play(call["play"], material)
        return {"numbers": numbers, "reason": reason, "first_ids": self._player.first_ids}

    def _load(self, call: dict[str, Any]) -> dict[str, Any]:
        self._peer = ENTRIES[call["load"]].load()(read_setup(call["setup"]))
        self._player = Player(self._peer, Sizes(**call["sizes"]), call["vocab_size"])
        return {
            "pid": self._peer.pid,
            "ready_s": self._peer.ready_s,
            "max_len": self._peer.max_len,
            "facts": self._peer.facts(),
        }


def write_setup(setup: Setup) -> dict[str, Any]:
    return dataclasses.asdict(setup) | {
        "model": str(setup.model),
        "weights": [str(path) for path in setup.weights],
        "cache": str(setup.cache),
        "scratch": str(setup.scratch),
    }


def read_setup(values: dict[str, Any]) -> Setup:
    return Setup(
        settings=values["settings"],
        model=Path(values["model"]),
        weights=tuple(map(Path, values["weights"])),
        threads=values["threads"],
        cache=Path(values["cache"]),
        scratch=Path(values["scratch"]),
    )


def serve(calls: IO[str], answers: IO[str]) -> None:
    """Obey calls until there are none."""
    worker = Worker()
    try:
        for line in calls:
            print(json.dumps(worker.obey(json.loads(line))), file=answers, flush=True)
    finally:
        worker.close()


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
