"""The picture of the block memory."""

import io

from rich.console import Console, RenderableType

from chatpage.server.views import BlockView, KvStats
from chatpage.terminal.kv_view import render_memory


def _draw(picture: RenderableType) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def _report(num_blocks: int) -> KvStats:
    numbers = dict.fromkeys(KvStats.model_fields, 0)
    del numbers["type"]
    numbers |= {"num_blocks": num_blocks, "block_size": 4, "bytes_per_block": 4096, "blocks_used": 3, "blocks_cached": 1}
    numbers |= {"blocks_shared": 1, "rows_held": 9, "rows_shared": 4, "rows_wasted": 3, "rows_without_sharing": 13}
    return KvStats.model_validate(numbers | {"blocks_blank": num_blocks - 4})


def _map(*states: tuple[str, int], num_blank: int) -> list[BlockView]:
    blocks = [BlockView(id=i, ref_count=refs, state=state, num_rows=4) for i, (state, refs) in enumerate(states)]
    return blocks + [BlockView(id=len(blocks) + i, ref_count=0, state="blank", num_rows=0) for i in range(num_blank)]


USED, CACHED, BLANK = "used", "cached", "blank"


def test_each_block_is_a_cell_and_the_blank_rest_is_counted() -> None:
    blocks = _map((USED, 2), (USED, 1), (BLANK, 0), (CACHED, 0), (USED, 1), num_blank=95)
    lines = _draw(render_memory(_report(100), blocks, 2, width=40))
    assert "██·▒█" in lines
    assert "and 95 blocks never used" in lines
    assert "held             9 tokens in 3 blocks, 12.0 KiB" in lines
    assert "without sharing  13 tokens, 13.0 KiB" in lines
    assert "wasted           3 rows, 3.0 KiB" in lines


def test_many_blocks_share_a_cell_and_what_is_in_use_is_seen_first() -> None:
    states = [(CACHED, 0)] * 5000 + [(USED, 1)]
    lines = _draw(render_memory(_report(5001), _map(*states, num_blank=0), 1, width=40))
    cells = [line for line in lines if line and set(line) <= {"▒", "█"}]
    assert len(cells) <= 8
    assert "".join(cells).endswith("█")
    assert "".join(cells).count("█") == 1


def test_an_empty_pool_is_drawn() -> None:
    assert "and 8 blocks never used" in _draw(render_memory(_report(8), _map(num_blank=8), 0, width=40))
