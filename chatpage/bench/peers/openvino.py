"""OpenVINO GenAI's continuous batching, with its prefix cache, on the GGUF file itself."""

import importlib
import time
from collections.abc import Sequence
from typing import Any

from chatpage.bench.peers.interface import CannotError, Job, Peer, Run, Sample, Setup

_CACHE_GIB = 1
_BATCHED_TOKENS = 256  # its own default
_ALL_TOKENS = 2**31 - 1  # a top_k that drops nothing


class OpenVinoPeer(Peer):
    name = "openvino"

    def __init__(self, setup: Setup) -> None:
        if setup.gguf is None:
            raise CannotError("is given the weights as a GGUF file, and this model is none")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        self._genai: Any = importlib.import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = _BATCHED_TOKENS
        scheduler.max_num_seqs = 64
        properties = {"INFERENCE_NUM_THREADS": setup.threads}
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(setup.gguf), scheduler, "CPU", properties)
        self._num_requests = 0

    def facts(self) -> dict[str, str]:
        return {
            "version": f"{self._genai.__version__}, openvino {self._openvino.__version__}",
            "weights": "the same GGUF file, read by itself",
            "flags": f"ContinuousBatchingPipeline, prefix caching, {_BATCHED_TOKENS} batched tokens, {_CACHE_GIB} GiB KV as u8",
        }

    def run(self, jobs: Sequence[Job]) -> Run:
        """Run jobs; the samples of one request come all at once when it ends, so they have one time only."""
        started = time.perf_counter()
        handles = [self._add(job) for job in jobs]
        outputs: list[dict[int, Sample]] = [{} for _ in jobs]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - started
            for handle, output in zip(handles, outputs, strict=True):
                while handle.can_read():
                    self._read(handle, output, now)
        wall_s = time.perf_counter() - started
        return Run(wall_s, [sample for output in outputs for sample in output.values()])

    def _read(self, handle: Any, output: dict[int, Sample], now: float) -> None:
        for index, part in handle.read().items():
            output.setdefault(index, Sample()).take(list(part.generated_ids), now)

    def _add(self, job: Job) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.ignore_eos = True
        config.apply_chat_template = False
        config.num_return_sequences = job.n
        config.do_sample = job.temperature > 0
        if job.temperature > 0:
            config.temperature = job.temperature
            config.top_k = _ALL_TOKENS
            config.top_p = 1.0
            config.rng_seed = job.seed
        self._num_requests += 1
        ids = self._openvino.Tensor(self._numpy.array([job.prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._num_requests, ids, config)
