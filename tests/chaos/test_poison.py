"""Poison reaches what can be made anew, and never the conversations."""

import random
from pathlib import Path

import pytest

from chatpage.chaos.poison import poison_blocks, poison_state
from chatpage.store import LOCAL_USER, Store, database_path


def test_every_block_file_is_damaged_in_some_way(tmp_path: Path) -> None:
    shard = tmp_path / "kv-v1" / "3f"
    shard.mkdir(parents=True)
    names = [f"{i}.safetensors" for i in range(40)]
    for number, name in enumerate(names):
        (shard / name).write_bytes(bytes([number]) * 100)
    assert poison_blocks(tmp_path, random.Random(1), share=1.0) == 40
    whole = [
        name for i, name in enumerate(names) if (shard / name).is_file() and (shard / name).read_bytes() == bytes([i]) * 100
    ]
    assert len(whole) <= 4  # a file that was swapped with itself
    assert any((shard / name).is_dir() for name in names)
    assert list((tmp_path / "kv-v1" / "0a").glob("*.tmp"))


@pytest.mark.parametrize("seed", range(10))
def test_conversations_outlive_poison(tmp_path: Path, seed: int) -> None:
    with Store(database_path(tmp_path)) as store:
        made = store.create_conversation(LOCAL_USER, title="Rivers")
    poison_blocks(tmp_path / "kv", random.Random(seed))
    poison_state(tmp_path, random.Random(seed))
    with Store(database_path(tmp_path)) as store:
        assert store.get_conversation(LOCAL_USER, made.id).title == "Rivers"
