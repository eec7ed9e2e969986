"""chatpage's own engine, without its server."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from chatpage.bench.peers.interface import Fork, Job, Peer, Resumed, Run, Sample, Setup
from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.errors import EngineStepError
from chatpage.events import RequestFailed, RequestFinished, RequestId, TokenDelta
from chatpage.sampling_params import SamplingParams

_ROOM_BLOCKS = 8


class ChatpagePeer(Peer):
    name = "chatpage"

    def __init__(self, setup: Setup) -> None:
        self._scratch = setup.scratch
        self._engine = Engine.load(EngineConfig(**setup.settings | {"threads": setup.threads}))

    @classmethod
    def prepare(cls, setup: Setup) -> None:
        """Compile the C++ kernels, as the first start on a machine does in the background."""
        from chatpage_kernels.cpu import build

        build.start()
        build.wait()

    @property
    def max_len(self) -> int | None:
        return self._engine.max_model_len

    def facts(self) -> dict[str, str]:
        import torch

        from chatpage import __version__

        model, config = self._engine.model, self._engine.config
        return {
            "version": f"{__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            "weights": model.description,
            "flags": f"{model.computed_by}; {config.max_batched_tokens} batched tokens, blocks of {config.block_size}",
        }

    def run(self, jobs: Sequence[Job]) -> Run:
        return _run(self._engine, jobs)

    def forget(self) -> None:
        self._engine.clear_cache()

    def fork(self, prompt: Sequence[int]) -> Fork:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        source = self._engine.add_request(prompt, params)
        while self._engine.has_work:
            self._engine.step()
        copied = self._engine.stats().copied_bytes
        started = time.perf_counter()
        branch = self._engine.fork(source, params, num_tokens=len(prompt))
        seconds = time.perf_counter() - started
        num_bytes = self._engine.stats().copied_bytes - copied
        self._engine.abort(branch)
        self._engine.step()
        return Fork(seconds, num_bytes)

    def resume(self, prompt: Sequence[int], turn: Sequence[int]) -> Resumed:
        folder = self._scratch / "chatpage-kv"
        num_tokens = len(prompt) + 2 * len(turn)
        first = self._fresh_engine(folder, num_tokens)
        cold = _run(first, [Job(prompt, 1)])
        first.close(save_s=60.0)
        drop_from_memory(folder)
        second = self._fresh_engine(folder, num_tokens)
        run = _run(second, [Job([*prompt, *turn], 1)])
        second.close(save_s=0.0)
        return Resumed(cold.ttft_s, run.ttft_s, run.computed_tokens)

    def _fresh_engine(self, kv_disk: Path, num_tokens: int) -> Engine:
        """Make an engine with nothing in memory, as after a restart whose model is loaded."""
        info = self._engine.info()
        num_blocks = num_tokens // info.block_size + _ROOM_BLOCKS
        changes = {"kv_disk": kv_disk, "kv_memory": num_blocks * info.bytes_per_block}
        return Engine(self._engine.config.model_copy(update=changes), self._engine.model)


class NoCascadePeer(ChatpagePeer):
    """The same without shared-prefix attention: every row of a step reads all of its prefix itself."""

    name = "chatpage-no-cascade"

    def __init__(self, setup: Setup) -> None:
        super().__init__(replace(setup, settings=setup.settings | {"cascade": False}))


def _run(engine: Engine, jobs: Sequence[Job]) -> Run:
    places: dict[RequestId, int] = {}
    samples: list[Sample] = []
    computed = 0
    started = time.perf_counter()
    for job in jobs:
        params = SamplingParams(n=job.n, temperature=job.temperature, seed=job.seed, max_tokens=job.max_tokens, ignore_eos=True)
        places[engine.add_request(job.prompt, params)] = len(samples)
        samples += [Sample() for _ in range(job.n)]
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenDelta):
                samples[places[event.request_id] + event.sample].take(event.token_ids, time.perf_counter() - started)
            elif isinstance(event, RequestFinished):
                computed += event.usage.computed_prompt_tokens
            elif isinstance(event, RequestFailed):
                raise EngineStepError(event.message)
    return Run(time.perf_counter() - started, samples, computed)


def drop_from_memory(folder: Path) -> None:
    """Let the machine forget what it keeps of the files, so that they are read from the disk, as after a reboot."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
