"""chatpage: a chat whose conversations are trees over shared, copy-on-write KV-cache blocks.

Importing this package is cheap; torch is loaded when an engine is.
"""

from typing import TYPE_CHECKING, Any

from chatpage.config import EngineConfig
from chatpage.errors import ChatpageError
from chatpage.events import (
    FinishReason,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SampleFinished,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from chatpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chatpage.engine.core import Engine
    from chatpage.engine.loop import AsyncEngine

__version__ = "0.1.0"

__all__ = [
    "AsyncEngine",
    "ChatpageError",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "RequestFailed",
    "RequestFinished",
    "RequestStarted",
    "SampleFinished",
    "SamplingParams",
    "TokenDelta",
    "TokenLogprob",
    "Usage",
]

_LAZY = {"Engine": "chatpage.engine.core", "AsyncEngine": "chatpage.engine.loop"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
