"""Random numbers: the same everywhere, uniform along each key."""

import math
from collections.abc import Callable

import numpy as np

from chatpage.engine.random_numbers import draw_seed, uniform
from chatpage.sampling_params import MAX_SEED, SamplingParams

RANDOM_NUMBERS = [0.7027417774293196, 0.9895631476862705, 0.46297842628324803, 0.02357947414840411, 0.2817100058458649]


def test_random_numbers_are_the_same_on_every_machine() -> None:
    """Written down once: another value means that seeds of old conversations no longer repeat their replies."""
    assert [uniform(*key) for key in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (MAX_SEED, 63, 10**9)]] == RANDOM_NUMBERS


def test_random_numbers_are_uniform_and_independent_along_each_key() -> None:
    keys: list[Callable[[int], float]] = [lambda i: uniform(i, 0, 0), lambda i: uniform(0, i, 0), lambda i: uniform(0, 0, i)]
    for number in keys:
        values = np.array([number(i) for i in range(20_000)])
        assert values.min() >= 0.0
        assert values.max() < 1.0
        histogram = np.histogram(values, bins=50, range=(0, 1))[0]
        assert ((histogram - 400) ** 2 / 400).sum() < 49 + 6 * math.sqrt(98)
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.04


def test_drawn_seeds_differ_and_are_valid() -> None:
    seeds = {draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    for seed in seeds:
        SamplingParams(seed=seed)
