"""A text as top-level blocks, each with its place in the text and its HTML.

Invariant: a block that is settled is rendered the same in every continuation of the text, except that reference definitions
(`[name]: address`) take effect only once the text is whole, and that a `</think>` nobody opened, alone on its line, makes
reasoning of all that is before it (pass `in_reasoning` where the template opened it, and that does not happen).

Which blocks are settled is decided on the complete lines alone, since half a line can still become anything: after `# Title`,
a `#` is a heading, and `#1` is not. Of what the complete lines hold only the last block can still grow:

    text      | # Title          settled: the next block has begun on a complete line
              | - one            not settled: an item may follow, even after blank lines
              | Then I th        not settled: it is being written
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from markdown_it.token import Token

from chatpage_ui.rendering.parser import Parser, is_too_deep, parser
from chatpage_ui.rendering.reasoning import Reasoning, split_reasoning
from chatpage_ui.rendering.sanitizing import plain_html, sanitize

MAX_TEXT = 100_000  # characters; what is beyond is plain text
MAX_BLOCK = 50_000  # characters

_LINE_END = re.compile(r"\r\n?|\n")


@dataclass(frozen=True, slots=True)
class Block:
    """One top-level block: `text[start:end]` in UTF-16 code units, as browsers count."""

    start: int
    end: int
    html: str
    is_settled: bool


def render_blocks(text: str, *, is_open: bool, in_reasoning: bool = False) -> list[Block]:
    """Render a text.

    Args:
        text: Markdown with LaTeX; HTML in it is shown as text.
        is_open: Whether it is still being written: then at least the last block is not settled.
        in_reasoning: Whether the text begins within reasoning, because the prompt ended with `<think>`.
    """
    head = text[:MAX_TEXT]
    blocks = list(_render_parts(head, is_open=is_open or len(text) > MAX_TEXT, in_reasoning=in_reasoning))
    if len(text) > MAX_TEXT:
        kept = [block for block in blocks if block.is_settled]
        start = kept[-1].end if kept else 0
        blocks = [*kept, Block(start, len(text), plain_html(text[start:]), is_settled=False)]
    if not is_open:
        blocks = [replace(block, is_settled=True) for block in blocks]
    return _in_utf16(blocks, text)


def _render_parts(text: str, *, is_open: bool, in_reasoning: bool) -> Iterator[Block]:
    reasoning = split_reasoning(text, in_reasoning=in_reasoning)
    if reasoning is None:
        yield from _render_markdown(text, 0, is_open=is_open)
        return
    body = _render_markdown(text[reasoning.end :], reasoning.end, is_open=is_open)
    yield Block(reasoning.start, reasoning.end, _reasoning_html(reasoning, is_open=is_open), is_settled=bool(body))
    yield from body


def _reasoning_html(reasoning: Reasoning, *, is_open: bool) -> str:
    """Return reasoning folded; while it is written it is plain text, which nobody watches closely and which costs nothing."""
    if is_open and not reasoning.is_closed:
        inner = plain_html(reasoning.text)
    else:
        inner = "".join(block.html for block in _render_markdown(reasoning.text, 0, is_open=False))
    return f'<details class="reasoning"><summary>Reasoning</summary>{inner}</details>'


def _render_markdown(text: str, offset: int, *, is_open: bool) -> list[Block]:
    """Render markdown; positions are characters, counted from `offset`."""
    parse = parser()
    lines = _LINE_END.split(text)
    starts = [0, *(match.end() for match in _LINE_END.finditer(text))]
    groups = list(_top_level(parse.tokens(text, with_references=not is_open)))
    spans = [_lines_of(group, lines) for group in groups]
    num_settled = _num_settled(parse, text, [starts[first] for first, _ in spans], starts[-1]) if is_open else len(groups)
    blocks = []
    for index, (group, (first, last)) in enumerate(zip(groups, spans, strict=True)):
        start, end = starts[first], starts[last] + len(lines[last])
        source = text[start:end]
        html = plain_html(source) if len(source) > MAX_BLOCK or is_too_deep(group) else sanitize(parse.html(group))
        blocks.append(Block(offset + start, offset + end, html, is_settled=index < num_settled))
    return blocks


def _num_settled(parse: Parser, text: str, block_starts: Sequence[int], last_line: int) -> int:
    """Return how many blocks no continuation can change: all that the complete lines hold, but for the last.

    The line that is being written ends at most one block and begins one, so only the last two blocks can be others without it.
    """
    num_certain = max(0, len(block_starts) - 2)
    start = block_starts[num_certain] if block_starts else 0
    tail = text[start:last_line].rstrip("\r")  # a line that ends in \r may yet end in \r\n
    return max(0, num_certain + sum(1 for _ in _top_level(parse.block_tokens(tail))) - 1)


def _top_level(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Yield the tokens of each top-level block."""
    group: list[Token] = []
    depth = 0
    for token in tokens:
        group.append(token)
        depth += token.nesting
        if depth == 0 and token.type != "inline":
            yield group
            group = []


def _lines_of(group: Sequence[Token], lines: Sequence[str]) -> tuple[int, int]:
    """Return the first and last line of a block, without blank ones at its end."""
    assert group[0].map is not None, f"{group[0].type} has no lines"
    first, last = group[0].map[0], min(group[0].map[1], len(lines)) - 1
    while last > first and not lines[last].strip(" \t"):
        last -= 1
    return first, last


def _in_utf16(blocks: Sequence[Block], text: str) -> list[Block]:
    """Return the blocks with their characters counted as UTF-16 code units."""
    if text.isascii() or max(text, default="") <= "\uffff":
        return list(blocks)
    units = [0, *accumulate(2 if char > "\uffff" else 1 for char in text)]
    return [replace(block, start=units[block.start], end=units[block.end]) for block in blocks]
