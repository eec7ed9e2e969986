"""The engine as its users see it: tokens in, events out, and nothing computed twice."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chatpage.engine.core import Engine
from chatpage.engine.stats import PrefixBlocks
from chatpage.errors import ContextLengthError, InvalidParameterError, InvalidRequestError, UnknownRequestError
from chatpage.events import FinishReason, RequestFailed, RequestFinished, RequestId, RequestStarted, SampleFinished, TokenDelta
from chatpage.sampling_params import SamplingParams
from tests.engine.engines import (
    assert_whole,
    finished,
    generate,
    greedy,
    outputs,
    reference_greedy,
    run_all,
    started,
    tiny_engine,
)

PROMPT = [3 + (7 * i * i + 3 * i) % 250 for i in range(41)]


@pytest.fixture(scope="module")
def shared_engine() -> Engine:
    return tiny_engine()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The module's engine with an empty cache, and proof that the test left no block behind."""
    shared_engine.clear_cache()
    yield shared_engine
    run_all(shared_engine)
    assert_whole(shared_engine)


@pytest.fixture(scope="module")
def expected(shared_engine: Engine) -> tuple[int, ...]:
    return reference_greedy(shared_engine, PROMPT, 24)


# -- the same tokens, however they are computed ------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(engine: Engine, expected: tuple[int, ...]) -> None:
    assert generate(engine, PROMPT, greedy(max_tokens=24)) == [expected]


@pytest.mark.parametrize("cached", range(1, len(PROMPT) + 1))
def test_a_cached_prefix_changes_nothing_wherever_it_ends(engine: Engine, expected: tuple[int, ...], cached: int) -> None:
    """A prefix hit once changed answers; every split point is tried, block borders and their neighbours included."""
    generate(engine, PROMPT[:cached], greedy(max_tokens=1), prefill_only=True)
    request_id = engine.add_request(PROMPT, greedy(max_tokens=24))
    events = run_all(engine)
    assert outputs(events, request_id) == [expected]
    assert finished(events, request_id).usage.cached_tokens == cached
    assert finished(events, request_id).usage.computed_prompt_tokens == len(PROMPT) - cached


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunked_prefill_changes_nothing(expected: tuple[int, ...], chunk: int) -> None:
    engine = tiny_engine(max_batched_tokens=chunk)
    assert generate(engine, PROMPT, greedy(max_tokens=24)) == [expected]
    assert_whole(engine)


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 41, 64])
def test_the_block_size_changes_nothing(expected: tuple[int, ...], block_size: int) -> None:
    engine = tiny_engine(block_size=block_size)
    assert generate(engine, PROMPT, greedy(max_tokens=24)) == [expected]
    assert_whole(engine)


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_blocks_change_nothing(engine: Engine, expected: tuple[int, ...], seed: int) -> None:
    """The blocks of a busy server are in no order; here random traffic leaves the free queue shuffled first."""
    rng = random.Random(seed)
    for _ in range(8):
        engine.add_request([rng.randrange(3, 250) for _ in range(rng.randint(1, 60))], greedy(max_tokens=rng.randint(1, 9)))
    run_all(engine)
    engine.clear_cache()
    assert generate(engine, PROMPT, greedy(max_tokens=24)) == [expected]


def test_three_preemptions_change_nothing_and_send_nothing_twice(engine: Engine, expected: tuple[int, ...]) -> None:
    request_id = engine.add_request(PROMPT, greedy(max_tokens=24))
    scheduler = engine._executor.scheduler
    events = []
    for num_steps in (2, 5, 8):
        events += [event for _ in range(num_steps) for event in engine.step()]
        scheduler.preempt(scheduler.running[0])
        if num_steps != 5:
            engine.clear_cache()  # once what it had is still cached, twice it is gone
    events += run_all(engine)
    sent = [token for e in events if isinstance(e, TokenDelta) and e.request_id == request_id for token in e.token_ids]
    assert tuple(sent) == expected
    assert outputs(events, request_id) == [expected]
    assert finished(events, request_id).usage.num_preemptions == 3


def test_a_pool_too_small_for_all_preempts_the_youngest_and_loses_nothing() -> None:
    prompts = [[*PROMPT[:8], i] for i in range(3, 9)]
    alone = [generate(tiny_engine(), prompt, greedy(max_tokens=40))[0] for prompt in prompts]
    engine = tiny_engine(kv_memory=40 * 4 * 512)  # 40 blocks of 4 tokens for 6 sequences of up to 13 blocks
    ids = [engine.add_request(prompt, greedy(max_tokens=40)) for prompt in prompts]
    events = run_all(engine)
    assert [outputs(events, request_id)[0] for request_id in ids] == alone
    assert sum(finished(events, request_id).usage.num_preemptions for request_id in ids) > 0
    assert finished(events, ids[0]).usage.num_preemptions == 0
    assert_whole(engine)


