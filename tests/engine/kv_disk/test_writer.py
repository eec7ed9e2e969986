"""What the thread that writes takes from whoever computes, and what it refuses to write."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from chatpage.engine.kv_disk import saving, writer
from chatpage.engine.kv_disk.chain import Geometry
from chatpage.engine.kv_disk.folder import Folder
from tests.engine.engines import greedy, run_all
from tests.engine.kv_disk.engines import PROMPT, SIZE, disk_of, open_engine


def test_beside_streams_little_waits_to_be_written_and_all_of_it_when_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation that ended took 64 MiB of copies at once, and a fifth of the speed of whoever went on."""
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES_BESIDE_STREAMS", 1)
    monkeypatch.setattr(writer, "_REST", 1e6)
    monkeypatch.setattr(saving, "_MAX_BATCH_BYTES", 1)  # one block at a time; those of a tiny model are tiny
    engine = open_engine(tmp_path)
    stream = engine.add_request([7, 8, 9], greedy(max_tokens=400))
    engine.add_request(PROMPT, greedy(max_tokens=1))
    waiting = disk_of(engine)._writer._waiting
    for _ in range(60):
        engine.step()
        assert len(waiting) <= 2
    assert disk_of(engine).stats().saved_blocks <= 1
    engine.abort(stream)
    run_all(engine)
    disk_of(engine).flush()
    assert disk_of(engine).stats().saved_blocks >= len(PROMPT) // SIZE
    engine.close()


class HungFolder(Folder):
    """A folder on a disk that answers nothing until it is let."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, 2**20)
        self.answers = threading.Event()
        self.num_touched = 0

    def touch(self, paths: Sequence[Path], used_ns: int) -> list[Path]:
        self.answers.wait()
        self.num_touched += 1
        return []


def test_what_waits_for_a_disk_that_hangs_is_bounded_uses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the blocks of each chain that was used were counted as nothing, and kept as long as the disk hung."""
    monkeypatch.setattr(writer, "MAX_WAITING_BYTES", 2**16)
    folder = HungFolder(tmp_path)
    work = writer.Writer(folder, on_missing=lambda _: None)
    paths = tuple(tmp_path / f"block{i}" for i in range(8))
    for used_ns in range(1000):
        work.touch(writer.Use(paths, used_ns))
    assert 8 < len(work._waiting) < 100
    assert not work.has_room(2**16)
    folder.answers.set()
    work.flush()
    assert 8 < folder.num_touched < 100
    assert work.has_room(2**16)
    assert work._waiting_bytes == 0
    work.close(time.monotonic() + 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_value_that_is_no_number_is_seen_in_every_dtype(dtype: torch.dtype, value: float) -> None:
    numbers = torch.linspace(-60_000.0, 60_000.0, 64).to(dtype)
    for bad in (False, True):
        if bad:
            numbers[17] = value
        kv = numbers.view(torch.uint8).numpy()
        block = writer.BlockToWrite(Path("block"), Geometry("model", "layout", 1, kv.nbytes), b"", [1], kv, dtype, 0)
        assert writer._is_finite(block) is not bad
