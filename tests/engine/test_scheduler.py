"""What a step computes, who waits, who is preempted, and that no block is lost on the way."""

import random

import pytest

from chatpage.engine.sequence import SequenceStatus
from tests.engine.scheduling import SchedulerDriver


def test_a_prompt_is_computed_once_and_every_token_after_it_once() -> None:
    driver = SchedulerDriver()
    driver.add(range(10), max_tokens=5)
    driver.run()
    assert driver.computed_tokens() == 10 + 4  # the last token is sent, not computed
    driver.assert_whole()


def test_a_long_prompt_enters_in_chunks_of_the_budget() -> None:
    driver = SchedulerDriver(max_batched_tokens=7)
    driver.add(range(20), max_tokens=1)
    assert [driver.step().num_tokens for _ in range(3)] == [7, 7, 6]
    driver.assert_whole()


def test_four_equal_prompts_posted_together_compute_their_prompt_once() -> None:
    """On a cold server llama.cpp computed the same prompt four times when it arrived four times at once."""
    driver = SchedulerDriver(max_batched_tokens=8)
    requests = [driver.add(range(30), max_tokens=3) for _ in range(4)]
    driver.run()
    assert driver.computed_tokens() == 30 + 4 * 2
    assert [request.num_cached_tokens for request in requests] == [0, 30, 30, 30]
    driver.assert_whole()


def test_without_kept_tips_an_equal_prompt_computes_only_its_last_token() -> None:
    driver = SchedulerDriver(keep_tips=False)
    requests = [driver.add(range(30), max_tokens=1) for _ in range(4)]
    driver.run()
    assert driver.computed_tokens() == 30 + 3
    assert [request.num_computed_prompt_tokens for request in requests] == [30, 1, 1, 1]
    driver.assert_whole()


def test_prompts_with_a_common_beginning_compute_it_once_to_the_token() -> None:
    driver = SchedulerDriver(max_batched_tokens=64)
    for tail in range(8):
        driver.add([*range(18), 500 + tail, 600 + tail], max_tokens=1)  # 18 is no multiple of the block size
    driver.run()
    assert driver.computed_tokens() == 20 + 7 * 2
    driver.assert_whole()


def test_equal_prompts_under_different_salts_share_nothing() -> None:
    driver = SchedulerDriver()
    a = driver.add(range(12), salt="ada", max_tokens=1)
    b = driver.add(range(12), salt="bob", max_tokens=1)
    driver.run()
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0)
    assert driver.computed_tokens() == 24
    driver.assert_whole()


def test_n_samples_hold_their_prompt_once() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add(range(10), n=8, max_tokens=5)
    driver.step()
    driver.step()
    # two full shared blocks, and one tail with the copied rows per sample
    assert driver.pool.num_used == 2 + 8
    assert driver.computed_tokens() == 10 + 8
    driver.run()
    driver.assert_whole()


def test_n_samples_of_a_prompt_that_fills_its_blocks_copy_nothing() -> None:
    driver = SchedulerDriver(block_size=4)
    driver.add(range(12), n=8, max_tokens=4)
    driver.run()
    assert [copy for plan in driver.plans for copy in plan.copies] == []
    driver.assert_whole()


def test_a_regeneration_needs_no_model_at_all_when_the_tip_was_kept() -> None:
    driver = SchedulerDriver()
    driver.add(range(10), max_tokens=1)
    driver.run()
    again = driver.add(range(10), max_tokens=1)
    plan = driver.step()
    assert plan.num_tokens == 0
    assert [sequence.request for sequence in plan.ready] == [again]
    driver.assert_whole()


def test_a_next_turn_computes_exactly_its_new_tokens() -> None:
    driver = SchedulerDriver()
    first = driver.add(range(10), max_tokens=6)
    driver.run()
    before = driver.computed_tokens()
    driver.add([*first.sequences[0].token_ids, 77, 78, 79], max_tokens=1)
    driver.run()
    # three new tokens and the last token of the reply, which was sent without being computed
    assert driver.computed_tokens() - before == 3 + 1
    driver.assert_whole()


def test_streams_go_on_while_a_long_prompt_enters() -> None:
    driver = SchedulerDriver(max_batched_tokens=16, num_blocks=128)
    stream = driver.add([1, 2, 3], max_tokens=40)
    driver.step()
    driver.add(range(100, 300), max_tokens=1)
    for _ in range(20):
        before = stream.sequences[0].num_output_tokens
        plan = driver.step()
        assert stream.sequences[0].num_output_tokens == before + 1
        assert plan.num_tokens <= 1 + 16 // 4
    driver.run()
    driver.assert_whole()


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    driver = SchedulerDriver(max_batched_tokens=16, num_blocks=128)
    driver.add(range(100, 400), max_tokens=1)
    driver.step()
    short = driver.add([1, 2, 3, 4, 5], max_tokens=1)
    driver.step()
    assert short.sequences[0].is_finished
    driver.run()
    driver.assert_whole()


