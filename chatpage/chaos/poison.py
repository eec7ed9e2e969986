"""Damage to the files that a server keeps beside its database, as crashes, full disks and bad disks leave them.

Invariant: the database and its log are never touched: they hold what nothing else holds.
"""

import contextlib
import random
import shutil
from pathlib import Path

from chatpage.store import database_path


def poison_blocks(kv: Path, chance: random.Random, share: float = 0.3) -> int:
    """Damage a share of the block files, and leave what crashed writers leave; return how many were damaged."""
    files = sorted(kv.rglob("*.safetensors"))
    damaged = 0
    for path in files:
        if chance.random() < share and path.is_file():
            with contextlib.suppress(OSError):  # the server removed it just now, or the disk is full
                _damage(path, files, chance)
                damaged += 1
    with contextlib.suppress(OSError):
        (kv / "kv-v1" / "0a").mkdir(parents=True, exist_ok=True)
        for name in ("99-0-half.tmp", "no-name.safetensors"):
            (kv / "kv-v1" / "0a" / name).write_bytes(chance.randbytes(1000))
    return damaged


def poison_state(data: Path, chance: random.Random) -> list[str]:
    """Damage what the next start finds beside the database of a server that is down; say what."""
    database = database_path(data)
    done = []
    if chance.random() < 0.5:
        database.with_name(database.name + ".lock").write_bytes(chance.randbytes(chance.choice([0, 1, 100, 5000])))
        done.append("lock")
    if chance.random() < 0.5:
        database.with_name(database.name + "-shm").write_bytes(chance.randbytes(32768))
        done.append("shm")
    if chance.random() < 0.2:
        kv = data / "kv" / "kv-v1"
        shutil.rmtree(kv, ignore_errors=True)
        kv.write_bytes(b"not a folder")
        done.append("kv folder")
    return done


def _damage(path: Path, files: list[Path], chance: random.Random) -> None:
    match chance.choice(["flip", "truncate", "empty", "swap", "folder"]):
        case "flip":
            data = bytearray(path.read_bytes() or bytes(1))
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        case "truncate":
            with path.open("r+b") as file:
                file.truncate(chance.randrange(path.stat().st_size + 1))
        case "empty":
            path.write_bytes(b"")
        case "swap":
            shutil.copyfile(chance.choice(files), path)
        case "folder":
            path.unlink()
            path.mkdir()
