"""`chatpage kv`: what the server keeps of its KV on disk."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatpage.cli_accounts import DataDir
from chatpage.config import DEFAULT_KV_DISK_SIZE, EngineConfig

if TYPE_CHECKING:
    from chatpage.engine.kv_disk.folder import Folder

KvDir = Annotated[Path | None, typer.Option("--kv-disk", metavar="DIR", help="the folder (default: that of the server)")]
kv = typer.Typer(
    help="KV that outlives the server.", no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)


def default_kv_disk(data: Path | None) -> Path:
    """Return where `chatpage serve` keeps KV: beside the conversations it came from, because it is as private as they are."""
    from chatpage.store import database_path

    return database_path(data).with_name("kv")


def with_kv_disk(config: EngineConfig, data: Path | None) -> EngineConfig:
    """Return `config` with the server's folder unless it names one, or says off."""
    if "kv_disk" in config.model_fields_set:
        return config
    return config.model_copy(update={"kv_disk": default_kv_disk(data)})


@kv.command("info")
def info(kv_disk: KvDir = None, data: DataDir = None) -> None:
    """Print the folder, its blocks, its bytes, and what is free on its disk."""
    folder = _open(kv_disk, data)
    files = folder.files()
    print(f"folder\t{folder.path}")
    print(f"blocks\t{len(files):,}")
    print(f"bytes\t{sum(file.num_bytes for file in files):,} of {folder.limit:,}")
    if folder.path.exists():
        print(f"free there\t{shutil.disk_usage(folder.path).free:,}")
    if files:
        for name, moment in (("oldest use", files[0].used_ns), ("latest use", files[-1].used_ns)):
            print(f"{name}\t{datetime.fromtimestamp(moment / 1e9, UTC):%Y-%m-%d %H:%M} UTC")


@kv.command("clear")
def clear(kv_disk: KvDir = None, data: DataDir = None) -> None:
    """Remove every block; what they held is computed again when it is needed."""
    folder = _open(kv_disk, data)
    files = folder.files()
    folder.clear()
    print(f"{len(files):,} blocks removed, {sum(file.num_bytes for file in files):,} bytes, from {folder.path}")


def _open(kv_disk: Path | None, data: Path | None) -> "Folder":
    from chatpage.engine.kv_disk.folder import Folder

    config = with_kv_disk(EngineConfig.load(kv_disk=kv_disk), data)
    return Folder(config.kv_disk or default_kv_disk(data), config.kv_disk_size or DEFAULT_KV_DISK_SIZE)
