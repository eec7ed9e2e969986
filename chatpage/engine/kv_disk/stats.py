"""What lies on disk and what came of it, as numbers. Loads no torch: it is part of `EngineStats`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvDiskStats:
    """Totals since the engine started, but for what lies on disk now.

    Args:
        folder: Where the files lie.
        limit: Bytes they may take.
        blocks: On disk, of every model and process that uses the folder, as counted last.
        bytes: Likewise.
        saved_blocks: Written by this engine.
        loaded_blocks: Read back into memory.
        loaded_tokens: The tokens in them: so many were not computed again.
        damaged_files: Found damaged and removed; each was a miss.
        evicted_blocks: Removed by this engine to stay under the limit.
        write_errors: Of the disk; after each, saving pauses for up to a minute.
        is_saving: False from an error of the disk until a block could be written again: the engine goes on without.
    """

    folder: str
    limit: int
    blocks: int
    bytes: int
    saved_blocks: int
    loaded_blocks: int
    loaded_tokens: int
    damaged_files: int
    evicted_blocks: int
    write_errors: int
    is_saving: bool
