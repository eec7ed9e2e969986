"""Compiles the C++ sources into one shared library, in a cache folder that several processes may use at once.

Invariant: a file named `*.so` in the cache is a whole library. It is written under another name and renamed when complete,
so a reader needs no lock; the lock only keeps two processes from doing the same work.

The name says what went in, so nothing is ever rebuilt in place:

    kernels-avx512_bf16-<sources, options, torch>-<compiler>.so
"""

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from chatpage_kernels.cpu.features import Isa

CACHE_VARIABLE = "CHATPAGE_CACHE_DIR"
SOURCES = Path(__file__).parent

_OPTIONS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden")
_COMPILE_SECONDS = 300.0
_PATIENCE_SECONDS = _COMPILE_SECONDS + 10  # for a lock
_POLL_SECONDS = 0.05


class BuildError(Exception):
    """The kernels cannot be compiled; the message says why, for people."""


class BuildAbandoned(Exception):
    """The program ended before the compiler did; nobody is left to be told."""


_is_exiting = threading.Event()


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Args:
        path: The program.
        version: First line of what `--version` prints.
    """

    path: str
    version: str


def cache_dir() -> Path:
    """Return the folder for built libraries: in $CHATPAGE_CACHE_DIR, else in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "chatpage" / "kernels"


def find_compiler() -> Compiler:
    """Return $CXX, or the first C++ compiler on the PATH.

    Raises:
        BuildError: There is none, or it does not run.
    """
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", "c++", "clang++"]
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        raise BuildError(f"no C++ compiler was found (looked for {', '.join(names)}); install g++ to speed up attention")
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"the C++ compiler {path} does not run: {error}") from error
    return Compiler(path, answer.stdout.partition("\n")[0])


def find_built(isa: Isa, compiler: Compiler | None) -> Path | None:
    """Return the library that this compiler (None: any) built for the instruction set from the present sources."""
    if compiler is not None:
        path = _library_path(isa, compiler)
        return path if path.is_file() else None
    return next(iter(sorted(cache_dir().glob(f"kernels-{isa.name}-{_sources_key(isa)}-*.so"))), None)


def compile_library(isa: Isa, compiler: Compiler) -> Path:
    """Return the library for the instruction set, compiled unless another process has done so meanwhile.

    Raises:
        BuildError: The compiler fails, takes longer than 5 minutes, or the cache folder cannot be written.
    """
    target = _library_path(isa, compiler)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not target.is_file():
                _remove_leftovers(target)
                _compile(isa, compiler, target)
    except OSError as error:
        raise BuildError(f"the compiled kernels cannot be kept in {target.parent}: {error.strerror}") from error
    return target


def _compile(isa: Isa, compiler: Compiler, target: Path) -> None:
    partial = target.with_suffix(f".{os.getpid()}.partial")
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    command = [compiler.path, *_OPTIONS, *isa.options, "-w", *sources, "-o", str(partial)]
    # In a session of its own, so that the programs which a compiler starts can be ended with it.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    abandon = functools.partial(_abandon, process)
    atexit.register(abandon)  # the thread that waits here dies with the interpreter, and cleans nothing up
    try:
        # Answers are being computed meanwhile: they go first.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, 10)
        _, messages = process.communicate(timeout=_COMPILE_SECONDS)
        if _is_exiting.is_set():
            raise BuildAbandoned
        if process.returncode != 0:
            raise BuildError(f"{compiler.path} failed with code {process.returncode}: {_first_error(messages)}")
        partial.replace(target)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{compiler.path} took longer than {_COMPILE_SECONDS:.0f} seconds") from error
    finally:
        atexit.unregister(abandon)
        _kill(process)
        assert process.stderr is not None
        process.stderr.close()
        partial.unlink(missing_ok=True)


def _abandon(process: subprocess.Popen[str]) -> None:
    """The interpreter exits: stop the compiler, and let the thread that reads from it end without a word."""
    _is_exiting.set()
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _first_error(messages: str) -> str:
    lines = messages.splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "it printed nothing")[:500]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a build. The system drops it when its holder dies, so a file left behind locks nothing.

    Whoever waits longer than a compiler may take goes on without: both then build the same file, and the later rename wins.
    """
    import fcntl  # not on Windows, where no kernels are built

    with path.open("a") as stream:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks
                break
        yield


def _remove_leftovers(target: Path) -> None:
    """Delete what builders that were killed left behind. Called under the lock, so none of them is at work."""
    for partial in target.parent.glob(f"{target.stem}.*.partial"):
        partial.unlink(missing_ok=True)


def _library_path(isa: Isa, compiler: Compiler) -> Path:
    made_by = hashlib.sha256(f"{compiler.path}\n{compiler.version}".encode()).hexdigest()[:8]
    return cache_dir() / f"kernels-{isa.name}-{_sources_key(isa)}-{made_by}.so"


def _sources_key(isa: Isa) -> str:
    digest = hashlib.sha256("\n".join([torch.__version__, *_OPTIONS, *isa.options]).encode())
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