def test_a_budget_smaller_than_the_number_of_streams_goes_round() -> None:
    driver = SchedulerDriver(max_batched_tokens=3, num_blocks=128)
    requests = [driver.add([10 * i, 10 * i + 1], max_tokens=6) for i in range(1, 9)]
    for _ in range(20):
        driver.step()
    progress = [request.sequences[0].num_output_tokens for request in requests]
    assert min(progress) >= max(progress) - 3
    driver.run()
    driver.assert_whole()


def test_the_youngest_is_preempted_and_later_goes_on_with_what_it_had() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4)
    old = driver.add(range(12), max_tokens=8)
    young = driver.add(range(100, 112), max_tokens=8)
    driver.run()
    assert young.num_preemptions > 0
    assert old.num_preemptions == 0
    assert young.sequences[0].output_token_ids == [1000 + i for i in range(8)]
    driver.assert_whole()


def test_a_pool_full_of_cached_blocks_still_admits() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4)
    for start in range(0, 1000, 100):
        driver.add(range(start, start + 28), max_tokens=2)
        driver.run()
    assert driver.pool.num_cached_free > 0
    driver.assert_whole()


def test_hits_are_held_before_anything_is_allocated() -> None:
    """Allocating first evicted the very blocks that the lookup had just found."""
    driver = SchedulerDriver(num_blocks=8, block_size=4)
    driver.add(range(16), max_tokens=1)
    driver.run()
    driver.add(range(100, 112), max_tokens=1)
    driver.run()
    hit = driver.add([*range(16), *range(50, 62)], max_tokens=1)
    driver.run()
    assert hit.num_cached_tokens == 16
    driver.assert_whole()


def test_a_prompt_waits_until_all_of_it_fits_beside_the_running_ones() -> None:
    driver = SchedulerDriver(num_blocks=8, block_size=4, max_batched_tokens=8)
    first = driver.add(range(24), max_tokens=2)
    driver.step()
    second = driver.add(range(100, 116), max_tokens=2)
    driver.step()
    assert second.sequences[0].status is SequenceStatus.WAITING
    driver.run()
    assert first.num_preemptions == second.num_preemptions == 0
    driver.assert_whole()


def test_a_sequence_that_is_alone_and_finds_no_block_is_starved_not_stuck() -> None:
    driver = SchedulerDriver(num_blocks=4, block_size=4)
    request = driver.add(range(12), max_tokens=8)
    plans = [driver.step() for _ in range(6)]
    assert plans[-1].starved == (request.sequences[0],)
    driver.scheduler.finish(request.sequences[0])
    driver.assert_whole()


@pytest.mark.parametrize("steps_before", range(4))
def test_aborting_the_leader_leaves_its_siblings_the_work_it_did(steps_before: int) -> None:
    driver = SchedulerDriver(max_batched_tokens=4)
    request = driver.add(range(10), n=3, max_tokens=3)
    for _ in range(steps_before):
        driver.step()
    driver.scheduler.finish(request.sequences[0])
    driver.check()
    driver.run()
    assert [s.num_output_tokens for s in request.sequences[1:]] == [3, 3]
    assert request.num_computed_prompt_tokens == 10
    driver.assert_whole()


@pytest.mark.parametrize("steps_before", range(5))
def test_aborting_every_sample_gives_every_block_back(steps_before: int) -> None:
    """An abort of an n > 1 request must stop all its samples, at every stage, queued ones included."""
    driver = SchedulerDriver(max_batched_tokens=4)
    driver.add(range(50, 60), n=2, max_tokens=3)
    request = driver.add(range(10), n=4, max_tokens=3)
    for _ in range(steps_before):
        driver.step()
    for sequence in request.live_sequences:
        driver.scheduler.finish(sequence)
    assert not [s for s in (*driver.scheduler.running, *driver.scheduler.waiting) if s.request is request]
    driver.run()
    driver.assert_whole()


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_ends_and_gives_everything_back(seed: int) -> None:
    """Adds with shared prefixes, samples and aborts at random on a tiny pool: no deadlock, no leak, every sample complete."""
    rng = random.Random(seed)
    driver = SchedulerDriver(
        num_blocks=rng.choice([8, 12, 32]),
        block_size=rng.choice([1, 2, 4]),
        max_batched_tokens=rng.choice([3, 8, 64]),
        max_num_seqs=8,
    )
    capacity = driver.pool.num_blocks * driver.pool.block_size
    requests, aborted = [], set()
    for _ in range(60):
        if rng.random() < 0.4:
            length = rng.randint(1, capacity - 4)
            prompt = [rng.randint(0, 1) if rng.random() < 0.1 else 0 for _ in range(length)]
            requests.append(driver.add(prompt, n=rng.randint(1, 4), max_tokens=rng.randint(1, 3), salt=rng.choice("ab")))
        if rng.random() < 0.1 and requests and (live := rng.choice(requests).live_sequences):
            victim = rng.choice(live)
            driver.scheduler.finish(victim)
            aborted.add(victim)
        driver.step()
        assert not driver.plans[-1].starved
    driver.run(max_steps=5000)
    for request in requests:
        for sequence in request.sequences:
            assert sequence in aborted or sequence.num_output_tokens == request.params.max_tokens
    driver.assert_whole()
