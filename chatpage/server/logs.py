"""What the server writes about what goes on: one line per request, run and event of the engine, as text or as JSON.

Invariant: no line has a key, a cookie or a query string, and none the text of a conversation, unless that was asked for; a line
is one line, whatever a client sends.
"""

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from chatpage.runs import RunLog
from chatpage.server.log_settings import LogFormat, LogSettings
from chatpage.server.views import RunRequest
from chatpage.store.records import RunStatus

_SECRET = re.compile(r"\bcp-[\w-]{20,}")
_OWN = "chatpage"


@contextlib.contextmanager
def logging_to_stderr(settings: LogSettings) -> Iterator[None]:
    """Write what is logged to stderr: ours from the level on, that of libraries from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format is LogFormat.JSON else TextFormatter())
    root, own = logging.getLogger(), logging.getLogger(_OWN)
    before = own.level
    root.addHandler(handler)
    own.setLevel(settings.level.upper())
    try:
        yield
    finally:
        own.setLevel(before)
        root.removeHandler(handler)


def log_event(logger: logging.Logger, level: int, event: str, **fields: Any) -> None:
    """Log an event with its fields; those that are None are left out."""
    logger.log(level, event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "event", ...fields, "error"?}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _without_secrets(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: event name=value ...`, and a traceback below if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_time(record)} {record.levelname:<7} {record.name}: {_one_line(record.getMessage())}"]
        parts += [f"{name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items()]
        text = " ".join(parts)
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return _without_secrets(text)


class RunLogger:
    """Logs every run when it starts and when it ends."""

    def __init__(self, *, with_text: bool) -> None:
        self._with_text = with_text
        self._logger = logging.getLogger(f"{_OWN}.runs")

    def run_started(self, log: RunLog, request: RunRequest) -> None:
        created = log.created
        log_event(
            self._logger,
            logging.INFO,
            "run started",
            run=created.run_id,
            user=log.user_id,
            conversation=created.conversation_id,
            kind=str(created.kind),
            n=len(log.samples),
            prompt_tokens=created.prefix.tokens if created.prefix else None,
            input=request.input if self._with_text else None,
        )

    def run_ended(self, log: RunLog, status: RunStatus) -> None:
        first = min((s.finished.ttft_s for s in log.samples if s.finished and s.finished.ttft_s is not None), default=None)
        log_event(
            self._logger,
            logging.WARNING if status is RunStatus.ERROR else logging.INFO,
            "run ended",
            run=log.run_id,
            user=log.user_id,
            status=str(status),
            finish_reasons=[sample.done.finish_reason if sample.done else None for sample in log.samples],
            tokens=sum(len(sample.token_ids) for sample in log.samples),
            ttft_ms=None if first is None else round(first * 1e3, 1),
            texts=[sample.text for sample in log.samples] if self._with_text else None,
        )


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(text, ensure_ascii=False) if re.search(r'[\s"]', text) and isinstance(value, str) else text


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _without_secrets(text: str) -> str:
    return _SECRET.sub("cp-***", text)
