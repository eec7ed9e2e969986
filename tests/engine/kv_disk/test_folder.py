"""The folder is private, holds whole files only, and stays under its limit."""

import errno
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from chatpage.chaos.disks import Disk
from chatpage.engine.kv_disk.block_file import DamagedFile
from chatpage.engine.kv_disk.folder import Folder, Usage

NAMES = [bytes([i]) * 24 for i in range(20)]


def _folder(path: Path, limit: int = 10_000) -> Folder:
    folder = Folder(path / "kv", limit)
    folder.make()
    return folder


def _place(folder: Folder, name: bytes) -> Path:
    return folder.place(NAMES[0], name)


def _write(folder: Folder, name: bytes, size: int = 100) -> Path:
    path = _place(folder, name)
    folder.write(path, [bytes(size - 1), memoryview(b"x")], time.time_ns())
    return path


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    path = _write(folder, NAMES[1])
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (folder.path, path.parent, path)]
    assert modes == [0o700, 0o700, 0o600]


def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "kv" / "kv-v1").mkdir(parents=True, mode=0o755)
    assert stat.S_IMODE(_folder(tmp_path).path.stat().st_mode) == 0o700


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    """Whoever may write beside it could lead the files elsewhere."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "kv-v1").symlink_to(tmp_path)
    with pytest.raises(OSError, match="link"):
        _folder(tmp_path)


def test_what_was_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    path = _write(folder, NAMES[1])
    assert bytes(folder.read(path, 1000) or b"") == bytes(99) + b"x"
    assert os.listdir(path.parent) == [path.name]
    assert folder.read(_place(folder, NAMES[2]), 1000) is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills in the middle of a file once left half of it under its final name."""
    folder = _folder(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        _write(folder, NAMES[1])
    assert not folder.has(_place(folder, NAMES[1]))
    assert os.listdir(_place(folder, NAMES[1]).parent) == []
    assert folder.usage == Usage(0, 0)


@pytest.mark.parametrize("kind", ["directory", "link", "fifo", "too large"])
def test_what_is_no_file_of_ours_is_damage_and_can_be_removed(tmp_path: Path, kind: str) -> None:
    folder = _folder(tmp_path)
    path = _write(folder, NAMES[1], 200)
    if kind != "too large":
        path.unlink()
    if kind == "directory":
        path.mkdir()
        (path / "something").touch()
    elif kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(DamagedFile):
        folder.read(path, 150)
    folder.remove(path)
    assert not folder.has(path)
    assert tmp_path.is_dir()


def test_what_may_not_be_read_is_damage_but_a_process_out_of_descriptors_damages_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path)
    path = _write(folder, NAMES[1])
    codes = [errno.EACCES, errno.EMFILE]

    def fail(*_: object) -> int:
        code = codes.pop(0)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(DamagedFile, match="Permission denied"):
        folder.read(path, 1000)
    assert folder.read(path, 1000) is None
    assert codes == []


