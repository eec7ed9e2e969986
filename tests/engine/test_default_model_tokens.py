"""The default model says what transformers makes it say: 20 varied prompts, 200 greedy tokens each, in fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.engine.models import default_model
from chatpage.prompt import Message, render_prompt
from chatpage.sampling_params import SamplingParams
from tests.engine.engines import assert_whole, greedy, outputs, run_all

NUM_TOKENS = 200
QUESTIONS = (
    "Why is the sky blue?",
    "Write a haiku about rain on a tin roof.",
    "def fibonacci(n):\n    ",
    "What is 17 * 23? Think step by step.",
    "Übersetze ins Deutsche: The early bird catches the worm.",
    "用一句话介绍长城。",
    "🙂🙃 What do these two emoji mean?",
    '{"name": "Ada", "age": 36} Turn this JSON into YAML.',
    "List ten animals that live in the sea, one per line.",
    "a a a a a a a a a a a a a a a a a a a a a a a a",
    "Tell me a story about a lighthouse keeper and a fox. " * 8,
    "SELECT * FROM users WHERE age > 30; explain this query.",
    "What is the capital of France, and what is it famous for?",
    "Continue: Once upon a time, in a village by the river,",
    "Give three reasons to learn to cook. Be brief.",
    "x",
    "Summarise: " + "The printing press changed how ideas travel. " * 30,
    "Write a limerick about a cat who codes.",
    "¿Cuál es la diferencia entre ser y estar?",
    "Explain recursion to a child,\n\nwith an example.\n\n\tAnd keep the tabs.\t",
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(EngineConfig.load(device="cpu", dtype="float32", kv_memory=2**30, max_batched_tokens=256))


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[tuple[int, ...]]:
    return [render_prompt(engine.tokenizer, [Message("user", question)]).token_ids for question in QUESTIONS]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same file in transformers, dequantised, with its own attention."""
    from transformers import AutoModelForCausalLM, GgufConfig

    path = default_model.path()
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()


@pytest.fixture(scope="module")
def generated(engine: Engine, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """What the engine says to all prompts, side by side."""
    ids = [engine.add_request(prompt, greedy(max_tokens=NUM_TOKENS)) for prompt in prompts]
    events = run_all(engine)
    return [outputs(events, request_id)[0] for request_id in ids]


@pytest.fixture(autouse=True)
def _whole(engine: Engine) -> Iterator[None]:
    yield
    assert_whole(engine)


@pytest.mark.parametrize("index", range(len(QUESTIONS)))
def test_every_token_is_the_likeliest_one_of_transformers(
    reference: Any, prompts: list[tuple[int, ...]], generated: list[tuple[int, ...]], index: int
) -> None:
    """One pass over prompt and answer says what greedy generation says token by token, by induction, and costs far less."""
    prompt, answer = prompts[index], generated[index]
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False).logits[0, len(prompt) - 1 :]
    assert len(answer) == NUM_TOKENS
    assert tuple(logits.argmax(-1).tolist()) == answer


def test_generate_of_transformers_says_the_same(
    reference: Any, prompts: list[tuple[int, ...]], generated: list[tuple[int, ...]]
) -> None:
    count = 40
    output = reference.generate(
        torch.tensor([prompts[0]]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=-1
    )
    assert tuple(output[0, len(prompts[0]) :].tolist()) == generated[0][:count]


def test_a_prompt_alone_with_part_of_it_cached_gets_the_same_tokens(
    engine: Engine, prompts: list[tuple[int, ...]], generated: list[tuple[int, ...]]
) -> None:
    engine.clear_cache()
    engine.add_request(prompts[10][:71], greedy(), prefill_only=True)
    run_all(engine)
    request_id = engine.add_request(prompts[10], greedy(max_tokens=100))
    assert outputs(run_all(engine), request_id) == [generated[10][:100]]


def test_chunks_of_seven_tokens_change_nothing(
    engine: Engine, prompts: list[tuple[int, ...]], generated: list[tuple[int, ...]]
) -> None:
    config = engine.config.model_copy(update={"max_batched_tokens": 7, "kv_memory": 2**26})
    chunked = Engine(config, engine.model)
    request_id = chunked.add_request(prompts[4], greedy(max_tokens=24))
    assert outputs(run_all(chunked), request_id) == [generated[4][:24]]
    assert_whole(chunked)


def test_every_possible_cached_prefix_changes_nothing(
    engine: Engine, prompts: list[tuple[int, ...]], generated: list[tuple[int, ...]]
) -> None:
    prompt = prompts[15]
    for cached in range(1, len(prompt) + 1):
        engine.clear_cache()
        engine.add_request(prompt[:cached], greedy(), prefill_only=True)
        run_all(engine)
        assert engine.prefix_cost(prompt).cached_tokens == cached
        request_id = engine.add_request(prompt, greedy(max_tokens=6))
        assert outputs(run_all(engine), request_id) == [generated[15][:6]]


def test_a_sample_is_the_same_for_n_of_1_3_and_8_and_beside_sixteen_others(
    engine: Engine, prompts: list[tuple[int, ...]]
) -> None:
    def samples(n: int) -> list[tuple[int, ...]]:
        request_id = engine.add_request(prompts[0], SamplingParams(n=n, seed=11, max_tokens=16))
        return outputs(run_all(engine), request_id)

    alone = samples(8)
    assert samples(1) == alone[:1]
    assert samples(3) == alone[:3]
    for i in range(16):
        engine.add_request(prompts[i + 1], SamplingParams(seed=i, max_tokens=16))
    assert samples(8) == alone
