"""`python -m chatpage.chaos`: see `chatpage.chaos`. What is not known here goes to `chatpage serve`, such as `--model`."""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path

from chatpage.chaos import overload, soak, trial
from chatpage.chaos.faults import FAULTS
from chatpage.chaos.report import Report
from chatpage.config import parse_size


def main(arguments: list[str] | None = None) -> int:
    """Run a trial, a soak or an overload, print its report, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m chatpage.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long users act at least")
    parser.add_argument("--rounds", type=int, default=0, help="how often each fault comes at least")
    parser.add_argument("--users", type=int, default=4)
    parser.add_argument(
        "--faults", type=_faults, default=FAULTS, help=f"of {', '.join(FAULTS)}, with commas between (all), or none"
    )
    parser.add_argument("--seed", type=int, default=0, help="repeats what users and faults do, as far as timing lets")
    parser.add_argument("--pause", type=float, default=8.0, help="seconds between a recovery and the next fault, on average")
    parser.add_argument("--recovery", type=float, default=120.0, help="seconds within which a server must answer after a fault")
    parser.add_argument("--max-lost", type=float, default=5.0, help="seconds of an unfinished reply that a crash may take")
    parser.add_argument("--disk-size", type=parse_size, default="256MiB", help="of the small file system")
    parser.add_argument("--soak", action="store_true", help="no faults; say whether what the server takes stays the same")
    parser.add_argument("--overload", action="store_true", help="no faults; far more questions than can be answered")
    parser.add_argument("--sockets", type=int, default=500, help="of an overload: how many ask")
    parser.add_argument("--think", type=float, default=5.0, help="of a soak: seconds between two things that a user does")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="of a soak: write the series there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    given, others = parser.parse_known_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing stays mounted and no server runs on
    report = (_soak if given.soak else _overload if given.overload else _trial)(given, others)
    print(report.render())
    if given.json is not None:
        given.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    return 1 if report.violations else 0


def _trial(given: argparse.Namespace, others: list[str]) -> Report:
    return trial.run(
        trial.Plan(
            seconds=given.seconds,
            rounds=given.rounds,
            num_users=given.users,
            faults=given.faults,
            seed=given.seed,
            pause_s=given.pause,
            recovery_s=given.recovery,
            max_lost_s=given.max_lost,
            disk_bytes=given.disk_size,
            arguments=others,
        )
    )


def _soak(given: argparse.Namespace, others: list[str]) -> soak.SoakReport:
    with tempfile.TemporaryDirectory(prefix="chatpage-soak-") as folder:
        work = soak.run(
            Path(folder) / "data",
            seconds=given.seconds,
            num_users=given.users,
            think_s=given.think,
            seed=given.seed,
            arguments=others,
        )
        report = asyncio.run(work)
    if given.csv is not None:
        report.write_csv(given.csv)
    return report


def _overload(given: argparse.Namespace, others: list[str]) -> overload.OverloadReport:
    plan = overload.Plan(seconds=given.seconds, num_sockets=given.sockets, arguments=others)
    with tempfile.TemporaryDirectory(prefix="chatpage-overload-") as folder:
        return asyncio.run(overload.run(Path(folder) / "data", plan))


def _faults(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such fault")
    return names


if __name__ == "__main__":
    sys.exit(main())
