"""n samples side by side while they stream.

    200 columns wide, 8 samples: one row of 8             80 wide, 8 samples: rows of 3 + 3 + 2
    1 ───   2 ───   3 ───  ...  8 ───                      1 ─────   2 ─────   3 ─────
    text    text    text        text                       text      text      text

Invariant: while it streams, the picture never grows beyond the screen (each cell shows its last lines); when it is over, the
whole text of every sample is printed once.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from chatpage.terminal.text import WrappedText, clean

MIN_COLUMN_CELLS = 24
_GAP = 1
_MIN_LINES = 3
_SECONDS_PER_FRAME = 0.1
_COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")


class ShownSample(Protocol):
    """What a column shows of a sample."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def is_finished(self) -> bool: ...
    @property
    def finish_reason(self) -> str: ...


class ShownSamples(Protocol):
    """A reply that is shown in columns."""

    @property
    def samples(self) -> Sequence[ShownSample]: ...


def color_of(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


def columns_per_row(num_samples: int, width: int) -> int:
    """Fit as many columns as the terminal has room for, then even out the rows: 8 samples make 4 + 4 rather than 7 + 1."""
    fitting = max(1, min(num_samples, (width + _GAP) // (MIN_COLUMN_CELLS + _GAP)))
    num_rows = -(-num_samples // fitting)
    return -(-num_samples // num_rows)


class LiveColumns:
    """Shows the samples of one reply; call `update` after every event."""

    def __init__(self, console: Console, num_samples: int) -> None:
        self._console = console
        self._per_row = columns_per_row(num_samples, console.width)
        self._num_rows = -(-num_samples // self._per_row)
        self._cell_width = (console.width - _GAP * (self._per_row - 1)) // self._per_row
        self._wrapped = [WrappedText(self._cell_width) for _ in range(num_samples)]
        self._shown = [0] * num_samples  # characters of each sample that are in its wrapped text
        self._next_frame = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def update(self, reply: ShownSamples) -> None:
        """Draw the samples as they are now, at most ten times a second."""
        now = time.perf_counter()
        if now < self._next_frame:
            return
        self._next_frame = now + _SECONDS_PER_FRAME
        lines = max(_MIN_LINES, (self._console.height - 2) // self._num_rows - 2)
        self._live.update(self._render(reply.samples, lines), refresh=True)

    def print_all(self, reply: ShownSamples) -> None:
        """Print the whole text of every sample, after the live picture was taken away."""
        self._live.stop()
        self._console.print(self._render(reply.samples, None))

    def _render(self, samples: Sequence[ShownSample], max_lines: int | None) -> RenderableType:
        cells = [self._render_cell(sample, max_lines) for sample in samples]
        rows = []
        for start in range(0, len(cells), self._per_row):
            grid = Table.grid(padding=(0, _GAP, 0, 0), collapse_padding=True, pad_edge=False)
            for _ in range(self._per_row):
                grid.add_column(width=self._cell_width, no_wrap=True)
            row = cells[start : start + self._per_row]
            grid.add_row(*row, *[""] * (self._per_row - len(row)))
            rows.append(grid)
        return Group(*rows)

    def _render_cell(self, sample: ShownSample, max_lines: int | None) -> RenderableType:
        wrapped = self._wrapped[sample.index]
        wrapped.append(clean(sample.text[self._shown[sample.index] :]))
        self._shown[sample.index] = len(sample.text)
        lines = wrapped.lines if max_lines is None else wrapped.last_lines(max_lines)
        return Group(self._header(sample), Text("\n".join(lines), overflow="crop"))

    def _header(self, sample: ShownSample) -> Text:
        color = color_of(sample.index)
        state = f"{sample.num_tokens} tok" + (f" {sample.finish_reason}" if sample.is_finished else "")
        rule = "─" * max(0, self._cell_width - len(str(sample.index + 1)) - len(state) - 3)
        return Text.assemble((f"{sample.index + 1} ", f"bold {color}"), (f"{rule} ", color), (f"{state} ", "dim"), end="\n")