def test_sixteen_neighbours_change_nothing(engine: Engine, expected: tuple[int, ...]) -> None:
    rng = random.Random(1)
    for i in range(16):
        prompt = PROMPT[: rng.randint(1, 41)] + [rng.randrange(3, 250) for _ in range(rng.randint(0, 20))]
        engine.add_request(prompt, SamplingParams(max_tokens=rng.randint(1, 30), seed=i))
    request_id = engine.add_request(PROMPT, greedy(max_tokens=24))
    assert outputs(run_all(engine), request_id) == [expected]


def test_reading_a_shared_prefix_once_changes_nothing() -> None:
    tokens = []
    for cascade in (True, False):
        engine = tiny_engine(cascade=cascade)
        generate(engine, PROMPT, greedy(max_tokens=1))
        ids = [engine.add_request([*PROMPT, 3 + i], SamplingParams(n=3, max_tokens=20, seed=i)) for i in range(6)]
        events = run_all(engine)
        tokens.append([outputs(events, request_id) for request_id in ids])
    assert tokens[0] == tokens[1]


def test_a_sample_is_the_same_for_every_n_and_beside_any_neighbours(engine: Engine) -> None:
    alone = [generate(engine, PROMPT, SamplingParams(n=n, seed=7, max_tokens=16))[:n] for n in range(1, 9)]
    for n, samples in enumerate(alone, start=1):
        assert samples == alone[-1][:n]
    assert len(set(alone[-1])) == 8
    for i in range(16):
        engine.add_request(PROMPT[i:], SamplingParams(max_tokens=20, seed=100 + i))
    request_id = engine.add_request(PROMPT, SamplingParams(n=8, seed=7, max_tokens=16))
    assert outputs(run_all(engine), request_id) == alone[-1]


def test_regenerating_without_a_seed_differs_and_the_seed_is_reported(engine: Engine) -> None:
    seeds, texts = set(), set()
    for _ in range(4):
        request_id = engine.add_request(PROMPT, SamplingParams(max_tokens=12))
        events = run_all(engine)
        seeds.add(started(events, request_id).seed)
        texts.add(outputs(events, request_id)[0])
    assert len(seeds) == len(texts) == 4
    again = generate(engine, PROMPT, SamplingParams(max_tokens=12, seed=seeds.pop()))[0]
    assert again in texts


# -- what is computed and held -----------------------------------------------------------------------------------------


def test_four_equal_prompts_posted_together_compute_their_prompt_once(engine: Engine) -> None:
    before = engine.stats().computed_tokens
    ids = [engine.add_request(PROMPT, greedy(max_tokens=1)) for _ in range(4)]
    events = run_all(engine)
    assert engine.stats().computed_tokens - before == len(PROMPT)
    assert [finished(events, i).usage.cached_tokens for i in ids] == [0, 41, 41, 41]


def test_regenerating_computes_no_prompt_token(engine: Engine) -> None:
    generate(engine, PROMPT, greedy(max_tokens=5))
    request_id = engine.add_request(PROMPT, greedy(max_tokens=5))
    assert finished(run_all(engine), request_id).usage.computed_prompt_tokens == 0


def test_usage_counts_the_prompt_once_for_n_samples(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, greedy(n=4, max_tokens=5))
    usage = finished(run_all(engine), request_id).usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (41, 0, 20)


def test_n_samples_hold_the_prompt_once_and_a_tail_each(engine: Engine) -> None:
    engine.add_request(PROMPT, SamplingParams(n=8, seed=3, max_tokens=10, ignore_eos=True))
    for _ in range(6):
        engine.step()
    memory = engine.memory()
    # 41 tokens = 10 shared blocks of 4 and one row that each of 8 tails copied, then 5 computed tokens a sample
    assert memory.rows_held == 40 + 8 * (1 + 5)
    assert memory.blocks_used == 10 + 8 * 2
    assert memory.rows_without_sharing == 8 * 46


