"""Draws the report of the kernel benchmark as an SVG: one bar per contender, grouped by case, the shortest bar is the fastest.

Bars of a case are scaled to its slowest contender: cases differ by a thousand times, and only contenders of one case compare.
A tick marks the time that the machine's measured bandwidth or arithmetic allows at best, whichever is the longer.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any
from xml.sax.saxutils import escape, quoteattr

_NAME_WIDTH, _BAR_WIDTH, _NUMBERS_WIDTH, _MARGIN = 210, 380, 260, 16  # pixels
_LINE, _BAR = 20, 13
_OURS, _OTHERS, _BEST = "#2563eb", "#9ca3af", "#dc2626"


def draw(report: Mapping[str, Any]) -> str:
    """Return the SVG of a report.

    Args:
        report: What `--json` writes.
    """
    lines = list(_header(report))
    y = _MARGIN + (len(lines) + 1) * _LINE
    for case, rows in groupby(report["rows"], key=lambda row: row["case"]):
        lines.append(_text(_MARGIN, y, case, weight="bold"))
        lines += _bars(list(rows), report["ceilings"], y)
        y += _LINE * (2 + sum(row["case"] == case for row in report["rows"]))
    width = 2 * _MARGIN + _NAME_WIDTH + _BAR_WIDTH + _NUMBERS_WIDTH
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{y}" fill="white"/>',
            *lines,
            "</svg>\n",
        ]
    )


def _header(report: Mapping[str, Any]) -> Iterator[str]:
    ceilings = report["ceilings"]
    texts = [
        f"Attention kernels: {report['backend']}, {report['reason']}, torch {report['torch']}, {report['threads']} threads",
        f"This machine: {ceilings['gb_s']:.1f} GB/s, {ceilings['tflop_s']:.3f} TFLOP/s, measured beside the cases",
    ]
    if report["dry_run"]:
        texts.append("A dry run: its times mean nothing")
    for number, text in enumerate(texts, 1):
        yield _text(_MARGIN, _MARGIN + number * _LINE, text, weight="bold" if number == 1 else "normal")


def _bars(rows: list[Mapping[str, Any]], ceilings: Mapping[str, float], y: float) -> Iterable[str]:
    slowest = max(row["microseconds"] for row in rows if "microseconds" in row)
    left = _MARGIN + _NAME_WIDTH
    for number, row in enumerate(rows, 1):
        base = y + number * _LINE
        yield _text(_MARGIN, base, row["contender"])
        if "unavailable" in row:
            yield _text(left, base, f"not measured: {row['unavailable']}", fill="#6b7280")
            continue
        fill = _OURS if row["contender"].startswith("chatpage") else _OTHERS
        length = row["microseconds"] / slowest * _BAR_WIDTH
        yield f'<rect x="{left}" y="{base - _BAR + 2}" width="{length:.1f}" height="{_BAR}" fill="{fill}"/>'
        used = max(row["gb_s"] / ceilings["gb_s"], row["tflop_s"] / ceilings["tflop_s"])
        # No more than the bar: a machine that was busy while its ceilings were measured shows them too low.
        best = left + length * min(1.0, used)
        yield f'<path d="M{best:.1f} {base - _BAR} v{_BAR + 4}" stroke="{_BEST}" stroke-width="2"/>'
        numbers = f"{row['microseconds']:,.1f} us, {row['gb_s']:.1f} GB/s, {row['tflop_s']:.3f} TFLOP/s"
        yield _text(left + _BAR_WIDTH + _MARGIN // 2, base, numbers)


def _text(x: float, y: float, text: str, *, weight: str = "normal", fill: str = "#111827") -> str:
    return f'<text x="{x}" y="{y}" font-weight={quoteattr(weight)} fill={quoteattr(fill)}>{escape(text)}</text>'
