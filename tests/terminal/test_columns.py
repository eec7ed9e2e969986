"""Samples side by side."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from chatpage.terminal.columns import LiveColumns, columns_per_row
from chatpage.terminal.reply import Reply, Sample


@pytest.mark.parametrize(
    ("num_samples", "width", "columns"),
    [(8, 200, 8), (8, 199, 8), (8, 198, 4), (8, 80, 3), (8, 24, 1), (8, 10, 1), (2, 200, 2), (3, 80, 3), (4, 80, 2), (1, 5, 1)],
)
def test_as_many_columns_as_fit_in_even_rows(num_samples: int, width: int, columns: int) -> None:
    assert columns_per_row(num_samples, width) == columns


def _print_all(reply: Reply, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=30, force_terminal=False)
    with LiveColumns(console, len(reply.samples)) as columns:
        columns.print_all(reply)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_every_sample_is_printed_whole_when_it_is_over() -> None:
    texts = [f"word{i} " * 30 for i in range(8)]
    lines = _print_all(Reply([Sample(i, text) for i, text in enumerate(texts)]), width=200)
    assert all(cell_len(line) <= 200 for line in lines)
    for i in range(8):
        assert "\n".join(lines).count(f"word{i}") == 30


def test_eight_samples_stand_side_by_side_on_a_wide_terminal_and_in_rows_on_a_narrow_one() -> None:
    reply = Reply([Sample(i, "x") for i in range(8)])
    headers = [line for line in _print_all(reply, width=200) if "─" in line]
    assert len(headers) == 1
    assert len([line for line in _print_all(reply, width=80) if "─" in line]) == 3


def test_markup_and_escapes_of_a_sample_are_shown_as_text() -> None:
    reply = Reply([Sample(0, "[bold red]x[/] \x1b[31my"), Sample(1, "[/nothing]")])
    shown = "\n".join(_print_all(reply, width=80))
    assert "[bold red]x[/]" in shown
    assert "[/nothing]" in shown
    assert "\x1b" not in shown


def test_while_it_streams_the_picture_stays_within_the_screen() -> None:
    """A live picture taller than the screen scrolls with every frame and leaves its old tops behind."""
    console = Console(file=io.StringIO(), width=60, height=12, force_terminal=True)
    reply = Reply([Sample(i, "line\n" * 100) for i in range(4)])
    with LiveColumns(console, 4) as columns:
        columns.update(reply)
        assert isinstance(console.file, io.StringIO)
        frame = console.file.getvalue()
    assert frame.count("\n") < 12
    assert frame.count("line") >= 4
