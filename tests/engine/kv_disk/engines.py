"""Engines on one folder, as a program that is started again and again would have them."""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.engine.kv_disk.disk import KvDisk
from chatpage.engine.kv_disk.stats import KvDiskStats
from chatpage.engine.models.loading import LoadedModel
from chatpage.events import Usage
from tests.engine.engines import assert_whole, finished, greedy, outputs, run_all, tiny_engine

PROMPT = [3 + (7 * i * i + 3 * i) % 250 for i in range(41)]
SIZE = 4  # tokens per block


@cache
def tiny_model() -> LoadedModel:
    return tiny_engine().model


def open_engine(folder: Path | None, *, model: LoadedModel | None = None, **settings: Any) -> Engine:
    """Make an engine with an empty, poisoned memory: what it knows, it has from `folder`."""
    defaults: dict[str, Any] = {
        "kv_memory": 2**20,
        "block_size": SIZE,
        "max_batched_tokens": 64,
        "max_num_seqs": 32,
        "check_integrity": True,
        "kv_disk": "off" if folder is None else folder,
    }
    engine = Engine(EngineConfig.load(**(defaults | settings)), model or tiny_model())
    engine.poison_free_rows()
    return engine


@contextlib.contextmanager
def started(folder: Path | None, **options: Any) -> Iterator[Engine]:
    """Run a program with an engine from its start to its end; the pool is whole again then."""
    engine = open_engine(folder, **options)
    try:
        yield engine
        run_all(engine)
        assert_whole(engine)
    finally:
        engine.close()


def ask(engine: Engine, prompt: Sequence[int], *, max_tokens: int = 12, cache_salt: str = "") -> tuple[tuple[int, ...], Usage]:
    """Return the greedy continuation of a prompt, and what it took."""
    request_id = engine.add_request(prompt, greedy(max_tokens=max_tokens), cache_salt=cache_salt)
    events = run_all(engine)
    return outputs(events, request_id)[0], finished(events, request_id).usage


def disk_of(engine: Engine) -> KvDisk:
    assert engine._disk is not None
    return engine._disk


def on_disk(engine: Engine) -> KvDiskStats:
    """Wait until everything is written, and return the numbers."""
    disk_of(engine).flush()
    stats = engine.stats().disk
    assert stats is not None
    return stats


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
