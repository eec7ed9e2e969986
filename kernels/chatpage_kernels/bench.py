"""Measures the attention kernels against what the machine can do, and against other ways to compute the same.

    python -m chatpage_kernels.bench [--device cpu|cuda] [--json FILE] [--chart FILE] [--rounds N] [--dry-run]

Invariant: a number is printed only for a result that was checked first, against fp32 torch; all contenders of a case run in
turns within the same seconds, so a machine that others use too slows all of them, and ratios stay fair.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from chatpage_kernels import bench_chart, reference
from chatpage_kernels.backend import Backend, select_backend
from chatpage_kernels.bench_cases import (
    CPU_GRID,
    GPU_GRID,
    LARGE_MODEL,
    SMALL_MODEL,
    TINY_GRID,
    TINY_MODEL,
    Case,
    Inputs,
    Model,
    copy_of,
    make_inputs,
)
from chatpage_kernels.bench_peers import Contender, peers
from chatpage_kernels.plan import AttentionPlan, Tile

_FLUSH_BYTES = {"cpu": 48 << 20, "cuda": 256 << 20}
_READ_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
_MIN_SECONDS = 20e-3  # a shorter run is repeated within a round: so that one interruption does not count much
_REST_S = 0.02  # until the threads of the contender before have fallen asleep
_WARM_S = 0.02  # until those of the next one are awake, each on a core of its own: two that wake on one share it for a while
_Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = _parse(arguments)
    if options.dry_run and options.device == "cuda":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # decided when triton is imported: not before this line
    device = torch.device("cpu" if options.dry_run else options.device)
    model = TINY_MODEL if options.dry_run else (LARGE_MODEL if device.type == "cuda" else SMALL_MODEL)
    grid = TINY_GRID if options.dry_run else (GPU_GRID if device.type == "cuda" else CPU_GRID)
    backend = _interpreted_triton() if options.dry_run and options.device == "cuda" else _backend(model, device)
    print(f"{backend.name}: {backend.reason}; {model.num_q_heads}/{model.num_kv_heads} heads x {model.head_dim}, {model.dtype}")
    ceilings = _Ceilings(model.dtype, device, rounds=1 if options.dry_run else 5, is_small=options.dry_run)
    rows: list[_Row] = []
    for case in grid:
        if options.only and options.only not in case.name:
            continue
        rows += _measure_case(case, model, backend, device, ceilings=ceilings, options=options)
        _print_rows(rows[-1]["case"], [row for row in rows if row["case"] == rows[-1]["case"]], ceilings)
    report = {"backend": backend.name, "reason": backend.reason, "torch": torch.__version__, "dry_run": options.dry_run}
    report |= {"threads": torch.get_num_threads(), "ceilings": ceilings.as_dict(), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.chart:
        options.chart.write_text(bench_chart.draw(report))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chatpage_kernels.bench", description="Measure the attention kernels.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw them there, as an SVG")
    parser.add_argument("--rounds", type=int, default=15, help="turns of all contenders; medians are shown (default: 15)")
    parser.add_argument("--only", metavar="TEXT", help="only cases whose name has this in it")
    parser.add_argument("--flex", action="store_true", help="compile and measure flex_attention too (minutes)")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, to see that it works; Triton is interpreted")
    return parser.parse_args(arguments)


def _backend(model: Model, device: torch.device) -> Backend:
    if device.type == "cpu":
        from chatpage_kernels.cpu import build

        if (library := build.wait()) is not None:
            library.use_own_threads()  # as a model does that is computed by them alone
    return select_backend(device, model.dtype, head_dim=model.head_dim)


def _interpreted_triton() -> Backend:
    from chatpage_kernels import triton_attention, triton_cache

    tile = Tile(16, 32, num_workers=24, split_tokens=64)
    functions = (triton_attention.paged_attention, triton_cache.write_kv, triton_cache.copy_blocks)
    return Backend("triton", "interpreted, so its times mean nothing", tile, tile, *functions)


class _Ceilings:
    """What the machine reads and multiplies at most, measured anew beside every case."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, rounds: int, is_small: bool) -> None:
        self._rounds = rounds
        self._read_bytes, self._read = _reader(device, (1 << 20) if is_small else _READ_BYTES[device.type])
        self._multiply = _multiplier(dtype, device, is_small=is_small)
        self._gb_s: list[float] = []
        self._tflop_s: list[float] = []

    def measure(self) -> None:
        self._gb_s += [self._read_bytes / _seconds(self._read) / 1e9 for _ in range(self._rounds)]
        for _ in range(self._rounds):
            num_flops: list[float] = []
            seconds = _seconds(lambda done=num_flops: done.append(self._multiply()))  # type: ignore[misc]
            self._tflop_s.append(num_flops[0] / seconds / 1e12)

    @property
    def gb_s(self) -> float:
        return statistics.median(self._gb_s)

    @property
    def tflop_s(self) -> float:
        return max(self._tflop_s)

    def as_dict(self) -> dict[str, float]:
        return {"gb_s": self.gb_s, "tflop_s": self.tflop_s}


