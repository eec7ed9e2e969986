"""The C++ kernels are built once, in the background, whoever builds beside us; without a compiler torch goes on, and says why.

The compiler of these tests is a shell script that notes each call and then copies a library that was really built.
"""

import ctypes
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chatpage_kernels.cpu import build, features, toolchain
from chatpage_kernels.cpu.build import Builder, State
from tests.kernels.cpu_libraries import best_kernels

_SCRIPT = """#!/bin/sh
if [ "$1" = --version ]; then echo "fake compiler 1.0"; exit 0; fi
echo "$*" >> "{log}"
{action}
for last; do :; done
cp "{library}" "$last"
"""

_BUILD = """
import sys
from chatpage_kernels.cpu import build
print("ready" if build.wait(60) else build.describe())
"""


class FakeCompiler:
    """A compiler in a folder of its own, and a cache folder that is empty at first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._log = folder / "fake-c++", folder / "calls"
        self._library = best_kernels().library.path  # before the cache folder changes
        self.cache = folder / "cache" / "kernels"
        monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(folder / "cache"))
        monkeypatch.setenv("CXX", str(self.path))
        self.do("")

    def do(self, action: str) -> None:
        """Let each compilation run a line of shell before it ends."""
        self.path.write_text(_SCRIPT.format(log=self._log, action=action, library=self._library))
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    @property
    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("*.so"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    return FakeCompiler(tmp_path, monkeypatch)


def _start_process(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


def _wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.01)


def test_the_first_answer_never_waits_for_the_compiler(compiler: FakeCompiler, tmp_path: Path) -> None:
    compiler.do(f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.01; done')
    lines: list[str] = []
    builder = Builder(lines.append)
    builder.start()
    builder.start()
    assert builder.library is None
    assert "in the background" in builder.describe()
    (tmp_path / "go").touch()
    library = builder.wait(60)
    assert library is not None
    assert builder.state is State.READY
    assert len(compiler.calls) == 1
    assert [line.split()[0] for line in lines] == ["Compiling", "Attention"]
    assert library.isa in builder.describe()


def test_what_was_built_once_is_ready_at_once(compiler: FakeCompiler) -> None:
    assert Builder().wait(60) is not None
    later = Builder()
    later.start()
    assert later.state is State.READY
    assert len(compiler.calls) == 1


def test_what_was_built_once_serves_where_the_compiler_has_gone(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image that was built with a compiler and runs without one."""
    assert Builder().wait(60) is not None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    later = Builder()
    later.start()
    assert later.state is State.READY


@pytest.mark.parametrize("cxx", [None, "no-such-compiler"])
def test_without_a_compiler_torch_goes_on_and_says_why_once(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cxx: str | None
) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    if cxx:
        monkeypatch.setenv("CXX", cxx)
    builder = Builder()
    with caplog.at_level(logging.WARNING):
        assert builder.wait(60) is None
        builder.start()
    assert builder.state is State.FAILED
    assert f"no C++ compiler was found (looked for {cxx or 'g++, c++, clang++'})" in builder.describe()
    assert len([record for record in caplog.records if "no C++ compiler" in record.message]) == 1
    assert compiler.calls == []


def test_a_compiler_that_does_not_run_is_no_compiler(compiler: FakeCompiler) -> None:
    compiler.path.write_text("#!/bin/sh\nexit 3\n")
    builder = Builder()
    assert builder.wait(60) is None
    assert "does not run" in builder.describe()


def test_a_failing_compiler_is_quoted(compiler: FakeCompiler) -> None:
    compiler.do('echo "attention.cpp:1: note: hm" >&2; echo "attention.cpp:2: error: no such thing" >&2; exit 1')
    builder = Builder()
    assert builder.wait(60) is None
    assert "failed with code 1: attention.cpp:2: error: no such thing" in builder.describe()
    assert list(compiler.cache.glob("*.partial")) == compiler.libraries == []