def test_a_fork_of_a_running_sample_shares_its_blocks_and_copies_nothing_at_a_border(engine: Engine) -> None:
    parent = engine.add_request(PROMPT, greedy(max_tokens=30))
    for _ in range(12):
        engine.step()
    copies = engine.stats().num_block_copies
    child = engine.fork(parent, greedy(max_tokens=4), num_tokens=48)
    events = run_all(engine)
    assert started(events, child).cached_tokens == 47
    assert engine.stats().num_block_copies - copies <= 1
    assert outputs(events, child)[0] == outputs(events, parent)[0][7:11]


@pytest.mark.parametrize("position", [1, 17, 40, 41, 42, 50])
def test_a_fork_of_an_ended_sample_continues_as_if_it_had_never_stopped(engine: Engine, position: int) -> None:
    parent = engine.add_request(PROMPT, greedy(max_tokens=20))
    whole = [*PROMPT, *outputs(run_all(engine), parent)[0]]
    child = engine.fork(parent, greedy(max_tokens=3), num_tokens=position)
    events = run_all(engine)
    assert started(events, child).cached_tokens >= position - 1
    engine.clear_cache()
    assert outputs(events, child) == generate(engine, whole[:position], greedy(max_tokens=3))


def test_another_salt_sees_no_cached_tokens(engine: Engine) -> None:
    """One user's probe must not learn what another user asked."""
    generate(engine, PROMPT, greedy(max_tokens=2), cache_salt="ada")
    assert engine.prefix_cost(PROMPT, cache_salt="bob").cached_tokens == 0
    assert engine.prefix_cost(PROMPT, cache_salt="ada").tokens_to_compute == 0


def test_the_cost_of_a_prompt_is_told_before_and_true(engine: Engine) -> None:
    generate(engine, PROMPT, greedy(max_tokens=9))
    prompt = [*PROMPT[:30], 5, 6, 7]
    cost = engine.prefix_cost(prompt)
    request_id = engine.add_request(prompt, greedy(max_tokens=1))
    usage = finished(run_all(engine), request_id).usage
    assert (cost.cached_tokens, cost.tokens_to_compute) == (usage.cached_tokens, usage.computed_prompt_tokens) == (30, 3)