def _reader(device: torch.device, num_bytes: int) -> tuple[int, Callable[[], object]]:
    """Return (bytes moved, function that moves them)."""
    data = copy_of(torch.ones(num_bytes // 4, device=device))
    library = _cpu_library(device)
    if library is not None:
        return num_bytes, lambda: library.read_memory(data.data_ptr(), data.numel(), torch.get_num_threads())
    if device.type == "cpu":
        return num_bytes, data.sum
    target = torch.empty_like(data)
    return 2 * num_bytes, lambda: target.copy_(data)


def _multiplier(dtype: torch.dtype, device: torch.device, *, is_small: bool) -> Callable[[], float]:
    """Return a function that multiplies and returns the floating point operations it did: as many as threads came to help."""
    library = _cpu_library(device)
    if library is not None:
        from chatpage_kernels.cpu.kernels import DTYPES

        rounds, threads = (1000 if is_small else 200_000), torch.get_num_threads()
        return lambda: float(library.multiply(DTYPES[dtype], rounds, threads))
    size = 128 if is_small else (8192 if device.type == "cuda" else 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def multiply() -> float:
        torch.mm(left, right)
        return 2.0 * size**3

    return multiply


def _cpu_library(device: torch.device) -> Any:
    if device.type != "cpu":
        return None
    from chatpage_kernels.cpu import build

    return build.library()


def _measure_case(
    case: Case, model: Model, backend: Backend, device: torch.device, *, ceilings: _Ceilings, options: argparse.Namespace
) -> list[_Row]:
    inputs = make_inputs(case, model, backend, device, flush_bytes=0 if options.dry_run else _FLUSH_BYTES[device.type])
    ours = Contender(f"chatpage ({backend.name})", lambda i: _ours(inputs, backend, inputs.plan, i))
    own = [ours]
    if case.num_shared:  # what sharing is worth: the same blocks, read once for each sequence
        own.append(Contender("chatpage, nothing shared", lambda i: _ours(inputs, backend, inputs.plan_apart, i)))
    exact, limit = _exact(inputs)
    rows: list[_Row] = []
    contenders = []
    for contender in (*own, *peers(inputs, with_flex=options.flex)):
        if isinstance(contender, Contender):
            _check(contender, exact, limit if contender in own else 4 * limit)
            contenders.append(contender)
        else:
            rows.append({"case": case.name, "contender": contender[0], "unavailable": contender[1]})
    ceilings.measure()
    times = _race(contenders, len(inputs.caches), rounds=2 if options.dry_run else options.rounds)
    for contender, seconds in zip(contenders, times, strict=True):
        median = statistics.median(seconds)
        row: _Row = {"case": case.name, "contender": contender.name, "microseconds": median * 1e6, "best": min(seconds) * 1e6}
        row["gb_s"], row["tflop_s"] = inputs.num_bytes / median / 1e9, inputs.num_flops / median / 1e12
        row["speedup_of_ours"] = statistics.median(s / o for s, o in zip(seconds, times[0], strict=True))
        rows.append(row)
    return rows


def _ours(inputs: Inputs, backend: Backend, plan: AttentionPlan, i: int) -> torch.Tensor:
    return backend.paged_attention(inputs.query, *inputs.caches[i % len(inputs.caches)], plan, scale=inputs.scale)


def _exact(inputs: Inputs) -> tuple[torch.Tensor, float]:
    """Return the result in fp32, and the error that the dtype may make: twice that of torch in it, and a rounding."""
    query, (key, value) = inputs.query, inputs.plain
    exact = reference.paged_attention(query.float(), key.float(), value.float(), inputs.plan, scale=inputs.scale)
    own = reference.paged_attention(query, key, value, inputs.plan, scale=inputs.scale)
    rounding = torch.finfo(query.dtype).eps * float(exact.abs().max())
    return exact, 2 * float((own.float() - exact).abs().max()) + 4 * rounding


def _check(contender: Contender, exact: torch.Tensor, limit: float) -> None:
    error = float((contender.run(0).float() - exact).abs().max())
    if not error <= limit:
        raise SystemExit(f"{contender.name} is wrong by {error:.2e}, more than {limit:.2e}: nothing is measured")


def _race(contenders: Sequence[Contender], num_copies: int, *, rounds: int) -> list[list[float]]:
    """Return seconds per run of each contender and round; a round goes through all caches, the contenders take turns."""
    repeats = [max(num_copies, int(_MIN_SECONDS / max(_seconds(lambda c=c: c.run(0)), 1e-9))) for c in contenders]  # type: ignore[misc]
    repeats = [min(repeat, 512) for repeat in repeats]
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, repeat, seconds in zip(contenders, repeats, times, strict=True):
            time.sleep(_REST_S)
            _warm_up(contender)
            seconds.append(_seconds(lambda c=contender, n=repeat: _run_through(c, n)) / repeat)  # type: ignore[misc]
    return times


def _warm_up(contender: Contender) -> None:
    until = time.perf_counter() + _WARM_S
    while time.perf_counter() < until:
        contender.run(0)


def _run_through(contender: Contender, num_runs: int) -> None:
    """Run so often, and drop every result at once as a model does: new memory each time costs more than small kernels."""
    for i in range(num_runs):
        contender.run(i)


def _seconds(function: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _print_rows(case: str, rows: Sequence[_Row], ceilings: _Ceilings) -> None:
    print(f"\n{case}   (machine: {ceilings.gb_s:.1f} GB/s, {ceilings.tflop_s:.3f} TFLOP/s)")
    for row in rows:
        if "unavailable" in row:
            print(f"  {row['contender']:<28} not measured: {row['unavailable']}")
            continue
        read, multiplied = row["gb_s"] / ceilings.gb_s, row["tflop_s"] / ceilings.tflop_s
        print(
            f"  {row['contender']:<28} {row['microseconds']:>10,.1f} us  {row['gb_s']:>8.1f} GB/s {read:>5.0%}  "
            f"{row['tflop_s']:>8.3f} TFLOP/s {multiplied:>5.0%}   ours is {row['speedup_of_ours']:.2f}x as fast"
        )


if __name__ == "__main__":
    sys.exit(main())
