"""Plain `transformers.generate`, with what its documentation offers for reuse: a cache that is copied.

Invariant: attention and modules are transformers' own, in the dtype it would be used with on this machine.
"""

import copy
import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from chatpage.bench.peers.interface import Fork, Job, Peer, Run, Sample, Setup
from chatpage.config import EngineConfig
from chatpage.engine.models import architecture
from chatpage.engine.models.loading import find_model, load_weights, resolve_device, resolve_dtype

if TYPE_CHECKING:
    from transformers import DynamicCache


class TransformersPeer(Peer):
    name = "transformers"

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        config = EngineConfig(**setup.settings | {"quantization": "none"})
        device = resolve_device(config.device)
        files = find_model(config.model, show_progress=False)
        self._dtype = resolve_dtype(config, device)[0]
        self._model = load_weights(files, architecture.read_config(files.settings), dtype=self._dtype, device=device)
        self._model.set_attn_implementation("sdpa")
        self._model.generation_config.eos_token_id = None  # it would cut runs short
        # Versions before 5.24 know the cache by its old name.
        self._cache_name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        self._remembered: tuple[list[int], DynamicCache] | None = None

    def facts(self) -> dict[str, str]:
        from transformers import __version__

        dtype = str(self._dtype).removeprefix("torch.")
        return {
            "version": f"{__version__}, torch {torch.__version__}",
            "weights": f"{dtype}, made from the same file",
            "flags": "generate(), static batches, sdpa attention, a DynamicCache that is copied",
        }

    def run(self, jobs: Sequence[Job]) -> Run:
        prompts = [list(job.prompt) for job in jobs for _ in range(job.n)]
        torch.manual_seed(jobs[0].seed)
        started = time.perf_counter()
        cache = self._copy_for(prompts)
        num_cached = 0 if cache is None else cache.get_seq_length()
        stamps = _Stamps()
        rows = self._generate(prompts, jobs[0], stamps, {} if cache is None else {self._cache_name: cache})
        wall_s = time.perf_counter() - started
        times = [stamp - started for stamp in stamps.times]
        samples = [Sample(row, list(times[: len(row)])) for row in rows]
        computed = len(prompts) * (max(map(len, prompts)) - num_cached)
        return Run(wall_s, samples, computed)

    def remember(self, prompt: Sequence[int]) -> None:
        self._remembered = (list(prompt), self._prefill(prompt))

    def forget(self) -> None:
        self._remembered = None

    def fork(self, prompt: Sequence[int]) -> Fork:
        cache = self._prefill(prompt)
        started = time.perf_counter()
        branch = copy.deepcopy(cache)
        seconds = time.perf_counter() - started
        tensors = [getattr(layer, name) for layer in branch.layers for name in ("keys", "values")]
        return Fork(seconds, sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def _generate(
        self, prompts: list[list[int]], job: Job, stamps: "_Stamps", options: dict[str, "DynamicCache"]
    ) -> list[list[int]]:
        from transformers import GenerationConfig

        length = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        sampling: dict[str, Any] = {"do_sample": False}
        if job.temperature > 0:
            sampling = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        settings = GenerationConfig(max_new_tokens=job.max_tokens, eos_token_id=None, pad_token_id=0, **sampling)
        with torch.inference_mode():
            output: torch.Tensor = self._model.generate(  # type: ignore[operator]
                ids, attention_mask=mask, generation_config=settings, logits_processor=[stamps], **options
            )
        rows: list[list[int]] = output[:, length:].tolist()
        return rows

    def _copy_for(self, prompts: list[list[int]]) -> "DynamicCache | None":
        """Copy what is remembered for every prompt, if all of them go on from it and are of one length."""
        if self._remembered is None:
            return None
        known, cache = self._remembered
        if len({len(prompt) for prompt in prompts}) > 1 or any(prompt[: len(known)] != known for prompt in prompts):
            return None
        branch = copy.deepcopy(cache)
        if len(known) == len(prompts[0]):
            branch.crop(-1)  # the logits of the last token are not kept
        if len(prompts) > 1:
            branch.batch_repeat_interleave(len(prompts))
        return branch

    def _prefill(self, prompt: Sequence[int]) -> "DynamicCache":
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            ids = torch.tensor([list(prompt)], device=self._model.device)
            self._model(ids, logits_to_keep=1, **{self._cache_name: cache})
        return cache


class _Stamps:
    """A logits processor that notes when each token is about to be chosen."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores
