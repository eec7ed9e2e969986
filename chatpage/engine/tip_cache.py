"""Logits after whole prompts, kept so that regenerating starts with no forward pass.

Invariant: an entry is found only by the exact tokens under the exact root, and the least recently used one goes first.
The logits stay valid when blocks are evicted; the scheduler still checks that every block of the prompt is there.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from chatpage.engine.prefix_tree import RootKey


class TipCache:
    """Keeps the logits rows of at most `capacity` prompts, each `[vocab_size]` float32."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: OrderedDict[tuple[RootKey, tuple[int, ...]], torch.Tensor] = OrderedDict()

    def put(self, root: RootKey, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self._capacity == 0:
            return
        key = (root, tuple(token_ids))
        self._rows[key] = logits.clone()
        self._rows.move_to_end(key)
        while len(self._rows) > self._capacity:
            self._rows.popitem(last=False)

    def has(self, root: RootKey, token_ids: Sequence[int]) -> bool:
        return bool(self._rows) and (root, tuple(token_ids)) in self._rows

    def get(self, root: RootKey, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the kept row and mark it as used.

        Raises:
            KeyError: No logits are kept for these tokens.
        """
        key = (root, tuple(token_ids))
        self._rows.move_to_end(key)
        return self._rows[key]

    def forget(self, root: RootKey) -> None:
        """Drop what is kept under one root."""
        for key in [key for key in self._rows if key[0] == root]:
            del self._rows[key]

    def clear(self) -> None:
        self._rows.clear()

    @property
    def num_bytes(self) -> int:
        return sum(row.numel() * row.element_size() for row in self._rows.values())
