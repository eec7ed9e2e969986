"""Runs the benches and shows the numbers: `chatpage bench`.

Invariant: the runners take turns within every repetition, so a machine that slows down slows both, and medians are compared.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chatpage.bench.chatpage_runner import ChatpageRunner
from chatpage.bench.counters import Counter, count_all
from chatpage.bench.transformers_runner import TransformersRunner
from chatpage.bench.workloads import TITLES, Prompts, Sizes
from chatpage.engine.core import Engine
from chatpage.errors import ContextLengthError, InvalidRequestError

_QUICK_SHARE = 0.1
_ROOM = 200  # tokens for turns and replies beside the longest prompt

Results = dict[str, dict[str, dict[str, list[float]]]]  # workload -> runner -> number -> one value per repetition


class Runner(Protocol):
    """A system under test."""

    name: str

    def warm_up(self) -> None:
        """Run once what is slow the first time."""

    def run(self, name: str, seed: str) -> dict[str, float]:
        """Run a workload once and return its numbers by name."""


def run_times(
    engine: Engine, console: Console, names: Sequence[str], *, repeat: int, is_quick: bool, json_file: Path | None
) -> Results:
    """Time the workloads on chatpage and on transformers; print a table and write `json_file`.

    Raises:
        ContextLengthError: The longest workload does not fit the engine.
    """
    sizes = Sizes().scaled(_QUICK_SHARE) if is_quick else Sizes()
    _check_room(engine, sizes, names)
    prompts = Prompts(engine.tokenizer)
    runners: list[Runner] = [ChatpageRunner(engine, prompts, sizes), TransformersRunner(engine, prompts, sizes)]
    for runner in runners:
        runner.warm_up()
    results = measure(runners, names, repeat=repeat, console=console)
    console.print(render_times(results, [runner.name for runner in runners]))
    _write(
        json_file, {"model": engine.model.description, "threads": torch.get_num_threads(), "repeat": repeat, "times": results}
    )
    return results


def measure(runners: Sequence[Runner], names: Sequence[str], *, repeat: int, console: Console) -> Results:
    """Run every workload `repeat` times on every runner, taking turns."""
    results: Results = {name: {runner.name: {} for runner in runners} for name in names}
    with console.status("measuring …") as status:
        for name in names:
            for repetition in range(repeat):
                for runner in runners:
                    status.update(f"{name} {TITLES[name]}, {repetition + 1} of {repeat}: {runner.name} …")
                    for number, value in runner.run(name, f"{name} number {repetition}").items():
                        results[name][runner.name].setdefault(number, []).append(value)
    return results


def run_counters(engine: Engine, console: Console, *, json_file: Path | None) -> bool:
    """Count what is never computed twice; print a table and write `json_file`. True if every count is as it must be."""
    counters = count_all(engine)
    console.print(render_counters(counters))
    rows = [{"name": c.name, "expected": c.expected, "seen": c.seen, "ok": c.is_ok} for c in counters]
    _write(json_file, {"model": engine.model.description, "counters": rows})
    return all(counter.is_ok for counter in counters)


def render_times(results: Results, runner_names: Sequence[str]) -> Table:
    """One row per number: the median of each runner, and chatpage's advantage."""
    table = Table(box=None, header_style="bold")
    table.add_column("")
    table.add_column("")
    for name in (*runner_names, "ratio"):
        table.add_column(name, justify="right")
    for workload, by_runner in results.items():
        title = f"{workload} {TITLES[workload]}"
        for number in by_runner[runner_names[0]]:
            medians = [statistics.median(by_runner[name][number]) for name in runner_names]
            table.add_row(Text(title, "cyan"), number, *(_format(value) for value in medians), _ratio(number, medians))
            title = ""
    return table


def render_counters(counters: Sequence[Counter]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for name in ("expected", "seen", "ok"):
        table.add_column(name, justify="right")
    for counter in counters:
        verdict = Text("yes", "green") if counter.is_ok else Text("NO", "bold red")
        table.add_row(counter.name, counter.expected, counter.seen, verdict)
    return table


def _check_room(engine: Engine, sizes: Sizes, names: Sequence[str]) -> None:
    longest = sizes.fork if {"W7", "W8"} & set(names) else max(sizes.prompt, sizes.system, sizes.decode_in + sizes.decode_out)
    if longest + _ROOM > engine.max_model_len:
        raise ContextLengthError(
            f"The longest workload needs {longest + _ROOM} tokens, the engine takes {engine.max_model_len}: "
            "use --quick, choose others with --workloads, or raise --kv-memory."
        )


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"


def _ratio(number: str, medians: Sequence[float]) -> str:
    """How many times better the first runner is; less is better unless it is a rate."""
    ours, theirs = medians[0], medians[-1]
    better, worse = (ours, theirs) if number.endswith("tok/s") else (theirs, ours)
    return f"{better / worse:,.1f}x" if worse else "-"


def _write(file: Path | None, content: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"Cannot write {file}: {error.strerror}.") from error
