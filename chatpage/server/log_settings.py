"""How the server logs; see `chatpage.server.logs`."""

from dataclasses import dataclass
from enum import StrEnum


class LogFormat(StrEnum):
    """Lines for people, or one JSON object per line for machines."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """`INFO` has a line per request and run, `WARNING` only what went wrong."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How to log.

    Args:
        format: Of the lines.
        level: What is below is left out.
        with_text: Write what users and models say into the lines of runs.
    """

    format: LogFormat = LogFormat.TEXT
    level: LogLevel = LogLevel.WARNING
    with_text: bool = False
