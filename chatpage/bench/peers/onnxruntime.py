"""ONNX Runtime GenAI on an int4 model of its own model builder; it goes on from a prompt by keeping the generator."""

import importlib
import json
import time
from collections.abc import Sequence
from typing import Any

from chatpage.bench.peers.conversion import ONNX_OPTIONS, onnx_model
from chatpage.bench.peers.interface import CannotError, Fork, Job, Peer, Run, Sample, Setup

_ROOM = 256  # tokens that may follow a prompt that is remembered


class OnnxRuntimePeer(Peer):
    name = "onnxruntime"

    @classmethod
    def prepare(cls, setup: Setup) -> None:
        onnx_model(setup)

    def __init__(self, setup: Setup) -> None:
        self._numpy: Any = importlib.import_module("numpy")
        self._genai: Any = importlib.import_module("onnxruntime_genai")
        config = self._genai.Config(str(onnx_model(setup)))
        options = {"intra_op_num_threads": setup.threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = self._genai.Model(config)
        self._remembered: tuple[list[int], Any] | None = None

    def facts(self) -> dict[str, str]:
        return {
            "version": str(self._genai.__version__),
            "weights": f"int4 with int4 head, made from the same file by its model builder ({', '.join(ONNX_OPTIONS)})",
            "flags": "static batches; a next turn and a regeneration go on in the same generator",
        }

    def run(self, jobs: Sequence[Job]) -> Run:
        prompts = [list(job.prompt) for job in jobs for _ in range(job.n)]
        if len({len(prompt) for prompt in prompts}) > 1:
            raise CannotError("is given prompts of one length only: a batch is padded")
        started = time.perf_counter()
        generator, known = self._take_remembered(prompts)
        if generator is None:
            generator = self._generator(jobs[0], len(prompts), len(prompts[0]) + jobs[0].max_tokens)
        rows = [prompt[known:] for prompt in prompts]
        generator.append_tokens(self._numpy.array(rows if len(rows) > 1 else rows[0], dtype=self._numpy.int32))
        times = []
        for _ in range(jobs[0].max_tokens):
            generator.generate_next_token()
            times.append(time.perf_counter() - started)
        wall_s = time.perf_counter() - started
        samples = []
        for index, prompt in enumerate(prompts):
            ids = [int(token) for token in generator.get_sequence(index)][len(prompt) :]
            samples.append(Sample(ids, times[: len(ids)]))
        return Run(wall_s, samples, sum(map(len, rows)))

    def remember(self, prompt: Sequence[int]) -> None:
        generator = self._generator(Job(prompt, 1), 1, len(prompt) + _ROOM)
        generator.append_tokens(self._numpy.array(prompt, dtype=self._numpy.int32))
        generator.generate_next_token()
        self._remembered = (list(prompt), generator)

    def forget(self) -> None:
        self._remembered = None

    def fork(self, prompt: Sequence[int]) -> Fork:
        del prompt
        raise CannotError("cannot copy a generator")

    def _take_remembered(self, prompts: list[list[int]]) -> tuple[Any, int]:
        """Rewind the generator that is kept, if it is of this prompt; it serves one row, so a batch computes everything."""
        if self._remembered is None or len(prompts) > 1 or self._remembered[0] != prompts[0][: len(self._remembered[0])]:
            return None, 0
        (prompt, generator), self._remembered = self._remembered, None
        known = min(len(prompt), len(prompts[0]) - 1)
        generator.rewind_to(known)
        return generator, known

    def _generator(self, job: Job, num_rows: int, max_length: int) -> Any:
        params = self._genai.GeneratorParams(self._model)
        is_sampled = job.temperature > 0
        params.set_search_options(
            max_length=max_length,
            min_length=max_length,  # runs past end-of-text
            batch_size=num_rows,
            do_sample=is_sampled,
            temperature=job.temperature if is_sampled else 1.0,
            top_k=0 if is_sampled else 1,
            top_p=1.0,
            random_seed=job.seed,
        )
        return self._genai.Generator(self._model, params)
