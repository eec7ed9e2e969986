"""Whatever is wrong with a file, it is a miss, it is gone afterwards, and the answer is the same."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from chatpage.engine.kv_disk.block_file import encode
from chatpage.engine.kv_disk.chain import FORMAT, next_name, root_name
from chatpage.engine.kv_disk.saving import geometry_of
from chatpage.events import Usage
from tests.engine.kv_disk.engines import PROMPT, SIZE, ask, files_in, on_disk, open_engine, started

NUM_FULL = len(PROMPT) // SIZE
Damage = Callable[[Path], object]


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """The files of the blocks of PROMPT, in the order of the chain."""
    with started(tmp_path) as engine:
        ask(engine, PROMPT, max_tokens=1)
        geometry = geometry_of(engine._kv_cache, engine._root(""))
    by_parent = {path.name.split("-")[0]: path for path in files_in(tmp_path)}
    name, paths = root_name(geometry, ""), []
    for i in range(NUM_FULL):
        paths.append(by_parent[name.hex()])
        name = next_name(name, PROMPT[i * SIZE : (i + 1) * SIZE])
    assert len(files_in(tmp_path)) == NUM_FULL + 1
    return paths


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    engine = open_engine(None)
    return ask(engine, PROMPT)[0]


def _flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 16
    path.write_bytes(data)


def _cut(path: Path, length: int) -> None:
    os.truncate(path, length)


def _make_directory(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)


def _make_link(path: Path) -> None:
    """A link to a good file is not followed: who knows who may write there."""
    shutil.copy(path, path.parent.parent.parent / "good")
    path.unlink()
    path.symlink_to(path.parent.parent.parent / "good")


def _make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _take_another(path: Path) -> None:
    """Put a good file of another block in its place."""
    shutil.copy(next(other for other in files_in(path.parent.parent) if other != path), path)


def _say(old: bytes, new: bytes) -> Damage:
    """Change what the header says, to something of the same length."""
    assert len(old) == len(new)

    def damage(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old, new, 1))

    return damage


DAMAGES: dict[str, Damage] = {
    "empty": lambda path: _cut(path, 0),
    "one byte": lambda path: _cut(path, 1),
    "half": lambda path: _cut(path, path.stat().st_size // 2),
    "last byte missing": lambda path: _cut(path, path.stat().st_size - 1),
    "a byte too many": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "bit flipped in the header": lambda path: _flip(path, 0.05),
    "bit flipped in the length": lambda path: _flip(path, 0.0),
    "bit flipped in the values": lambda path: _flip(path, 0.6),
    "last bit flipped": lambda path: _flip(path, 1.0),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "noise": lambda path: path.write_bytes(random.Random(1).randbytes(path.stat().st_size)),
    "text": lambda path: path.write_text("this is not what you are looking for"),
    "huge": lambda path: _cut(path, 2**30),
    "directory": _make_directory,
    "link": _make_link,
    "fifo": _make_fifo,
    "another block": _take_another,
    "another format": _say(FORMAT.encode(), b"chatpage-kv-9"),
    "another dtype": _say(b"torch.float32", b"torch.float16"),
    "another block size": _say(b'"block_size":"4"', b'"block_size":"8"'),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("index", [0, 4, NUM_FULL - 1])
def test_damage_is_a_miss_and_the_file_is_made_anew(
    tmp_path: Path, chain: list[Path], expected: tuple[int, ...], name: str, index: int
) -> None:
    """Truncated and foreign cache files crashed servers, or were loaded and poisoned every answer after them."""
    whole = chain[index].read_bytes()
    DAMAGES[name](chain[index])
    with started(tmp_path) as engine:
        answer, usage = ask(engine, PROMPT)
        assert answer == expected
        assert usage.cached_tokens == index * SIZE
        stats = on_disk(engine)
        assert stats.damaged_files == 1
        assert stats.is_saving
    assert chain[index].read_bytes() == whole
    with started(tmp_path) as engine:
        assert ask(engine, PROMPT) == (expected, _usage(40))


def _usage(cached: int) -> Usage:
    return Usage(len(PROMPT), cached, len(PROMPT) - cached, 12, 0)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_a_miss(tmp_path: Path, chain: list[Path], expected: tuple[int, ...]) -> None:
    chain[2].chmod(0)
    with started(tmp_path) as engine:
        answer, usage = ask(engine, PROMPT)
        assert (answer, usage.cached_tokens, on_disk(engine).damaged_files) == (expected, 2 * SIZE, 1)


def test_a_file_whose_bytes_were_changed_on_purpose_is_known_by_its_tokens(
    tmp_path: Path, chain: list[Path], expected: tuple[int, ...]
) -> None:
    """A digest that collides, or a file forged with a right checksum, must not answer for other tokens."""
    with started(None) as engine:
        geometry = geometry_of(engine._kv_cache, engine._root(""))
    parent = bytes.fromhex(chain[3].name.split("-")[0])
    forged = encode(geometry, parent, [1, 2, 3, 4], memoryview(bytes(geometry.num_bytes)))
    chain[3].write_bytes(b"".join(forged))
    with started(tmp_path) as engine:
        answer, usage = ask(engine, PROMPT)
        assert (answer, usage.cached_tokens, on_disk(engine).damaged_files) == (expected, 3 * SIZE, 1)


def test_the_blocks_of_another_model_in_their_place_are_a_miss(
    tmp_path: Path, chain: list[Path], expected: tuple[int, ...]
) -> None:
    for path in chain:
        data = path.read_bytes()
        start = data.index(b'"model":"') + 9
        path.write_bytes(data[:start] + b"0" * 64 + data[start + 64 :])
    with started(tmp_path) as engine:
        answer, usage = ask(engine, PROMPT)
        assert (answer, usage.cached_tokens) == (expected, 0)


def test_damage_in_a_partial_block_is_a_miss(tmp_path: Path, chain: list[Path], expected: tuple[int, ...]) -> None:
    (tail,) = set(files_in(tmp_path)) - set(chain)
    _flip(tail, 0.9)
    with started(tmp_path) as engine:
        answer, usage = ask(engine, [*PROMPT, 5])
        assert (usage.cached_tokens, on_disk(engine).damaged_files) == (40, 1)
    assert files_in(tmp_path) != []
    with started(None) as engine:
        assert ask(engine, [*PROMPT, 5])[0] == answer
