"""Blocks that come back from disk for a request that waits: the side of loading that belongs to the engine's thread.

Invariants: a loaded block enters through a block table, as if its tokens had just been computed; a request waits only while its
blocks arrive, and never after its load ended, whatever ended it. One request loads at a time, in the order they came: what
the first has loaded the others find in memory.

    prompt   [ in memory | on disk ............ | part of a block on disk | to compute ]
               adopted     read ahead, inserted   the rows in common        goes on as ever
                           some between two steps
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, takewhile
from pathlib import Path

import numpy as np

from chatpage.engine.block_pool import BlockPool
from chatpage.engine.block_table import BlockTable
from chatpage.engine.kv_cache import KvCache
from chatpage.engine.kv_disk.block_file import Block
from chatpage.engine.kv_disk.chain import Geometry, Name, names_of, next_name, root_name
from chatpage.engine.kv_disk.folder import Folder
from chatpage.engine.kv_disk.pace import Pace
from chatpage.engine.kv_disk.reading import Reader
from chatpage.engine.kv_disk.saving import geometry_of
from chatpage.engine.prefix_tree import PrefixMatch, PrefixTree, RootKey
from chatpage.events import RequestId

logger = logging.getLogger(__name__)
_MAX_READ_AHEAD_BYTES = 32 * 2**20
_PATIENCE_S = 10.0  # without a block, then the disk hangs and the request computes


@dataclass(slots=True)
class _Load:
    """A load in progress: the table that holds what is there, and the reads that are under way behind it.

    Args:
        name: Of the last full block in the table, or of the root.
        names: Of the blocks being read, in the order of `reads`.
    """

    root: RootKey
    tokens: Sequence[int]
    geometry: Geometry
    table: BlockTable
    name: Name
    started: float
    last_progress: float
    reads: deque["Future[Block | None]"] = field(default_factory=deque)
    names: deque[Name] = field(default_factory=deque)
    last: "Future[Block | None] | None" = None
    num_loaded_tokens: int = 0


class Loader:
    """Loads the beginnings of prompts.

    Args:
        known: Files that are on disk as far as this engine knows; it learns of those that are read.
    """

    def __init__(
        self,
        cache: KvCache,
        pool: BlockPool,
        tree: PrefixTree,
        *,
        folder: Folder,
        reader: Reader,
        pace: Pace,
        known: set[Path],
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._tree = tree
        self._folder = folder
        self._reader = reader
        self._pace = pace
        self._known = known
        self._waiting: OrderedDict[RequestId, tuple[RootKey, Sequence[int]]] = OrderedDict()
        self._load: _Load | None = None  # of the first that waits
        self.num_blocks = 0
        self.num_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def tables(self) -> dict[str, BlockTable]:
        """The table of the load in progress, by the name of its holder."""
        return {} if self._load is None else {f"disk/{next(iter(self._waiting))}": self._load.table}

    def is_loading(self, request_id: RequestId) -> bool:
        """Whether a request has to wait for its load."""
        return request_id in self._waiting

    def add(self, request_id: RequestId, root: RootKey, tokens: Sequence[int]) -> None:
        """Let a request wait if the disk has the block behind what memory has."""
        if self._pace.is_loading_faster and self._find_on_disk(root, tokens, most=1)[1]:
            self._waiting[request_id] = (root, tokens)

    def num_loadable(self, root: RootKey, tokens: Sequence[int]) -> int:
        """Count the tokens in full blocks that memory has, or that the disk seems to have right behind them."""
        return sum(self._find_on_disk(root, tokens, most=len(tokens))) * self._cache.block_size

    def _find_on_disk(self, root: RootKey, tokens: Sequence[int], *, most: int) -> tuple[int, int]:
        """Count the full blocks in memory, and those that the disk seems to have behind them, up to `most`."""
        size = self._cache.block_size
        num_cached = self._tree.match(root, tokens).num_tokens // size
        stop = min(len(tokens) // size, num_cached + most)
        count = 0
        if num_cached < stop:
            first = root_name(geometry_of(self._cache, root), root.cache_salt)
            links = pairwise(chain([first], names_of(first, tokens[: stop * size], size)))
            places = (self._folder.place(parent, name) for parent, name in islice(links, num_cached, None))
            count = sum(1 for _ in takewhile(self._folder.has, places))
        return num_cached, count

    def cancel(self, request_id: RequestId) -> None:
        """Forget a request that ended, or was never here."""
        if request_id in self._waiting:
            if request_id == next(iter(self._waiting)):
                self._end_load()
            self._waiting.pop(request_id)

    def give_up(self) -> bool:
        """End the load in progress because its blocks are needed; what it has so far stays cached. False if there is none."""
        if self._load is None:
            return False
        self._finish_first()
        return True

    def advance(self, max_bytes: int, num_spare: int) -> bool:
        """Insert blocks that have arrived; true if anything moved.

        Args:
            max_bytes: To insert at most (but one block at least).
            num_spare: Blocks that the running sequences leave.
        """
        if not self._waiting:
            return False
        if self._load is None:
            self._load = self._begin(*next(iter(self._waiting.values())))
        load = self._load
        if load.geometry != geometry_of(self._cache, load.root):  # another backend has taken over, and reads other layouts
            self._finish_first()
            return True
        blocks = self._take_arrived(load, max(1, max_bytes // self._cache.bytes_per_block))
        is_end = (not blocks and not load.reads) or blocks[-1:] == [None]
        fits = self._insert(load, [block for block in blocks if block is not None], num_spare)
        if not fits or (is_end and load.last is not None):
            self._finish_first()
        elif is_end:
            self._read_closest(load)
        elif not blocks and time.monotonic() - load.last_progress > _PATIENCE_S:
            logger.warning("The disk of %s does not answer; prompts are computed instead for a while.", self._folder.path)
            self._pace.avoid_loading()
            self._finish_first()
        else:
            return bool(blocks)
        return True

    def wait(self, timeout: float) -> None:
        """Wait until the next block has arrived, for so many seconds at most."""
        if self._load is not None and self._load.reads:
            wait([self._load.reads[0]], timeout)

    def close(self) -> None:
        self._end_load()
        self._waiting.clear()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _begin(self, root: RootKey, tokens: Sequence[int]) -> _Load:
        size = self._cache.block_size
        match = self._tree.match(root, tokens)
        num_full = match.num_tokens // size
        table = BlockTable(self._pool, self._tree, root)
        table.adopt(PrefixMatch(match.block_ids[:num_full], num_full * size))
        geometry = geometry_of(self._cache, root)
        name = root_name(geometry, root.cache_salt)
        for found in names_of(name, tokens[: num_full * size], size):
            name = found
        now = time.monotonic()
        return _Load(root, tokens, geometry, table, name, now, now)

    def _take_arrived(self, load: _Load, most: int) -> list[Block | None]:
        """Read ahead, and take what has arrived, in the order of the chain; the first miss is the last one."""
        self._read_ahead(load)
        blocks: list[Block | None] = []
        while load.reads and load.reads[0].done() and len(blocks) < most:
            blocks.append(load.reads.popleft().result())
            load.last_progress = time.monotonic()
            if blocks[-1] is None:
                break
        return blocks

    def _read_ahead(self, load: _Load) -> None:
        size = self._cache.block_size
        most = max(2, _MAX_READ_AHEAD_BYTES // self._cache.bytes_per_block)
        parent = load.names[-1] if load.names else load.name
        start = load.table.num_committed + len(load.names) * size
        while load.last is None and len(load.reads) < most and start + size <= len(load.tokens):
            tokens = load.tokens[start : start + size]
            name = next_name(parent, tokens)
            load.reads.append(self._reader.read_full(load.geometry, parent, name, tokens))
            load.names.append(name)
            parent, start = name, start + size

    def _read_closest(self, load: _Load) -> None:
        """Look behind the last whole block for one that has some rows in common."""
        self._cancel_reads(load)
        start = load.table.num_committed
        if self._tree.match(load.root, load.tokens).num_tokens == len(load.tokens):
            self._finish_first()
            return
        tokens = load.tokens[start : start + self._cache.block_size]
        load.last = self._reader.read_closest(load.geometry, load.name, tokens)
        load.reads.append(load.last)

    def _insert(self, load: _Load, blocks: Sequence[Block], num_spare: int) -> bool:
        """Let the table hold these blocks too; False if not all have room, or nobody could find them any more."""
        fitting = blocks[: max(0, min(num_spare, self._pool.num_available))] if load.table.is_findable else ()
        if fitting:
            first, before = len(load.table.ids), load.table.num_committed
            after = before + sum(len(block.tokens) for block in fitting)
            copies = load.table.prepare(after)
            assert not copies, "a table that ends with a full block copies nothing"
            rows = [np.frombuffer(block.kv, dtype=np.uint8) for block in fitting]
            self._cache.write_blocks(load.table.ids[first:].tolist(), rows)
            load.table.commit(load.tokens, after)
            load.num_loaded_tokens += after - before
            self.num_blocks += len(fitting)
            self.num_tokens += after - before
        for _ in fitting if load.last is None else ():
            parent, load.name = load.name, load.names.popleft()
            self._known.add(self._folder.place(parent, load.name))
        return len(fitting) == len(blocks)

    def _finish_first(self) -> None:
        load = self._load
        assert load is not None
        self._pace.note_load(load.num_loaded_tokens, time.monotonic() - load.started)
        self._end_load()
        self._waiting.popitem(last=False)

    def _end_load(self) -> None:
        if self._load is not None:
            self._cancel_reads(self._load)
            self._load.table.free()  # what it holds was used just now, so it is evicted last
            self._load = None

    def _cancel_reads(self, load: _Load) -> None:
        for read in load.reads:
            read.cancel()
        load.reads.clear()
        load.names.clear()
