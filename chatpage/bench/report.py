"""Shows the numbers of `chatpage bench`: tables on the terminal, a JSON file, a chart.

Invariant: whatever is missing is shown as "-" with its reason, and what was taken on a busy machine is marked.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chatpage.bench.chart import draw
from chatpage.bench.counters import Counter, count_all
from chatpage.bench.measuring import BUSY_SHARE, START, Results, Spread, ratio_to_best
from chatpage.bench.peers.registry import OURS
from chatpage.bench.workloads import TITLES
from chatpage.engine.core import Engine
from chatpage.errors import InvalidRequestError

Tell = Callable[[str], None]
_MARK = "~"
_PLAIN_WIDTH = 180  # of output that is no terminal: nothing is cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How the numbers were taken.

    Args:
        machine: What it is.
        model: As the user gave it.
        repeat: Repetitions of each workload.
        is_quick: With a tenth of the lengths.
        engines: Versions, weights and flags of each engine.
        absent: Engines that were asked for and not measured, with the reason.
    """

    machine: dict[str, str]
    model: str
    repeat: int
    is_quick: bool
    engines: dict[str, dict[str, str]]
    absent: dict[str, str]


def show(results: Results, facts: Facts, console: Console) -> None:
    """Print the table and what must be said about it."""
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    console.print(render_times(results, list(facts.engines)))
    for note in notes(results, facts):
        console.print(Text(note, "dim"), soft_wrap=True)


def write_files(results: Results, facts: Facts, *, json_file: Path | None, chart_file: Path | None) -> None:
    """Write the numbers and the chart.

    Raises:
        InvalidRequestError: A file cannot be written.
    """
    if json_file is not None:
        write(json_file, json.dumps(as_json(results, facts), indent=1) + "\n")
    if chart_file is not None:
        write(chart_file, draw(results, list(facts.engines)))


def render_times(results: Results, engines: Sequence[str]) -> Table:
    """One row per number: the median of each engine with its extremes, and what that is to the best of the others."""
    table = Table(box=None, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in engines:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("to the best", justify="right", no_wrap=True)
    for workload, by_engine in results.outcomes.items():
        table.add_row(Text(f"{workload} {_title(workload)}", "cyan"))
        for number in _numbers(results, workload):
            cells = [_cell(by_engine[name].spread(number), is_busy=by_engine[name].is_busy) for name in engines]
            table.add_row(f"  {number}", *cells, _ratio(results, workload, number, engines[0]))
    return table


def notes(results: Results, facts: Facts) -> list[str]:
    """Say what the table cannot: what is missing and why, what was busy, and whether the engines say the same."""
    lines = [f"Medians of {facts.repeat} (least to most); a ratio above 1 is {OURS}'s advantage over the best of the others."]
    if any(outcome.is_busy for by_engine in results.outcomes.values() for outcome in by_engine.values()):
        lines.append(
            f"{_MARK} taken while other processes had more than {BUSY_SHARE:.0%} of the processors: repeat it at rest."
        )
    for name in facts.engines:
        if (same := results.num_same_ids(OURS, name)) is not None and name != OURS:
            lines.append(f"{name} took the same first {same} of {len(results.first_ids[OURS])} tokens in W1.")
    for workload, by_engine in results.outcomes.items():
        for name, outcome in by_engine.items():
            if outcome.reason:
                lines.append(f"{workload} -: {name} {outcome.reason}.")
    return lines + [f"{name}: {reason}." for name, reason in facts.absent.items()]


def as_json(results: Results, facts: Facts) -> dict[str, Any]:
    """Everything that was measured and how, as plain values."""
    times = {
        workload: {
            name: {
                "numbers": {number: _spread_json(outcome.spread(number)) for number in outcome.numbers},
                "others' share of the processors": outcome.foreign,
                "busy": outcome.is_busy,
                "reason": outcome.reason,
            }
            for name, outcome in by_engine.items()
        }
        for workload, by_engine in results.outcomes.items()
    }
    ratios = {
        workload: {
            number: {"ratio": found[0], "best": found[1]}
            for number in _numbers(results, workload)
            if (found := ratio_to_best(results, workload, number, OURS)) is not None
        }
        for workload in results.outcomes
    }
    return asdict(facts) | {"times": times, "ratios": ratios, "first ids": results.first_ids}


def run_counters(engine: Engine, console: Console, *, json_file: Path | None) -> bool:
    """Count what is never computed twice; print a table and write `json_file`. True if every count is as it must be."""
    counters = count_all(engine)
    console.print(render_counters(counters))
    rows = [{"name": c.name, "expected": c.expected, "seen": c.seen, "ok": c.is_ok} for c in counters]
    if json_file is not None:
        write(json_file, json.dumps({"model": engine.model.description, "counters": rows}, indent=1) + "\n")
    return all(counter.is_ok for counter in counters)


def render_counters(counters: Sequence[Counter]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("")
    for name in ("expected", "seen", "ok"):
        table.add_column(name, justify="right")
    for counter in counters:
        verdict = Text("yes", "green") if counter.is_ok else Text("NO", "bold red")
        table.add_row(counter.name, counter.expected, counter.seen, verdict)
    return table


def write(file: Path, text: str) -> None:
    """Write a file of the report.

    Raises:
        InvalidRequestError: It cannot be written.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"Cannot write {file}: {error.strerror}.") from error


def format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.3g}"


def _title(workload: str) -> str:
    return "until ready to answer" if workload == START else TITLES[workload]


def _numbers(results: Results, workload: str) -> list[str]:
    """The names of the numbers of a workload, of whichever engine has them, in the order they are taken in."""
    return list(dict.fromkeys(n for outcome in results.outcomes[workload].values() for n in outcome.numbers))


def _cell(spread: Spread | None, *, is_busy: bool) -> Text:
    if spread is None:
        return Text("-")
    text = Text((_MARK if is_busy else "") + format_number(spread.median))
    low, high = format_number(min(spread.values)), format_number(max(spread.values))
    if low != high:
        text.append(f"\n{low} to {high}", "dim")
    return text


def _ratio(results: Results, workload: str, number: str, ours: str) -> str:
    found = ratio_to_best(results, workload, number, ours)
    return f"{found[0]:,.2f}x {found[1]}" if found else "-"


def _spread_json(spread: Spread | None) -> dict[str, Any]:
    assert spread is not None, "a number that is there has values"
    return {"median": spread.median, "min": min(spread.values), "max": max(spread.values), "values": spread.values}