def test_the_blocks_of_a_prefix_are_found_and_no_longer_kept_for_it(engine: Engine) -> None:
    """A page that shows who shares what looks again and again; that must not keep what it looks at from being evicted."""
    generate(engine, PROMPT, greedy(max_tokens=1), cache_salt="ada")
    size = engine.config.block_size
    found = engine.prefix_blocks([*PROMPT, 5, 6], cache_salt="ada")
    assert found.num_tokens == len(PROMPT)
    assert len(found.block_ids) == -(-len(PROMPT) // size)
    fork = engine.prefix_blocks([*PROMPT[:30], 5, 6], cache_salt="ada")
    assert fork.num_tokens == 30
    assert fork.block_ids == found.block_ids[: -(-30 // size)]
    assert engine.prefix_blocks(PROMPT, cache_salt="bob") == PrefixBlocks((), 0)
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.prefix_blocks([])
    for i in range(20):
        engine.prefix_blocks(PROMPT, cache_salt="ada")
        generate(engine, [i + 3] * 300, greedy(max_tokens=1))
    assert engine.prefix_blocks(PROMPT, cache_salt="ada").num_tokens == 0
    assert engine.prefix_blocks([1] * (engine.max_model_len + 1)).num_tokens == 0, "a path may be as long as it likes"


def test_pinned_prefixes_outlive_pressure(engine: Engine) -> None:
    generate(engine, PROMPT, greedy(max_tokens=1), prefill_only=True)
    pin = engine.pin(PROMPT)
    for i in range(20):
        generate(engine, [i + 3] * 300, greedy(max_tokens=1))
    assert engine.prefix_cost(PROMPT).cached_tokens >= 40
    engine.unpin(pin)
    with pytest.raises(UnknownRequestError, match="let go already"):
        engine.unpin(pin)


def test_freeing_a_sample_gives_back_only_what_nobody_else_holds(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, SamplingParams(n=2, seed=1, max_tokens=10, ignore_eos=True))
    for _ in range(4):
        engine.step()
    before = engine.memory().blocks_used
    promised = engine.num_freeable_blocks(request_id, 1)
    engine.abort(request_id, sample=1)
    assert before - engine.memory().blocks_used == promised == 1


# -- endings -----------------------------------------------------------------------------------------------------------


def test_events_come_in_order_and_deltas_join_to_the_text(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, SamplingParams(n=2, seed=5, max_tokens=40, logprobs=2))
    events = list(engine.stream(request_id))
    assert isinstance(events[0], RequestStarted)
    assert isinstance(events[-1], RequestFinished)
    for sample in range(2):
        deltas = [e for e in events if isinstance(e, TokenDelta) and e.sample == sample]
        end = next(e for e in events if isinstance(e, SampleFinished) and e.sample == sample)
        assert "".join(d.text for d in deltas) == end.text
        assert tuple(t for d in deltas for t in d.token_ids) == end.token_ids
        assert sum(p.logprob for d in deltas for p in d.logprobs) == pytest.approx(end.sum_logprob)
        assert all(len(p.alternatives) == 2 for d in deltas for p in d.logprobs)


def test_max_tokens_ends_with_length_and_says_so(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, greedy(max_tokens=3))
    end = next(e for e in run_all(engine) if isinstance(e, SampleFinished) and e.request_id == request_id)
    assert (end.finish_reason, end.detail) == (FinishReason.LENGTH, "max_tokens of 3 reached")


def test_a_stop_token_ends_with_stop_and_is_named(engine: Engine, expected: tuple[int, ...]) -> None:
    stop = expected[5]
    request_id = engine.add_request(PROMPT, greedy(max_tokens=24, stop_token_ids=(stop,)))
    end = next(e for e in run_all(engine) if isinstance(e, SampleFinished) and e.request_id == request_id)
    assert (end.finish_reason, end.stop, end.token_ids) == (FinishReason.STOP, stop, expected[: expected.index(stop) + 1])


def test_a_full_context_keeps_the_answer_so_far_and_says_what_happened() -> None:
    engine = tiny_engine(max_model_len=50)
    request_id = engine.add_request(PROMPT, greedy(max_tokens=100))
    end = next(e for e in run_all(engine) if isinstance(e, SampleFinished) and e.request_id == request_id)
    assert (end.finish_reason, len(end.token_ids)) == (FinishReason.LENGTH, 9)
    assert "context of 50 tokens is full" in end.detail
    assert_whole(engine)


def test_a_pool_held_by_pins_ends_a_lone_stream_with_what_it_had() -> None:
    engine = tiny_engine(kv_memory=16 * 4 * 512)
    generate(engine, PROMPT[:40], greedy(max_tokens=1), prefill_only=True)
    pin = engine.pin(PROMPT[:40])
    request_id = engine.add_request([3, 4, 5], greedy(max_tokens=60))
    end = next(e for e in run_all(engine) if isinstance(e, SampleFinished) and e.request_id == request_id)
    assert end.finish_reason is FinishReason.LENGTH
    assert "pinned prefixes included" in end.detail
    assert len(end.token_ids) > 10
    too_long = engine.add_request([9] * 40, greedy(max_tokens=1))
    failed = next(e for e in run_all(engine) if isinstance(e, RequestFailed) and e.request_id == too_long)
    assert failed.code == ContextLengthError.code
    engine.unpin(pin)
    assert_whole(engine)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_ends_every_sample_within_the_step_and_touches_nobody_else(
    engine: Engine, expected: tuple[int, ...], steps: int
) -> None:
    other = engine.add_request(PROMPT, greedy(max_tokens=24))
    victim = engine.add_request([*PROMPT[:20], 9, 9], SamplingParams(n=4, seed=1, max_tokens=50, ignore_eos=True))
    events = [event for _ in range(steps) for event in engine.step()]
    engine.abort(victim)
    events += engine.step()
    ends = [e for e in events if isinstance(e, SampleFinished) and e.request_id == victim]
    assert [e.finish_reason for e in ends] == [FinishReason.ABORT] * 4
    assert finished(events, victim).usage.completion_tokens == sum(len(e.token_ids) for e in ends)
    assert outputs(events + run_all(engine), other) == [expected]


def test_aborting_one_sample_leaves_its_siblings_alone(engine: Engine) -> None:
    alone = generate(engine, PROMPT, SamplingParams(n=3, seed=2, max_tokens=12, ignore_eos=True))
    request_id = engine.add_request(PROMPT, SamplingParams(n=3, seed=2, max_tokens=12, ignore_eos=True))
    events = [event for _ in range(4) for event in engine.step()]
    engine.abort(request_id, sample=0)
    events += run_all(engine)
    samples = outputs(events, request_id)
    assert samples[1:] == alone[1:]
    assert samples[0] == alone[0][: len(samples[0])]


def test_aborting_an_ended_request_is_fine_and_an_unknown_one_is_an_error(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, greedy(max_tokens=1))
    run_all(engine)
    engine.abort(request_id)
    with pytest.raises(UnknownRequestError, match="'nobody'"):
        engine.abort(RequestId("nobody"))
    with pytest.raises(UnknownRequestError, match="samples 0 to 0"):
        engine.abort(request_id, sample=1)


def test_leaving_a_stream_early_aborts_its_request(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, greedy(max_tokens=50))
    for event in engine.stream(request_id):
        if isinstance(event, TokenDelta):
            break
    run_all(engine)
    assert engine.memory().blocks_used == 0


def test_two_requests_can_be_read_one_after_the_other(engine: Engine) -> None:
    """Reading the first ran the second to its end and threw its events away; reading the second then never returned."""
    ids = [engine.add_request([*PROMPT, i], greedy(max_tokens=4)) for i in range(5, 8)]
    for request_id in ids:
        events = list(engine.stream(request_id))
        assert isinstance(events[-1], RequestFinished)
        assert {event.request_id for event in events} == {request_id}
    with pytest.raises(UnknownRequestError, match="read already"):
        engine.stream(ids[0])
    with pytest.raises(UnknownRequestError, match="'nobody'"):
        engine.stream(RequestId("nobody"))


def test_a_failing_step_ends_its_requests_by_name_and_the_engine_goes_on(
    engine: Engine, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fail(*_: object) -> torch.Tensor:
            raise RuntimeError("the device is gone")

        patch.setattr(engine.model.runner, "forward", fail)
        request_id = engine.add_request(PROMPT, greedy(n=2, max_tokens=5))
        failed = [e for e in run_all(engine) if isinstance(e, RequestFailed)]
    assert [(e.request_id, e.code) for e in failed] == [(request_id, "engine_step_failed")]
    assert "the device is gone" in failed[0].message
    assert generate(engine, PROMPT, greedy(max_tokens=24)) == [expected]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (b"text", "not text or bytes"),
        ([], "empty"),
        ([3, -1], "-1"),
        ([10**6], "outside the vocabulary"),
        ([2**70], "whole numbers"),
        (["a"], "whole numbers"),
    ],
)
def test_a_wrong_prompt_is_refused_and_the_engine_goes_on(engine: Engine, prompt: list[int], match: str) -> None:
    with pytest.raises(InvalidRequestError, match=match):
        engine.add_request(prompt)
    assert generate(engine, PROMPT, greedy(max_tokens=1))


def test_a_prompt_longer_than_the_context_or_the_pool_is_refused_with_the_numbers(engine: Engine) -> None:
    with pytest.raises(ContextLengthError, match=r"3000 tokens; at most \d+ leave room"):
        engine.add_request([5] * 3000)


def test_more_samples_than_sequences_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameterError, match="n is 33, but at most 32"):
        engine.add_request(PROMPT, SamplingParams(n=33))


def test_a_request_id_in_use_is_refused(engine: Engine) -> None:
    engine.add_request(PROMPT, greedy(max_tokens=1), request_id=RequestId("mine"))
    with pytest.raises(InvalidRequestError, match="'mine' is in use"):
        engine.add_request(PROMPT, request_id=RequestId("mine"))


def test_arguments_of_the_wrong_kind_are_refused(engine: Engine) -> None:
    request_id = engine.add_request(PROMPT, greedy(max_tokens=1))
    wrong: Any = {"n": 2}
    with pytest.raises(InvalidParameterError, match="must be SamplingParams, got dict"):
        engine.add_request(PROMPT, wrong)
    wrong = 2.5
    with pytest.raises(InvalidParameterError, match="Cannot fork"):
        engine.fork(request_id, num_tokens=wrong)
    with pytest.raises(UnknownRequestError, match="samples 0 to 0"):
        engine.fork(request_id, sample=wrong)
    with pytest.raises(InvalidRequestError, match="salt must be text"):
        engine.add_request(PROMPT, cache_salt=wrong)
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.pin([])


@pytest.mark.parametrize("position", [-1, 0, 62])
def test_a_fork_position_outside_the_sample_is_refused(engine: Engine, position: int) -> None:
    parent = engine.add_request(PROMPT, greedy(max_tokens=20))
    run_all(engine)
    with pytest.raises(InvalidParameterError, match="choose a position from 1 to 61"):
        engine.fork(parent, num_tokens=position)


def test_a_biased_token_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidParameterError, match="logit_bias"):
        engine.add_request(PROMPT, SamplingParams(logit_bias={10**6: 1.0}))
