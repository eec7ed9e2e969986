"""The disk behind the prefix tree, as the engine sees it: a few calls around each step, all on the engine's thread.

    add_request     add: a request may have to wait for blocks that come from disk
    step            advance: insert what has arrived, copy out what is to be saved; bounded beside running streams
    preempted       keep: save its chain before it is evicted; resume: load it again, if that is faster than computing it
    request ended   offer: its chain is worth saving
    close           the recent part of the tree, within a time limit

Invariant: no error of the disk is an error of the engine; without a folder that can be used there is no `KvDisk`.
"""

import logging
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from chatpage.config import DEFAULT_KV_DISK_SIZE, EngineConfig
from chatpage.engine.block_pool import BlockPool
from chatpage.engine.block_table import BlockTable
from chatpage.engine.kv_cache import KvCache
from chatpage.engine.kv_disk.folder import Folder
from chatpage.engine.kv_disk.loading import Loader
from chatpage.engine.kv_disk.pace import Pace
from chatpage.engine.kv_disk.reading import Reader
from chatpage.engine.kv_disk.saving import Saver
from chatpage.engine.kv_disk.stats import KvDiskStats
from chatpage.engine.kv_disk.writer import Writer
from chatpage.engine.prefix_tree import PrefixTree, RootKey
from chatpage.engine.sequence import Request, Sequence
from chatpage.events import RequestId

SAVE_S = 5.0
_LOAD_BYTES_BESIDE_STREAMS = 4 * 2**20  # between two steps: a few milliseconds of copying
_SAVE_BYTES_BESIDE_STREAMS = 2**19
_IDLE_BYTES = 64 * 2**20
_WAIT_S = 0.02
logger = logging.getLogger(__name__)


class KvDisk:
    """Saves what requests leave behind, and loads what new ones begin with."""

    def __init__(self, folder: Folder, known: set[Path], cache: KvCache, pool: BlockPool, tree: PrefixTree) -> None:
        """Use `open_kv_disk`, which makes the folder."""
        self._folder = folder
        self._pace = Pace()
        self._reader = Reader(folder)
        self._writer = Writer(folder, on_missing=known.difference_update)
        self._saver = Saver(cache, pool, tree, folder=folder, writer=self._writer, known=known)
        self._loader = Loader(cache, pool, tree, folder=folder, reader=self._reader, pace=self._pace, known=known)
        self._has_moved = False
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        return self._loader.has_work or self._saver.has_work

    @property
    def has_loads(self) -> bool:
        """Whether a request waits for its load; then blocks will become available without anybody's doing."""
        return self._loader.has_work

    @property
    def tables(self) -> dict[str, BlockTable]:
        """Block tables of ours, by the name of the holder."""
        return self._loader.tables

    def add(self, request: Request) -> None:
        """Let a new request wait for its blocks if the disk has some."""
        self._loader.add(request.id, request.root, request.prompt_token_ids)

    def is_loading(self, request_id: RequestId) -> bool:
        """Whether a request must wait, because its blocks are on their way."""
        return self._loader.is_loading(request_id)

    def give_up(self) -> bool:
        """End the load in progress: a running sequence needs the blocks. False if there was none."""
        return self._loader.give_up()

    def keep(self, sequence: Sequence) -> None:
        """Save what a preempted sequence computed, from its beginning on: what is evicted first is its end."""
        self._saver.offer(sequence.request.root, tuple(sequence.token_ids))

    def resume(self, sequence: Sequence) -> bool:
        """Let a preempted sequence wait for what memory has lost of it; False if the disk has none of it, or is slower."""
        request = sequence.request
        if self._loader.is_loading(request.id):
            return True  # with a sibling
        self._loader.add(request.id, request.root, tuple(sequence.token_ids))
        return self._loader.is_loading(request.id)

    def end(self, request: Request) -> None:
        """Take note that a request ended: what it computed is worth saving."""
        self._loader.cancel(request.id)
        for sequence in request.sequences:
            self._saver.offer(request.root, sequence.token_ids)

    def advance(self, *, is_busy: bool, num_spare: int) -> None:
        """Do what belongs between two steps.

        Args:
            is_busy: Sequences are running and wait for this.
            num_spare: Available blocks that they will not need.
        """
        self._writer.note_streams(are_running=is_busy)
        loading = _LOAD_BYTES_BESIDE_STREAMS if is_busy else _IDLE_BYTES
        self._has_moved = self._loader.advance(loading, num_spare)
        if is_busy or not self._loader.has_work:
            self._has_moved |= self._saver.advance(_SAVE_BYTES_BESIDE_STREAMS if is_busy else _IDLE_BYTES)

    def wait(self) -> None:
        """Wait a moment for the disk, if the last `advance` found nothing to do."""
        if self._has_moved:
            return
        if self._loader.has_work:
            self._loader.wait(_WAIT_S)
        else:
            self._writer.wait_for_room(_WAIT_S)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn how fast tokens are computed, to know when loading is faster."""
        self._pace.note_step(num_tokens, seconds)

    def num_loadable_tokens(self, root: RootKey, tokens: SequenceOf[int]) -> int:
        """Count the tokens in full blocks that memory has, or that the disk seems to have right behind them."""
        return self._loader.num_loadable(root, tokens)

    def stats(self) -> KvDiskStats:
        usage = self._folder.usage
        return KvDiskStats(
            folder=str(self._folder.path),
            limit=self._folder.limit,
            blocks=usage.num_files,
            bytes=usage.num_bytes,
            saved_blocks=self._writer.num_written,
            loaded_blocks=self._loader.num_blocks,
            loaded_tokens=self._loader.num_tokens,
            damaged_files=self._reader.num_damaged,
            evicted_blocks=self._folder.num_evicted,
            write_errors=self._writer.num_errors,
            is_saving=not self._writer.is_failed,
        )

    def flush(self) -> None:
        """Wait until what was copied is written."""
        self._writer.flush()

    def close(self, *, limit_s: float = SAVE_S) -> None:
        """Save what was used most recently, partial blocks included, for so many seconds at most, and end the threads.

        Closing twice is fine.
        """
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + limit_s
        self._loader.close()
        self._reader.close()
        self._writer.note_streams(are_running=False)
        self._saver.save_all(deadline)
        self._writer.close(deadline)


def open_kv_disk(config: EngineConfig, cache: KvCache, pool: BlockPool, tree: PrefixTree) -> KvDisk | None:
    """Make the disk that `config` asks for; None if it asks for none, or if its folder cannot be used, which is logged."""
    if config.kv_disk is None:
        return None
    known: set[Path] = set()
    limit = config.kv_disk_size or DEFAULT_KV_DISK_SIZE
    folder = Folder(config.kv_disk, limit, on_evicted=known.difference_update)
    try:
        folder.make()
    except OSError as error:
        logger.warning("KV is not kept in %s: %s. Everything else works.", folder.path, error.strerror or error)
        return None
    return KvDisk(folder, known, cache, pool, tree)
