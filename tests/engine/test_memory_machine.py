"""Random operations on the block memory against a shadow of every row, with every row that nobody may read poisoned.

Engines lost or mixed up KV in ways that no single test had foreseen: a block twice in the free queue, a hit evicted by its own
allocation, a tail overwritten under another branch, an aborted step that published what it never computed.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatpage.engine.prefix_tree import RootKey
from tests.engine.shadow_memory import ALPHABET, ROOTS, ShadowMemory, Work

NUM_OPERATIONS = 8_500  # times 12 pools: more than 100,000


class Driver:
    """Draws operations so that prefixes, forks, twins and full pools are common."""

    def __init__(self, seed: int, num_blocks: int, block_size: int) -> None:
        self._random = random.Random(seed)
        self.memory = ShadowMemory(num_blocks, block_size)
        self._block_size = block_size
        self._history: list[list[int]] = [[]]
        self._most_tokens = num_blocks * block_size

    def run(self, num_operations: int) -> Counter[str]:
        operations = (self._step, self._add, self._fork, self._free, self._pin, self._unpin, self._forget)
        for operation in self._random.choices(operations, weights=(50, 16, 10, 12, 3, 4, 0.5), k=num_operations):
            operation()
            self.memory.check()
        self.memory.finish()
        return self.memory.seen

    def _tokens(self) -> list[int]:
        """A prefix of something that existed, and something new behind it."""
        known = self._random.choice(self._history)
        kept = self._random.choice((len(known), self._random.randint(0, len(known))))
        new = self._random.choices(ALPHABET, k=self._random.randint(0, 2 * self._block_size))
        tokens = (known[:kept] + new)[: self._most_tokens - 1] or [3]
        self._history = [*self._history[-30:], tokens]
        return tokens

    def _add(self) -> None:
        tokens = self._tokens()
        if len(self.memory.sequences) < 8:
            self.memory.add(self._random.choice(ROOTS), tokens, len(tokens) - self._random.randint(0, 1))

    def _fork(self) -> None:
        if 0 < len(self.memory.sequences) < 8:
            index = self._random.randrange(len(self.memory.sequences))
            length = self.memory.sequences[index].num_committed
            self.memory.fork(index, self._random.choice((length, self._random.randint(0, length))))

    def _free(self) -> None:
        if self.memory.sequences:
            index = self._random.randrange(len(self.memory.sequences))
            self._history.append(list(self.memory.sequences[index].tokens))
            self.memory.free(index)

    def _step(self) -> None:
        count = len(self.memory.sequences)
        indices = self._random.sample(range(count), self._random.randint(0, count))
        works = [self._work(index) for index in indices]
        self.memory.step(works, frees_before_sources=self._random.random() < 0.5)

    def _work(self, index: int) -> Work:
        num_tokens = self._random.choice((1, 1, 1, self._random.randint(1, 2 * self._block_size)))
        return Work(
            index,
            new_tokens=tuple(self._random.choices(ALPHABET, k=num_tokens)),
            num_tokens=num_tokens,
            num_given_up=self._random.choice((0, 0, 0, 1)),
            is_aborted=self._random.random() < 0.04,
        )

    def _pin(self) -> None:
        if len(self.memory.pins) < 2:
            self.memory.pin(self._random.choice(ROOTS), self._tokens())

    def _unpin(self) -> None:
        if self.memory.pins:
            self.memory.unpin(self._random.randrange(len(self.memory.pins)))

    def _forget(self) -> None:
        self.memory.forget(self._random.choice((None, *ROOTS)))


@pytest.mark.parametrize("num_blocks", [8, 20, 64])
@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_every_sequence_reads_exactly_its_own_rows(block_size: int, num_blocks: int) -> None:
    seen = Driver(block_size * 1000 + num_blocks, num_blocks, block_size).run(NUM_OPERATIONS)
    expected = {"hit", "miss", "evict", "dedupe", "abort"}
    expected |= {"copy"} if block_size > 1 else set()
    expected |= {"refused", "out of blocks"} if num_blocks == 8 else set()
    expected |= {"trim"} if num_blocks == 8 and block_size > 1 else set()
    assert {name for name, count in seen.items() if count} >= expected, f"this run met only {dict(seen)}"


tokens_strategy = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=9)
roots_strategy = st.sampled_from(ROOTS)
picks = st.integers(0, 63)


class BlockMemoryMachine(RuleBasedStateMachine):
    """The same operations, drawn by Hypothesis, which shrinks what fails to the shortest story."""

    @initialize(block_size=st.sampled_from([1, 2, 3, 4]), num_blocks=st.integers(4, 12))
    def make(self, block_size: int, num_blocks: int) -> None:
        self.memory = ShadowMemory(num_blocks, block_size)

    @rule(root=roots_strategy, tokens=tokens_strategy, spared=st.integers(0, 1))
    def add(self, root: RootKey, tokens: list[int], spared: int) -> None:
        if len(self.memory.sequences) < 6:
            self.memory.add(root, tokens, len(tokens) - spared)

    @precondition(lambda self: self.memory.sequences)
    @rule(pick=picks, at=picks)
    def fork(self, pick: int, at: int) -> None:
        if len(self.memory.sequences) < 6:
            index = pick % len(self.memory.sequences)
            self.memory.fork(index, at % (self.memory.sequences[index].num_committed + 1))

    @precondition(lambda self: self.memory.sequences)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        self.memory.free(pick % len(self.memory.sequences))

    @precondition(lambda self: self.memory.sequences)
    @rule(
        tokens=tokens_strategy,
        counts=st.lists(st.integers(0, 6), min_size=6, max_size=6),
        given_up=st.integers(0, 2),
        aborted=st.sets(st.integers(0, 40), max_size=2),
        frees_first=st.booleans(),
    )
    def step(self, tokens: list[int], counts: list[int], given_up: int, aborted: set[int], frees_first: bool) -> None:
        works = [
            Work(i, tuple(tokens), count, given_up, is_aborted=i in aborted)
            for i, (count, _) in enumerate(zip(counts, self.memory.sequences, strict=False))
            if count
        ]
        self.memory.step(works, frees_before_sources=frees_first)

    @rule(root=roots_strategy, tokens=tokens_strategy)
    def pin(self, root: RootKey, tokens: list[int]) -> None:
        if len(self.memory.pins) < 2:
            self.memory.pin(root, tokens)

    @precondition(lambda self: self.memory.pins)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        self.memory.unpin(pick % len(self.memory.pins))

    @rule(root=st.none() | roots_strategy)
    def forget(self, root: RootKey | None) -> None:
        self.memory.forget(root)

    @invariant()
    def everything_reads_its_own_rows(self) -> None:
        if hasattr(self, "memory"):
            self.memory.check()

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.finish()


TestBlockMemoryMachine = BlockMemoryMachine.TestCase
TestBlockMemoryMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
