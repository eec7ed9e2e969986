"""`chatpage serve` and `chatpage key`."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from chatpage.cli_flags import with_engine_flags
from chatpage.config import EngineConfig

EXIT_INTERRUPTED = 130
_DataDir = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="where the conversations lie")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(serve)
    app.command()(key)


@with_engine_flags
def serve(
    *,
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="address to listen on; any but loopback needs API keys")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8642,
    data: _DataDir = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="a name this server answers to; may be repeated")] = None,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="pages that may call; may be repeated")] = None,
) -> None:
    """Serve the websocket and HTTP interfaces."""
    from chatpage.server.serve import serve as run
    from chatpage.server.settings import ServeSettings

    settings = ServeSettings(
        host=host,
        port=port,
        data_dir=data,
        allowed_hosts=tuple(allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
    )
    try:
        asyncio.run(run(config, settings, on_ready=lambda url: print(f"chatpage serves on {url}", file=sys.stderr, flush=True)))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def key(
    user: Annotated[str, typer.Argument(help="whose key; made if there is no such user")],
    name: Annotated[str, typer.Option(help="what the key is for")] = "",
    data: _DataDir = None,
) -> None:
    """Make an API key and print it, once."""
    from chatpage.store import Store, database_path

    with Store(database_path(data)) as store:
        owner = store.find_user(user) or store.create_user(user)
        print(store.create_api_key(owner.id, name)[1])