def test_a_compiler_too_old_for_the_best_instructions_builds_for_the_next(compiler: FakeCompiler) -> None:
    isas = features.usable_isas()
    if len(isas) < 2:
        pytest.skip("this CPU has only one instruction set to choose")
    newest = isas[0].options[-1]
    compiler.do(f'case "$*" in *{newest}*) echo "error: unrecognized option {newest}" >&2; exit 1;; esac')
    builder = Builder()
    library = builder.wait(60)
    assert library is not None
    assert library.isa == isas[1].name
    assert f"unrecognized option {newest}" in builder.describe()


def test_a_compiler_that_hangs_is_ended_with_all_it_started(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """g++ is a driver: killing it alone leaves the real compiler running, with nobody to take its result."""
    monkeypatch.setattr(toolchain, "_COMPILE_SECONDS", 0.5)
    compiler.do(f'sleep 100 & echo $! > "{tmp_path}/child"; wait')
    with pytest.raises(toolchain.BuildError, match="took longer than"):
        toolchain.compile_library(features.usable_isas()[0], toolchain.find_compiler())
    child = int((tmp_path / "child").read_text())
    _wait_until(lambda: not _is_running(child))


def _is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_two_processes_that_need_the_kernels_at_once_compile_them_once(compiler: FakeCompiler, tmp_path: Path) -> None:
    compiler.do(f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.01; done')
    processes = [_start_process(_BUILD) for _ in range(2)]
    _wait_until(lambda: bool(compiler.calls))
    time.sleep(0.5)  # the other one may come and wait; if it is slower than this it finds the library: just as good
    (tmp_path / "go").touch()
    assert [process.communicate(timeout=120)[0].strip() for process in processes] == ["ready", "ready"]
    assert len(compiler.calls) == 1
    assert len(compiler.libraries) == 1


def test_a_builder_that_was_killed_blocks_nobody_and_leaves_nothing(compiler: FakeCompiler, tmp_path: Path) -> None:
    """A lock that is a file outlives its holder: the next start waited for a process that was gone."""
    isa = features.usable_isas()[0]
    compiler.do(f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.01; done')
    process = _start_process(_BUILD)
    _wait_until(lambda: bool(compiler.calls))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    (tmp_path / "go").touch()  # the orphaned compiler ends, and leaves its result under its own name
    _wait_until(lambda: bool(list(compiler.cache.glob("*.partial"))))
    assert list(compiler.cache.glob("*.lock"))
    built = toolchain.compile_library(isa, toolchain.find_compiler())
    assert compiler.libraries == [built]
    assert not list(compiler.cache.glob("*.partial"))


def test_a_holder_that_never_lets_go_is_not_waited_for_forever(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    isa, found = features.usable_isas()[0], toolchain.find_compiler()
    lock = toolchain.compile_library(isa, found).with_suffix(".lock")
    compiler.libraries[0].unlink()
    monkeypatch.setattr(toolchain, "_COMPILE_SECONDS", 5.0)
    monkeypatch.setattr(toolchain, "_PATIENCE_SECONDS", 0.1)
    with lock.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert toolchain.compile_library(isa, found).is_file()


def test_a_damaged_library_is_built_anew(compiler: FakeCompiler, caplog: pytest.LogCaptureFixture) -> None:
    damaged = toolchain.compile_library(features.usable_isas()[0], toolchain.find_compiler())
    damaged.write_bytes(b"\x7fELF and then nothing")
    with caplog.at_level(logging.WARNING):
        assert Builder().wait(60) is not None
    assert any("cannot be loaded" in record.message for record in caplog.records)
    assert len(compiler.calls) == 2


def test_a_cache_folder_that_cannot_be_written_is_the_reason(compiler: FakeCompiler, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    builder = Builder()
    assert builder.wait(60) is None
    assert "cannot be kept in" in builder.describe()


def test_other_sources_or_another_compiler_get_another_library(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    isa, found = features.usable_isas()[0], toolchain.find_compiler()
    first = toolchain.compile_library(isa, found)
    newer = toolchain.Compiler(found.path, "fake compiler 2.0")
    assert toolchain.find_built(isa, newer) is None
    assert toolchain.find_built(isa, None) == first
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in toolchain.SOURCES.iterdir():
        if path.suffix in {".cpp", ".h"}:
            (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(toolchain, "SOURCES", sources)
    assert toolchain.find_built(isa, found) == first
    with (sources / "tile.h").open("a") as stream:
        stream.write("// changed\n")
    assert toolchain.find_built(isa, found) is None
    assert toolchain.find_built(isa, None) is None


def test_libraries_are_kept_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(toolchain.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert toolchain.cache_dir() == tmp_path / ".cache" / "chatpage" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert toolchain.cache_dir() == tmp_path / "xdg" / "chatpage" / "kernels"
    monkeypatch.setenv(toolchain.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert toolchain.cache_dir() == tmp_path / "mine" / "kernels"


def test_an_instruction_set_is_offered_only_with_all_it_needs(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma f16c avx512f\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert [isa.name for isa in features.usable_isas(features.cpu_flags(cpuinfo))] == ["avx2"]
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert features.usable_isas(features.cpu_flags(cpuinfo)) == []
    assert features.cpu_flags(tmp_path / "absent") == frozenset()


def test_other_systems_and_cpus_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "usable_isas", lambda: [])
    assert "neither AVX-512 nor AVX2" in features.why_unsupported()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "not darwin" in features.why_unsupported()
    builder = Builder()
    builder.start()
    assert builder.state is State.FAILED
    assert "not darwin" in builder.describe()


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    """Structs that do not match would be read as addresses: the sizes are compared before the first call."""
    from chatpage_kernels.cpu import library

    path = best_kernels().library.path

    class Longer(library.WriteCall):
        _fields_ = (("more", ctypes.c_int64),)

    original = library.WriteCall
    library.WriteCall = Longer  # type: ignore[misc]
    try:
        with pytest.raises(OSError, match="other structs"):
            library.Library(path, "any")
    finally:
        library.WriteCall = original  # type: ignore[misc]
    other = tmp_path / "other.so"
    other.write_bytes((Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so").read_bytes())
    with pytest.raises(OSError, match="lacks the function"):
        library.Library(other, "any")


def test_kernels_bring_no_second_openmp() -> None:
    """A second OpenMP runtime in the process would have threads of its own that spin and fight torch's for the cores."""
    best_kernels()
    runtimes = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "omp" in line.rpartition("/")[2] and ".so" in line
    }
    assert len(runtimes) == 1


def test_the_backend_of_this_process_is_the_built_one() -> None:
    from chatpage_kernels import select_backend

    if build.wait(300) is None:
        pytest.skip(build.describe())
    backend = select_backend("cpu", torch.bfloat16, head_dim=64)
    assert backend.name == "cpp"
    assert backend.reason == build.describe()
    assert backend.successor() is None
    refused = select_backend("cpu", torch.bfloat16, head_dim=64, kv_dtype=torch.float8_e5m2)
    assert refused.name == "reference"
    assert "float8_e5m2" in refused.reason
    odd = select_backend("cpu", torch.float32, head_dim=5)
    assert (odd.name, "even head size" in odd.reason) == ("reference", True)


def test_a_backend_that_becomes_ready_takes_over(
    compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from chatpage_kernels import select_backend

    compiler.do(f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.01; done')
    builder = Builder()
    monkeypatch.setattr(build, "_builder", builder)
    first = select_backend("cpu", torch.bfloat16, head_dim=64)
    assert first.name == "reference"
    assert "in the background" in first.reason
    assert first.successor() is None
    assert build.is_running()
    (tmp_path / "go").touch()
    assert builder.wait(60) is not None
    assert not build.is_running()
    better = first.successor()
    assert better is not None
    assert better.name == "cpp"