def test_a_directory_in_the_place_of_a_file_gives_way(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    _place(folder, NAMES[1]).mkdir(parents=True)
    assert folder.read(_write(folder, NAMES[1]), 1000)


@pytest.mark.parametrize("limit", [250, 1000, 1700])
def test_it_never_holds_more_than_its_limit(tmp_path: Path, limit: int) -> None:
    folder = _folder(tmp_path, limit)
    for name in NAMES:
        _write(folder, name)
        total = sum(file.num_bytes for file in folder.files())
        assert total <= limit
        assert folder.usage == Usage(total // 100, total)
        assert folder.has(_place(folder, name))
    assert folder.num_evicted == len(NAMES) - folder.usage.num_files > 0
    assert folder.usage.num_bytes > limit // 2 - 100


def test_a_block_larger_than_the_limit_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="--kv-disk-size"):
        _write(_folder(tmp_path, 50), NAMES[0])


def test_the_longest_unused_goes_first_and_of_a_chain_its_end(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    old, chain = [_place(folder, name) for name in NAMES[:2]], [_place(folder, name) for name in NAMES[2:6]]
    for path in (*chain, *old):
        folder.write(path, [bytes(100)], 10**15)
    folder.touch(old, 2 * 10**15)
    assert folder.touch([*chain, _place(folder, NAMES[9])], 3 * 10**15) == [_place(folder, NAMES[9])]
    order = [file.path for file in folder.files()]
    assert [path for path in order if path in chain] == chain[::-1]
    assert order.index(old[0]) < order.index(chain[0])
    folder.limit = 250
    folder.count()
    assert folder.has(chain[0])
    assert not folder.has(chain[3])
    folder.touch(chain[:1], 10**15)
    assert chain[0].stat().st_mtime_ns == 3 * 10**15  # an older use changes nothing


def test_what_was_used_later_does_not_make_room(tmp_path: Path) -> None:
    """Saved at the end, old conversations once pushed out the last one."""
    folder = _folder(tmp_path, 250)
    later = [folder.place(NAMES[0], name) for name in NAMES[:2]]
    for path in later:
        assert folder.write(path, [bytes(100)], 2 * 10**15)
    assert not folder.write(folder.place(NAMES[0], NAMES[2]), [bytes(100)], 10**15)
    assert sorted(file.path for file in folder.files()) == sorted(later)
    assert folder.write(folder.place(NAMES[0], NAMES[3]), [bytes(100)], 3 * 10**15)


def test_files_of_other_processes_count_too(tmp_path: Path) -> None:
    ours, theirs = _folder(tmp_path, 1000), _folder(tmp_path, 1000)
    for name in NAMES[:8]:
        _write(theirs, name)
    for name in NAMES[8:16]:
        _write(ours, name)
    assert sum(file.num_bytes for file in ours.files()) <= 1000


def test_what_a_crashed_writer_left_goes_when_it_is_old(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    shard = _write(folder, NAMES[1]).parent
    old, fresh = shard / "1-1-aa.tmp", shard / "1-2-bb.tmp"
    for path in (old, fresh):
        path.touch()
    os.utime(old, (1, 1))
    folder.count()
    assert (old.exists(), fresh.exists()) == (False, True)
    assert folder.usage == Usage(1, 100)


def test_clearing_removes_our_files_and_no_others(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    _write(folder, NAMES[1])
    other = tmp_path / "kv" / "letters.txt"
    other.touch()
    folder.clear()
    assert folder.files() == []
    assert other.exists()
    _write(folder, NAMES[2])


def test_what_follows_a_block_is_found_what_was_used_last_first(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    paths = [folder.place(NAMES[1], name) for name in NAMES[5:15]]
    for i, path in enumerate(paths):
        folder.write(path, [b"block"], i)
    folder.write(folder.place(NAMES[2], NAMES[5]), [b"block"], 99)
    assert folder.children_of(NAMES[1]) == paths[:1:-1]
    assert folder.children_of(NAMES[7]) == []


def test_a_part_of_the_disk_stays_free_for_what_matters_more(disk: Disk) -> None:
    """A limit of gigabytes on a small disk let the cache take all of it, and conversations could not be stored any more."""
    folder = _folder(disk.path, limit=2**33)
    for name in NAMES * 3:
        assert folder.write(_place(folder, name), [bytes(2**20)], time.time_ns())
        space = shutil.disk_usage(disk.path)
        assert space.free >= space.total // 8
    assert folder.has(_place(folder, NAMES[-1]))
    assert not folder.has(_place(folder, NAMES[0]))
    assert folder.num_evicted > 40


def test_the_cache_gives_way_to_what_others_wrote(disk: Disk) -> None:
    folder = _folder(disk.path, limit=2**33)
    for name in NAMES[:8]:
        folder.write(_place(folder, name), [bytes(2**20)], time.time_ns())
    with disk.full():
        assert folder.write(_place(folder, NAMES[8]), [bytes(2**10)], time.time_ns())
        assert shutil.disk_usage(disk.path).free > 2**20
        assert not folder.has(_place(folder, NAMES[0]))
        assert folder.has(_place(folder, NAMES[7]))


def test_a_disk_that_others_filled_takes_nothing_and_says_so(disk: Disk) -> None:
    folder = _folder(disk.path, limit=2**33)
    with disk.full(), pytest.raises(OSError, match="free for others") as caught:
        _write(folder, NAMES[1])
    assert caught.value.errno == errno.ENOSPC
    assert not folder.has(_place(folder, NAMES[1]))
