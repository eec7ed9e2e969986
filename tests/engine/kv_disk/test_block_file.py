"""A file is exactly the block that was asked for, or damaged."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from chatpage.engine.kv_disk.block_file import DamagedFile, decode, encode, max_file_size
from chatpage.engine.kv_disk.chain import Geometry, next_name, root_name

GEOMETRY = Geometry(model_id="m" * 64, layout="cpp bf16 4 2x8+8", block_size=4, num_bytes=96)
PARENT = root_name(GEOMETRY, "alice")
TOKENS = (7, 0, 2**40, 3)
KV = bytes(range(96))


def _file(**changes: object) -> bytearray:
    asked = {"geometry": GEOMETRY, "parent": PARENT, "tokens": TOKENS, "kv": memoryview(KV)} | changes
    return bytearray(b"".join(encode(**asked)))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_what_was_written_is_read(num_rows: int) -> None:
    block = decode(GEOMETRY, PARENT, _file(tokens=TOKENS[:num_rows]))
    assert block.tokens == TOKENS[:num_rows]
    assert block.kv == KV
    assert len(_file()) <= max_file_size(GEOMETRY)


def test_it_is_a_safetensors_file_that_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    path.write_bytes(_file())
    tensors = load_file(path)
    assert tensors["tokens"].tolist() == list(TOKENS)
    assert tensors["kv"].tobytes() == KV
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["model"] == GEOMETRY.model_id


@pytest.mark.parametrize(
    "other",
    [
        replace(GEOMETRY, model_id="n" * 64),
        replace(GEOMETRY, layout="cpp fp32 4 2x4+4"),
        replace(GEOMETRY, block_size=8),
        replace(GEOMETRY, num_bytes=95),
        replace(GEOMETRY, num_bytes=97),
    ],
    ids=["model", "layout and dtype", "block size", "smaller", "larger"],
)
def test_a_file_of_another_geometry_is_damaged(other: Geometry) -> None:
    with pytest.raises(DamagedFile):
        decode(other, PARENT, _file())


def test_a_file_behind_another_parent_is_damaged() -> None:
    """A file that was renamed to the name of another user's block must not become theirs."""
    for other in (root_name(GEOMETRY, "bob"), next_name(PARENT, TOKENS)):
        with pytest.raises(DamagedFile):
            decode(GEOMETRY, other, _file())


def test_every_flipped_bit_is_seen() -> None:
    whole = _file()
    for position in range(len(whole)):
        broken = bytearray(whole)
        broken[position] ^= 1 << random.Random(position).randrange(8)
        with pytest.raises(DamagedFile):
            decode(GEOMETRY, PARENT, broken)


def test_every_length_but_the_right_one_is_seen() -> None:
    whole = _file()
    for length in range(len(whole)):
        with pytest.raises(DamagedFile):
            decode(GEOMETRY, PARENT, whole[:length])
    with pytest.raises(DamagedFile):
        decode(GEOMETRY, PARENT, whole + b"\0")


@pytest.mark.parametrize(
    "header",
    [b"", b"null", b"[]", b"{}", b'{"__metadata__":{"sha256":1},"tokens":{"shape":[4]}}', b"[" * 60_000, b"\xff" * 16],
    ids=["empty", "null", "list", "no fields", "wrong types", "deep", "no text"],
)
def test_a_header_that_makes_no_sense_is_damage_and_no_crash(header: bytes) -> None:
    with pytest.raises(DamagedFile):
        decode(GEOMETRY, PARENT, len(header).to_bytes(8, "little") + header + bytes(200))
    with pytest.raises(DamagedFile):
        decode(GEOMETRY, PARENT, (2**63).to_bytes(8, "little") + header)


def test_names_differ_in_everything_that_matters() -> None:
    others = [replace(GEOMETRY, model_id="x"), replace(GEOMETRY, layout="x"), replace(GEOMETRY, block_size=5)]
    roots = {root_name(GEOMETRY, salt) for salt in ("", "alice", "bob")} | {root_name(other, "") for other in others}
    assert len(roots) == 6
    assert len({next_name(root, tokens) for root in roots for tokens in ((1, 2), (2, 1), (1,))}) == 18
