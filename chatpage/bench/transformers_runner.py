"""The same workloads on plain `transformers.generate`, with what its documentation offers for reuse: a cache that is copied.

Invariant: the weights are those of the engine's model in the same dtype, and the attention is transformers' own.
"""

import copy
import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from chatpage.bench.workloads import NUM_SAMPLES, Prompts, Sizes
from chatpage.engine.core import Engine
from chatpage.engine.models import architecture
from chatpage.engine.models.loading import find_model, load_weights

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

Numbers = dict[str, float]


class Generation:
    """One call of `generate`: when its tokens came, in seconds from the start."""

    def __init__(self, model: "PreTrainedModel", prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> None:
        from transformers import GenerationConfig

        length = max(map(len, prompts))
        ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
        sampling = {name: options.pop(name) for name in ("do_sample", "num_return_sequences", "temperature") if name in options}
        settings = GenerationConfig(max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0, **sampling)
        stamps = _Stamps()
        torch.manual_seed(1)
        started = time.perf_counter()
        with torch.inference_mode():
            output: torch.Tensor = model.generate(  # type: ignore[operator]
                ids, attention_mask=mask, generation_config=settings, logits_processor=[stamps], **options
            )
        self.wall_s = time.perf_counter() - started
        self.ttft_s = stamps.first_at - started
        self.num_tokens = output.shape[0] * (output.shape[1] - length)


class _Stamps:
    """A logits processor that notes when the first token is about to be chosen."""

    def __init__(self) -> None:
        self.first_at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        del input_ids
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.first_at = self.first_at or time.perf_counter()
        return scores


class TransformersRunner:
    """Runs one workload after the other on a second copy of the engine's model."""

    name = "transformers"

    def __init__(self, engine: Engine, prompts: Prompts, sizes: Sizes) -> None:
        files = find_model(engine.model.name, show_progress=False)
        settings = architecture.read_config(files.settings)
        self._model = load_weights(files, settings, dtype=engine.model.dtype, device=engine.model.device)
        self._model.set_attn_implementation("sdpa")
        # The model's own end tokens would cut runs short.
        self._model.generation_config.eos_token_id = None
        # Versions before 5.24 know the cache by its old name.
        self._cache_name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        self._prompts = prompts
        self._sizes = sizes

    def warm_up(self) -> None:
        self._generate([self._prompts.chat("a warm-up", 40)], 8)

    def run(self, name: str, seed: str) -> Numbers:
        """Run a workload once; `seed` makes its prompts new."""
        numbers: Numbers = getattr(self, f"_{name.lower()}")(seed)
        return numbers

    def _w1(self, seed: str) -> Numbers:
        run = self._generate([self._prompts.chat(seed, self._sizes.decode_in)], self._sizes.decode_out)
        return {"decode tok/s": (run.num_tokens - 1) / (run.wall_s - run.ttft_s)}

    def _w2(self, seed: str) -> Numbers:
        run = self._generate([self._prompts.chat(seed, self._sizes.prompt)], 1)
        return {"first token ms": run.ttft_s * 1e3, "prefill tok/s": self._sizes.prompt / run.ttft_s}

    def _w3(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.prompt)
        cache = self._prefill(prompt)
        turn = self._prompts.turn("And what came after that?", self._sizes.next_turn)
        started = time.perf_counter()
        run = self._generate([[*prompt, *turn]], 1, **{self._cache_name: copy.deepcopy(cache)})
        copying = time.perf_counter() - started - run.wall_s
        return {"first token ms": (copying + run.ttft_s) * 1e3, "computed tokens": len(turn)}

    def _w4(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.prompt)
        sampled = {"do_sample": True, "temperature": 1.0}
        cold = self._generate([prompt], self._sizes.sample_out, num_return_sequences=NUM_SAMPLES, **sampled)
        cache = self._prefill(prompt[:-1])
        started = time.perf_counter()
        branches = copy.deepcopy(cache)
        branches.batch_repeat_interleave(NUM_SAMPLES)
        copying = time.perf_counter() - started
        warm = self._generate([prompt] * NUM_SAMPLES, self._sizes.sample_out, **{self._cache_name: branches}, **sampled)
        return _wall("cold", cold, 0.0, NUM_SAMPLES * len(prompt)) | _wall("warm", warm, copying, NUM_SAMPLES)

    def _w5(self, seed: str) -> Numbers:
        system = self._prompts.system(seed, self._sizes.system)
        numbers: Numbers = {}
        for state in ("cold", "warm"):
            chats = self._prompts.questions(system, self._sizes.question, is_second=state == "warm")
            run = self._generate(chats, self._sizes.sample_out, do_sample=True, temperature=1.0)
            numbers |= _wall(state, run, 0.0, sum(map(len, chats)))
        return numbers

    def _w6(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.prompt)
        run = self._generate([prompt], 1, do_sample=True, temperature=1.0)
        return {"first token ms": run.ttft_s * 1e3, "computed tokens": len(prompt)}

    def _w7(self, seed: str) -> Numbers:
        cache = self._prefill(self._prompts.chat(seed, self._sizes.fork))
        started = time.perf_counter()
        branch = copy.deepcopy(cache)
        seconds = time.perf_counter() - started
        return {"fork us": seconds * 1e6, "copied bytes": float(_num_bytes(branch))}

    def _w8(self, seed: str) -> Numbers:
        prompt = self._prompts.chat(seed, self._sizes.fork) + self._prompts.turn(
            "And what came after that?", self._sizes.next_turn
        )
        milliseconds = self._generate([prompt], 1).ttft_s * 1e3
        return {"first token ms": milliseconds, "cold first token ms": milliseconds, "computed tokens": len(prompt)}

    def _prefill(self, prompt: Sequence[int]) -> "DynamicCache":
        from transformers import DynamicCache

        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            ids = torch.tensor([list(prompt)], device=self._model.device)
            self._model(ids, logits_to_keep=1, **{self._cache_name: cache})
        return cache

    def _generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> Generation:
        return Generation(self._model, prompts, max_tokens, **options)


def _num_bytes(cache: "DynamicCache") -> int:
    tensors = [getattr(layer, name) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _wall(state: str, run: Generation, extra_s: float, computed_tokens: int) -> Numbers:
    seconds = run.wall_s + extra_s
    return {f"{state} s": seconds, f"{state} tok/s": run.num_tokens / seconds, f"{state} computed tokens": computed_tokens}
