"""vLLM's engine in this process, on weights that were widened to bfloat16 (it reads no 4-bit GGUF on a CPU)."""

import importlib
import os
import time
from collections.abc import Sequence
from typing import Any

from chatpage.bench.peers.conversion import plain_weights
from chatpage.bench.peers.interface import CannotError, Job, Peer, Run, Sample, Setup

_CACHE_GIB = 1
_BATCHED_TOKENS = 2048


class VllmPeer(Peer):
    name = "vllm"

    @classmethod
    def prepare(cls, setup: Setup) -> None:
        plain_weights(setup)

    def __init__(self, setup: Setup) -> None:
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=str(_CACHE_GIB),
            VLLM_CPU_NUM_OF_RESERVED_CPU="0",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, _cpus(setup.threads))),
        )
        self._vllm: Any = importlib.import_module("vllm")
        arguments = self._vllm.EngineArgs(
            model=str(plain_weights(setup)),
            dtype="bfloat16",
            max_num_seqs=32,
            max_num_batched_tokens=_BATCHED_TOKENS,
            enable_prefix_caching=True,
            seed=0,
        )
        self._engine = self._vllm.LLMEngine.from_engine_args(arguments)
        self._num_requests = 0

    def facts(self) -> dict[str, str]:
        return {
            "version": self._vllm.__version__,
            "weights": "bfloat16, made from the same file",
            "flags": f"LLMEngine, compiled, prefix caching, {_BATCHED_TOKENS} batched tokens, {_CACHE_GIB} GiB KV",
        }

    def run(self, jobs: Sequence[Job]) -> Run:
        started = time.perf_counter()
        outputs: dict[str, dict[int, Sample]] = {}
        cached: dict[str, int] = {}
        for job in jobs:
            name = str(self._num_requests)
            self._num_requests += 1
            outputs[name] = {index: Sample() for index in range(job.n)}
            self._engine.add_request(name, {"prompt_token_ids": list(job.prompt)}, self._params(job))
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = time.perf_counter() - started
                cached[output.request_id] = output.num_cached_tokens or 0
                for part in output.outputs:
                    sample = outputs[output.request_id][part.index]
                    sample.take(list(part.token_ids)[len(sample.ids) :], now)
        wall_s = time.perf_counter() - started
        samples = [sample for by_index in outputs.values() for sample in by_index.values()]
        # num_cached_tokens is told for one sample of a request; the others are not counted.
        is_known = all(job.n == 1 for job in jobs)
        computed = sum(len(job.prompt) for job in jobs) - sum(cached.values()) if is_known else None
        return Run(wall_s, samples, computed)

    def forget(self) -> None:
        self._engine.reset_prefix_cache()

    def _params(self, job: Job) -> Any:
        return self._vllm.SamplingParams(
            n=job.n,
            max_tokens=job.max_tokens,
            min_tokens=job.max_tokens,
            temperature=job.temperature,
            seed=job.seed if job.temperature > 0 else None,
            ignore_eos=True,
            detokenize=False,
        )


def _cpus(threads: int) -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        raise CannotError("is bound to processors here, and this system does not tell which there are")
    return sorted(os.sched_getaffinity(0))[:threads]
