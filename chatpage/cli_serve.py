"""`chatpage serve`, `chatpage user`, `chatpage key` and `chatpage kv`."""

import asyncio
import gc
import sys
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from chatpage.cli_accounts import DataDir, keys, users
from chatpage.cli_flags import with_engine_flags
from chatpage.cli_kv import kv, with_kv_disk
from chatpage.config import EngineConfig
from chatpage.sampling_params import MAX_SAMPLES
from chatpage.server.log_settings import LogFormat, LogLevel, LogSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from chatpage.server.settings import ServeSettings

EXIT_INTERRUPTED = 130
_Samples = Annotated[int, typer.Option(min=1, max=MAX_SAMPLES, help="samples that a user may have per run")]
_Tokens = Annotated[int | None, typer.Option(min=1, help="tokens that a user may have per sample (default: what fits)")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(serve)
    app.add_typer(users, name="user")
    app.add_typer(keys, name="key")
    app.add_typer(kv, name="kv")


@with_engine_flags
def serve(
    *,
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="address to listen on; any but loopback needs users")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8642,
    data: DataDir = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="a name this server answers to; may be repeated")] = None,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="pages that may call; may be repeated")] = None,
    require_login: Annotated[bool, typer.Option("--require-login", help="ask for a login on loopback too")] = False,
    secure_cookies: Annotated[bool, typer.Option("--secure-cookies", help="browsers come by https, through a proxy")] = False,
    max_running_runs: Annotated[int, typer.Option(min=1, help="runs of a user that compute at once")] = 8,
    max_queued_runs: Annotated[int, typer.Option(min=0, help="runs of a user that wait; more are refused")] = 32,
    server_running_runs: Annotated[int, typer.Option(min=1, help="runs of all users that compute at once")] = 64,
    server_queued_runs: Annotated[int, typer.Option(min=0, help="runs of all users that wait; more are refused")] = 128,
    max_samples: _Samples = MAX_SAMPLES,
    max_tokens: _Tokens = None,
    keep_deleted: Annotated[int, typer.Option(metavar="DAYS", min=0, help="what was deleted can be restored so long")] = 30,
    log_format: Annotated[LogFormat, typer.Option(help="how to log")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="info: a line per request and run")] = LogLevel.WARNING,
    log_text: Annotated[bool, typer.Option("--log-text", help="log what is said, too")] = False,
) -> None:
    """Serve the page, and the websocket and HTTP interfaces."""
    from chatpage.server.logs import logging_to_stderr

    def settings() -> "ServeSettings":
        from chatpage.server.settings import ServeSettings
        from chatpage.session import SessionLimits

        return ServeSettings(
            host=host,
            port=port,
            data_dir=data,
            allowed_hosts=tuple(allowed_host or ()),
            allowed_origins=tuple(allowed_origin or ()),
            require_login=require_login,
            secure_cookies=secure_cookies,
            keep_deleted_days=keep_deleted,
            limits=SessionLimits(
                max_running_runs=max_running_runs,
                max_queued_runs=max_queued_runs,
                max_samples=max_samples,
                max_tokens=max_tokens,
                server_running_runs=server_running_runs,
                server_queued_runs=server_queued_runs,
            ),
            logs=logs,
        )

    logs = LogSettings(format=log_format, level=log_level, with_text=log_text)
    with logging_to_stderr(logs):
        try:
            asyncio.run(_serve(with_kv_disk(config, data), settings))
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)


async def _serve(config: EngineConfig, settings: "Callable[[], ServeSettings]") -> None:
    """Start the engine, whose process loads the model while this one imports the server and the page, which takes seconds."""
    from chatpage.engine.process import ProcessEngine

    engine = ProcessEngine(config)
    engine.begin()
    print("chatpage loads the model …", file=sys.stderr, flush=True)
    try:
        server = await asyncio.to_thread(import_module, "chatpage.server.serve")
        threading.Thread(target=_import_page, daemon=True).start()
        await server.serve(engine, settings(), extend=_mount_page, on_ready=_announce)
    finally:
        await engine.close()


def _import_page() -> None:
    import_module("chatpage_ui")


def _mount_page(app: "FastAPI") -> None:
    from chatpage_ui import mount_page

    mount_page(app)


def _announce(url: str) -> None:
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not walk a million objects again and again
    print(f"chatpage serves on {url}", file=sys.stderr, flush=True)
