"""Shows the block memory: what the branches of a conversation hold together, and the map of all blocks."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chatpage.server.views import BlockView, KvStats
from chatpage.terminal.text import count, format_bytes

_MAX_MAP_LINES = 8
_KINDS = {  # kind of a block: character and style; in a cell that stands for several blocks the first kind of this order wins
    "shared": ("█", "bold yellow"),
    "held": ("█", "cyan"),
    "cached": ("▒", "blue"),
    "blank": ("·", "dim"),
}


def render_memory(report: KvStats, block_map: Sequence[BlockView], num_branches: int, width: int) -> RenderableType:
    """Render what the branches hold, and the map at most `width` cells wide."""
    per_row = report.bytes_per_block / report.block_size
    held, total = (blocks * report.bytes_per_block for blocks in (report.blocks_used, report.num_blocks))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("branches", f"{num_branches:,}")
    facts.add_row("held", f"{report.rows_held:,} tokens in {report.blocks_used:,} blocks, {format_bytes(held)}")
    facts.add_row("shared", f"{report.rows_shared:,} tokens in {report.blocks_shared:,} blocks")
    facts.add_row(
        "without sharing", f"{report.rows_without_sharing:,} tokens, {format_bytes(report.rows_without_sharing * per_row)}"
    )
    facts.add_row("wasted", f"{report.rows_wasted:,} rows, {format_bytes(report.rows_wasted * per_row)}")
    facts.add_row(
        "pool",
        f"{report.num_blocks:,} blocks of {report.block_size} tokens, {format_bytes(total)}; "
        f"{report.blocks_cached:,} cached, {report.blocks_blank:,} blank",
    )
    return Group(facts, Text(), _render_map(block_map, width), _render_legend())


def _render_map(block_map: Sequence[BlockView], width: int) -> Text:
    """Draw the blocks in the order of their ids, several to a cell if there are many; a blank rest is counted, not drawn."""
    num_touched = max((i + 1 for i, block in enumerate(block_map) if block.state != "blank"), default=0)
    blocks_per_cell = max(1, -(-num_touched // (width * _MAX_MAP_LINES)))
    order = list(_KINDS)
    picture = Text()
    for number, start in enumerate(range(0, num_touched, blocks_per_cell)):
        if number and number % width == 0:
            picture.append("\n")
        kind = min((_kind(block) for block in block_map[start : start + blocks_per_cell]), key=order.index)
        picture.append(*_KINDS[kind])
    if num_touched < len(block_map):
        picture.append(f"\nand {count(len(block_map) - num_touched, 'block')} never used", "dim")
    return picture


def _kind(block: BlockView) -> str:
    if block.state == "used":
        return "shared" if block.ref_count > 1 else "held"
    return block.state


def _render_legend() -> Text:
    parts: list[str | tuple[str, str]] = []
    for kind, picture in _KINDS.items():
        parts += [picture, (f" {kind}   ", "dim")]
    return Text.assemble(*parts)


def render_stats(stats: KvStats) -> RenderableType:
    """Render the counters of the engine since it started."""
    reused = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    facts = Table.grid(padding=(0, 2))
    facts.add_row("prompt tokens", f"{stats.prompt_tokens:,}, {stats.cached_tokens:,} of them cached ({reused:.0%})")
    facts.add_row("computed tokens", f"{stats.computed_tokens:,}")
    facts.add_row("generated tokens", f"{stats.generated_tokens:,}")
    facts.add_row("copies on write", f"{stats.num_block_copies:,} blocks, {format_bytes(stats.copied_bytes)}")
    facts.add_row("preemptions", f"{stats.num_preemptions:,}")
    return facts
