"""Builds the C++ kernels once in the background and keeps the outcome of this process.

Invariant: the state only moves forward, idle -> running -> ready or failed; nobody but `wait` waits for it. Libraries that an
earlier process built are ready at once.
"""

import logging
import threading
import time
from collections.abc import Callable
from enum import Enum

from chatpage_kernels.cpu import features
from chatpage_kernels.cpu.library import Library
from chatpage_kernels.cpu.toolchain import BuildAbandoned, BuildError, Compiler, compile_library, find_built, find_compiler

log = logging.getLogger(__name__)


class State(Enum):
    IDLE = "idle"
    RUNNING = "running"
    READY = "ready"
    FAILED = "failed"


class Builder:
    """One attempt to get the kernels for this machine."""

    def __init__(self, on_progress: Callable[[str], None] | None = None) -> None:
        self._on_progress = on_progress or log.info
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._state = State.IDLE
        self._library: Library | None = None
        self._message = "the C++ kernels are not built yet"

    @property
    def state(self) -> State:
        return self._state

    @property
    def library(self) -> Library | None:
        """The kernels, once they are ready."""
        return self._library

    def describe(self) -> str:
        """Return what is the matter with the kernels, for people."""
        return self._message

    def start(self) -> None:
        """Load the kernels, or compile them in a thread of their own; later calls do nothing."""
        with self._lock:
            if self._state is not State.IDLE:
                return
            self._state = State.RUNNING
        problem = features.why_unsupported()
        if problem:
            self._fail(problem)
            return
        try:
            compiler, no_compiler = find_compiler(), None
        except BuildError as error:
            compiler, no_compiler = None, error
        for isa in features.usable_isas():
            if self._load_built(isa, compiler):
                return
        if compiler is None:
            self._fail(str(no_compiler))
            return
        self._message = "the C++ kernels are being compiled in the background; torch computes until they are ready"
        threading.Thread(target=self._compile, args=(compiler,), name="chatpage-build", daemon=True).start()

    def wait(self, timeout: float | None = None) -> Library | None:
        """Start, and wait until the outcome is known; return the kernels if there are any."""
        self.start()
        self._done.wait(timeout)
        return self._library

    def _load_built(self, isa: features.Isa, compiler: Compiler | None) -> bool:
        path = find_built(isa, compiler)
        if path is None:
            return False
        try:
            library = Library(path, isa.name)
        except OSError as error:  # damaged after it was built: build it anew
            log.warning("%s cannot be loaded and is removed: %s", path, error)
            path.unlink(missing_ok=True)
            return False
        self._succeed(library, f"C++ kernels for {isa.name}")
        return True

    def _compile(self, compiler: Compiler) -> None:
        problems = []
        for isa in features.usable_isas():
            self._on_progress(f"Compiling the C++ kernels for {isa.name} with {compiler.version} (once).")
            began = time.monotonic()
            try:
                library = Library(compile_library(isa, compiler), isa.name)
            except BuildAbandoned:
                return
            except (BuildError, OSError) as error:
                problems.append(f"{isa.name}: {error}")
                log.warning("The C++ kernels for %s cannot be built: %s", isa.name, error)
                continue
            seconds = time.monotonic() - began
            instead = f" (not for {'; '.join(problems)})" if problems else ""
            self._succeed(library, f"C++ kernels for {isa.name}, compiled in {seconds:.0f} s{instead}")
            return
        self._fail("; ".join(problems))

    def _succeed(self, library: Library, message: str) -> None:
        self._library, self._message, self._state = library, message, State.READY
        self._done.set()
        self._on_progress(f"Attention uses {message}.")

    def _fail(self, reason: str) -> None:
        self._message, self._state = f"torch computes attention: {reason}", State.FAILED
        self._done.set()
        log.warning("The C++ kernels cannot be used, attention will be slower: %s.", reason)


_builder = Builder()


def start() -> None:
    """Begin to get the kernels for this process; see `Builder.start`."""
    _builder.start()


def wait(timeout: float | None = None) -> Library | None:
    """Start, and wait until it is known whether there are kernels; see `Builder.wait`."""
    return _builder.wait(timeout)


def is_running() -> bool:
    """Whether a compiler is at work, so that there may be kernels later."""
    return _builder.state is State.RUNNING


def describe() -> str:
    """Return what is the matter with the kernels of this process, for people."""
    return _builder.describe()


def library() -> Library | None:
    """Return the kernels of this process, once they are ready."""
    return _builder.library
