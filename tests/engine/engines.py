"""Engines for tests, and what tests ask of them."""

from collections.abc import Sequence
from typing import Any

import torch

from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.events import Event, RequestFinished, RequestId, RequestStarted, SampleFinished
from chatpage.sampling_params import SamplingParams
from tests.tiny_models import tiny_llama_folder


def tiny_engine(**settings: Any) -> Engine:
    """Load the tiny llama in fp32 with a small pool whose every row holds NaN, checked after every step."""
    defaults: dict[str, Any] = {
        "model": str(tiny_llama_folder()),
        "device": "cpu",
        "dtype": "float32",
        "kv_memory": 2**20,
        "block_size": 4,
        "max_batched_tokens": 64,
        "max_num_seqs": 32,
        "check_integrity": True,
    }
    engine = Engine.load(EngineConfig.load(**(defaults | settings)))
    engine.poison_free_rows()
    return engine


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | settings))


def run_all(engine: Engine) -> list[Event]:
    """Step until nothing is left."""
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def outputs(events: Sequence[Event], request_id: RequestId) -> list[tuple[int, ...]]:
    """Return the token ids of every sample of a request, in order."""
    finished = [e for e in events if isinstance(e, SampleFinished) and e.request_id == request_id]
    return [e.token_ids for e in sorted(finished, key=lambda e: e.sample)]


def generate(engine: Engine, prompt: Sequence[int], params: SamplingParams, **options: Any) -> list[tuple[int, ...]]:
    request_id = engine.add_request(prompt, params, **options)
    return outputs(run_all(engine), request_id)


def finished(events: Sequence[Event], request_id: RequestId) -> RequestFinished:
    return next(e for e in events if isinstance(e, RequestFinished) and e.request_id == request_id)


def started(events: Sequence[Event], request_id: RequestId) -> RequestStarted:
    return next(e for e in events if isinstance(e, RequestStarted) and e.request_id == request_id)


def reference_greedy(engine: Engine, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What `transformers.generate` says, on weights loaded apart from the engine's."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(engine.config.model, dtype=torch.float32)
    generated = model.generate(
        torch.tensor([list(prompt)]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return tuple(generated[0, len(prompt) :].tolist())


def assert_whole(engine: Engine) -> None:
    """The pool is whole again: no block is used, and every one is in exactly one state."""
    engine.check_integrity()
    memory = engine.memory()
    assert memory.blocks_used == 0
    assert memory.blocks_available == memory.num_blocks
