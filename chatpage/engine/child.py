"""The child process of `ProcessEngine`: an engine, and the pipe it obeys.

Invariants: the child lives as long as its parent holds the pipe; signals of the terminal are the parent's business. Commands
run between two steps, in order; each is answered at once; the events of a step go out as one message.

    parent ──> [Command, Command, ...] ──> engine          child ──> Report(replies, events) ──> parent
"""

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from chatpage.config import EngineConfig
from chatpage.engine.stats import EngineInfo
from chatpage.errors import ChatpageError, EngineStepError
from chatpage.events import Event

if TYPE_CHECKING:
    from chatpage.engine.core import Engine

Load = Callable[[EngineConfig | None], "Engine"]
IDLE_S = 0.5  # without a command, before an engine is replaced
METHODS = frozenset({"add_request", "fork", "abort", "prefix_cost", "prefix_blocks", "pin", "unpin", "stats", "block_map"})


@dataclass(frozen=True, slots=True)
class Command:
    """A call of a method of `Engine`; one of `METHODS`."""

    call_id: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a command returned or raised."""

    call_id: int
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is ready."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Report:
    """What happened since the last report."""

    replies: tuple[Reply, ...] = ()
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Died:
    """The engine could not be loaded, or a step of it went wrong beyond repair; the child ends."""

    error: Exception


def load_engine(config: EngineConfig | None) -> "Engine":
    """Load the model of `config`; torch is first imported here, in the child."""
    from chatpage.engine.core import Engine

    return Engine.load(config)


def main(pipe: Connection, load: Load, config: EngineConfig | None) -> None:
    """Run in the child until the parent says so, or is gone."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="chatpage-watch-parent", daemon=True).start()
    try:
        _main(pipe, load, config)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent is gone, and with it whoever wants the output of this process
    # Nothing is left to do, and taking torch apart would take seconds in which a restart has to wait.
    pipe.close()
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    """End at once when the parent is gone, even while a model loads, which can take minutes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _main(pipe: Connection, load: Load, config: EngineConfig | None) -> None:
    try:
        while _run_engine(load(config), pipe):
            gc.unfreeze()
            gc.collect()  # two at a time could be too large
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001 - `start` raises it, or every reader and caller is told by the parent
        pipe.send(Died(portable(error)))


def _run_engine(engine: "Engine", pipe: Connection) -> bool:
    """Serve until told to end, or until another engine would be better (True); commands wait in the pipe for that one."""
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not walk it again and again
    pipe.send(Loaded(engine.info()))
    is_replaceable = _serve(engine, pipe)
    engine.close()
    return is_replaceable


def _serve(engine: "Engine", pipe: Connection) -> bool:
    while True:
        while not engine.has_work or pipe.poll():
            while engine.is_interim and not engine.has_work and not pipe.poll(IDLE_S):
                if engine.is_replaceable:
                    return True
            commands = pipe.recv()
            if commands is None:
                return False
            pipe.send(Report(replies=tuple(_obey(engine, command) for command in commands)))
        if events := engine.step():
            pipe.send(Report(events=tuple(events)))


def _obey(engine: "Engine", command: Command) -> Reply:
    assert command.method in METHODS
    try:
        return Reply(command.call_id, getattr(engine, command.method)(*command.args, **command.kwargs))
    except Exception as error:  # noqa: BLE001 - it belongs to the caller, who waits for it
        return Reply(command.call_id, error=portable(error))


def portable(error: Exception) -> Exception:
    """Return the error itself if it is one of ours and survives the pipe, else one of ours that says the same."""
    if isinstance(error, ChatpageError):
        try:
            pickle.loads(pickle.dumps(error))
            return error
        except Exception:  # noqa: BLE001 - whatever it is, the text is enough
            return EngineStepError(str(error))
    return EngineStepError(f"{type(error).__name__}: {error}")


def _reduce_mapping(mapping: "MappingProxyType[Any, Any]") -> tuple[type, tuple[dict[Any, Any]]]:
    return MappingProxyType, (dict(mapping),)


# Sampling params hold their logit bias read-only, which pickle does not know. Only pickles of multiprocessing are concerned.
ForkingPickler.register(MappingProxyType, _reduce_mapping)
