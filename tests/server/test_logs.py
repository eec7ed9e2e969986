"""The log: a line per request, socket and run, without secrets and without what was said, unless that was asked for."""

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from chatpage.server.log_settings import LogFormat, LogLevel, LogSettings
from chatpage.server.logs import logging_to_stderr
from chatpage.server.settings import ServeSettings
from tests.server.serving import Served, dial, with_server

SECRET = "cp-" + "s3cr3t" * 7


def _lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: LogSettings) -> tuple[list[str], str]:
    """Serve a run and some requests; return the lines that were logged, and what the run said."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    said = []

    async def test(served: Served) -> None:
        chat = served.conversation()
        async with dial(served) as wire:
            run = await wire.reply(chat, "A very private question", params={"max_tokens": 8, "ignore_eos": True, "seed": 1})
            said.append((await wire.finish(run)).texts[0])
        with httpx.Client(base_url=served.url) as http:
            http.get("/api/search", params={"q": "private"}, headers={"Cookie": f"chatpage={SECRET}"})
            http.get(f"/x/{SECRET}%0aforged line", headers={"Authorization": f"Bearer {SECRET}"})

    with logging_to_stderr(settings):
        with_server(tmp_path, test, settings=ServeSettings(logs=settings))
    return stderr.getvalue().splitlines(), said[0]


def test_json_lines_tell_of_requests_sockets_and_runs_and_of_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, said = _lines(tmp_path, monkeypatch, LogSettings(format=LogFormat.JSON, level=LogLevel.INFO))
    entries = [json.loads(line) for line in lines]
    by_event: dict[str, Any] = {entry["event"]: entry for entry in entries}
    assert by_event["run started"]["kind"] == "reply"
    ended = by_event["run ended"]
    assert (ended["status"], ended["tokens"], ended["user"]) == ("complete", 8, "local")
    assert by_event["socket"]["path"] == "/ws"
    search = next(entry for entry in entries if entry.get("path") == "/api/search")
    assert (search["method"], search["status"], search["level"]) == ("GET", 200, "info")
    together = "\n".join(lines)
    assert SECRET not in together
    assert "private" not in together
    assert json.dumps(said, ensure_ascii=False)[1:-1] not in together


def test_text_lines_stay_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with a line break could forge a line."""
    lines, _ = _lines(tmp_path, monkeypatch, LogSettings(level=LogLevel.INFO))
    assert all(line[:2] == "20" for line in lines)
    assert any("chatpage.requests: request path=/x/cp-***%0aforged%20line" in line for line in lines)
    assert SECRET not in "\n".join(lines)


def test_what_is_said_is_logged_if_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, said = _lines(tmp_path, monkeypatch, LogSettings(format=LogFormat.JSON, level=LogLevel.INFO, with_text=True))
    entries = {entry["event"]: entry for entry in map(json.loads, lines)}
    assert entries["run started"]["input"] == "A very private question"
    assert entries["run ended"]["texts"] == [said]


def test_a_warning_level_is_silent_while_all_goes_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _lines(tmp_path, monkeypatch, LogSettings())[0] == []


def test_an_exception_is_one_json_line_and_handlers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    for _ in range(2):
        with logging_to_stderr(LogSettings(format=LogFormat.JSON)):
            try:
                raise ValueError(f"what {SECRET} did")
            except ValueError:
                logging.getLogger("chatpage.test").exception("It failed")
    lines = [json.loads(line) for line in stderr.getvalue().splitlines()]
    assert len(lines) == 2
    assert "ValueError: what cp-*** did" in lines[0]["error"]
