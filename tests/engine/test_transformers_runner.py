"""A sequence's logits depend on its own tokens alone: not on chunks, neighbours, or where its blocks lie."""

from typing import Any

import pytest
import torch

from chatpage.engine import attention, kv_cache
from chatpage.engine.batch import BatchRow, build_batch
from chatpage.engine.models.transformers_runner import TransformersRunner
from chatpage_kernels import planner
from chatpage_kernels.plan import plan_attention
from tests.engine.architectures import tiny_config, tiny_model
from tests.engine.model_driving import CPU, Driver, reference_backend

PROMPT = list(range(30, 53))


@pytest.fixture(autouse=True)
def _reference_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "select_backend", reference_backend)


def _runner(model_type: str) -> TransformersRunner:
    model = tiny_model(tiny_config(model_type))
    model.set_attn_implementation(attention.register())
    return TransformersRunner(model, model_id="x", max_model_len=128, eos_token_ids=frozenset({2}), dtype=torch.float32)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_a_prefix_computed_before_gives_the_same_logits_at_every_split_point(model_type: str) -> None:
    """Output with a prefix hit differed from output without, at block borders and inside of sliding windows."""
    runner = _runner(model_type)
    driver = Driver(runner, num_blocks=6 * len(PROMPT))
    (whole,) = driver.step([(PROMPT, 0, driver.table(len(PROMPT)))])
    for split in range(1, len(PROMPT)):
        table = driver.table(len(PROMPT))
        driver.step([(PROMPT[:split], 0, table)])
        (rest,) = driver.step([(PROMPT[split:], split, table)])
        torch.testing.assert_close(rest, whole, rtol=1e-4, atol=1e-5)


def test_two_sequences_that_share_blocks_read_the_same_prefix() -> None:
    runner = _runner("llama")
    driver = Driver(runner)
    shared = driver.table(16)
    driver.step([(PROMPT[:16], 0, shared)])
    tables = [shared + driver.table(4), shared + driver.table(4)]
    both = driver.step([([60, 61], 16, tables[0]), ([70], 16, tables[1])])
    for tokens, logits in (([60, 61], both[0]), ([70], both[1])):
        alone = Driver(runner)
        (expected,) = alone.step([(PROMPT[:16] + tokens, 0, alone.table(20))])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_step_that_wants_no_logits_writes_its_keys_all_the_same() -> None:
    runner = _runner("qwen2")
    driver = Driver(runner)
    table = driver.table(len(PROMPT))
    slots = [table[pos // 4] * 4 + pos % 4 for pos in range(len(PROMPT))]
    silent = build_batch([BatchRow(PROMPT[:-1], 0, table, slots[:-1], wants_logits=False)], CPU)
    assert runner.forward(silent, driver.cache).shape == (0, 272)
    (last,) = driver.step([(PROMPT[-1:], len(PROMPT) - 1, table)])
    (whole,) = driver.step([(PROMPT, 0, driver.table(len(PROMPT)))])
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-5)


def test_logits_are_float32_whatever_the_model_computes_in() -> None:
    model = tiny_model(tiny_config("llama")).bfloat16()
    model.set_attn_implementation(attention.register())
    runner = TransformersRunner(model, model_id="x", max_model_len=128, eos_token_ids=frozenset({2}), dtype=torch.bfloat16)
    driver = Driver(runner, dtype=torch.bfloat16)
    logits = driver.step([(PROMPT, 0, driver.table(len(PROMPT)))])
    assert logits.dtype == torch.float32


def test_a_step_is_planned_once_per_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning costs host time in every step; 30 layers of one kind must not pay it 30 times."""
    kinds: list[int] = []

    def counting(*args: Any, **options: Any) -> Any:
        kinds.append(options["window"])
        return plan_attention(*args, **options)

    runner = _runner("gemma2")
    monkeypatch.setattr(planner, "plan_attention", counting)
    driver = Driver(runner)
    driver.step([(PROMPT, 0, driver.table(len(PROMPT)))])
    assert sorted(kinds) == [0, 6]


def test_the_hook_never_runs_outside_of_a_step() -> None:
    model = tiny_model(tiny_config("llama"))
    model.set_attn_implementation(attention.register())
    with pytest.raises(AssertionError, match="outside an attention step"):
        model(input_ids=torch.tensor([[5, 6]]), use_cache=False)
