"""Texts that do not change are rendered once.

Invariant: what is kept never holds more than `max_chars` characters of text and HTML; the least recently used goes first.
"""

import threading
from collections import OrderedDict

from chatpage_ui.rendering.blocks import Block, render_blocks

MAX_CHARS = 16 * 2**20


class RenderCache:
    """Renders from any thread."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._kept: OrderedDict[tuple[str, bool], list[Block]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    @property
    def num_chars(self) -> int:
        return self._num_chars

    def render(self, text: str, *, is_open: bool, in_reasoning: bool = False) -> list[Block]:
        """As `render_blocks`; only whole texts are kept."""
        if is_open:
            return render_blocks(text, is_open=True, in_reasoning=in_reasoning)
        key = (text, in_reasoning)
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        blocks = render_blocks(text, is_open=False, in_reasoning=in_reasoning)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = blocks
                self._num_chars += _size(text, blocks)
            while self._num_chars > self._max_chars:
                (old, _), old_blocks = self._kept.popitem(last=False)
                self._num_chars -= _size(old, old_blocks)
        return blocks


def _size(text: str, blocks: list[Block]) -> int:
    return len(text) + sum(len(block.html) for block in blocks)
