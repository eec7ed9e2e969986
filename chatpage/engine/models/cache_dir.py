"""The folder where chatpage keeps what it can make again: the default model, and converted GGUF files.

Invariant: what is published there is complete. A folder or file is made beside its place and moved there in one step; a crash
leaves only a `.partial` entry, which the next process removes.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from chatpage.errors import ConfigError

CACHE_DIR_VARIABLE = "CHATPAGE_CACHE_DIR"


def cache_dir() -> Path:
    """Return `$CHATPAGE_CACHE_DIR`, else the cache folder of the user's platform.

    Raises:
        ConfigError: The variable names the home of a user who does not exist.
    """
    given = os.environ.get(CACHE_DIR_VARIABLE)
    try:
        return Path(given).expanduser() if given else user_cache_path("chatpage")
    except RuntimeError as error:
        raise ConfigError(f"{CACHE_DIR_VARIABLE} is {given!r}, which names no folder: {error}.") from error


@contextlib.contextmanager
def publishing(target: Path) -> Iterator[Path | None]:
    """Hold the lock of `target` and give a fresh folder to fill, or None if `target` exists (perhaps made while we waited).

    When the block ends without an error the folder is moved to `target`; otherwise it is removed.

    Raises:
        ConfigError: The cache folder cannot be written.
    """
    if target.exists():  # what is published is complete, so a cache that cannot be written still serves
        yield None
        return
    partial = target.with_name(target.name + ".partial")
    with locked(target):
        if target.exists():
            yield None
            return
        shutil.rmtree(partial, ignore_errors=True)  # left behind by a process that was killed
        partial.mkdir(parents=True)
        try:
            yield partial
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Keep other processes from making `target` at the same time.

    Raises:
        ConfigError: The cache folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(target.name + ".lock"))
        lock.acquire()
    except OSError as error:
        raise ConfigError(
            f"The cache folder {target.parent} cannot be written ({error.strerror}): "
            f"set {CACHE_DIR_VARIABLE} to a folder that can."
        ) from error
    try:
        yield
    finally:
        lock.release()
