"""A driver for scheduler tests: a stand-in model that computes instantly and generates token 1, 2, 3, ..."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import count

from chatpage.engine.accounting import check_integrity
from chatpage.engine.block_pool import BlockPool
from chatpage.engine.prefix_tree import PrefixTree, RootKey
from chatpage.engine.scheduler import Scheduler, StepPlan
from chatpage.engine.sequence import Request, Sequence, SequenceStatus
from chatpage.events import RequestId
from chatpage.sampling_params import SamplingParams


class SchedulerDriver:
    """Runs steps as the executor does, without tensors, and proves the memory whole after each."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batched_tokens: int = 64,
        max_num_seqs: int = 16,
        keep_tips: bool = True,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tree = PrefixTree(self.pool)
        self.tips: set[tuple[RootKey, tuple[int, ...]]] = set()
        self.keep_tips = keep_tips
        self.scheduler = Scheduler(
            self.pool,
            self.tree,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
            has_tip=lambda s: (s.request.root, tuple(s.token_ids)) in self.tips,
        )
        self.arrivals = count(1)
        self.plans: list[StepPlan] = []

    def add(
        self, prompt: Iterable[int], *, n: int = 1, max_tokens: int = 4, salt: str = "", prefill_only: bool = False
    ) -> Request:
        arrival = next(self.arrivals)
        request = Request(
            id=RequestId(f"r{arrival}"),
            prompt_token_ids=list(prompt),
            params=SamplingParams(n=n, max_tokens=max_tokens),
            root=RootKey("model", salt),
            seed=0,
            arrival=arrival,
            added_at=0.0,
            prefill_only=prefill_only,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        sampling = [s.sequence for s in plan.scheduled if s.wants_logits] + list(plan.ready)
        self.scheduler.complete(plan)
        for sequence in sampling:
            if self.keep_tips and sequence.num_output_tokens == 0:
                self.tips.add((sequence.request.root, tuple(sequence.token_ids)))
            if not sequence.request.is_forked:
                self.scheduler.fork_samples(sequence)
                self._generate(sequence.request.live_sequences)
            else:
                self._generate([sequence])
        self.check()
        return plan

    def _generate(self, sequences: SequenceOf[Sequence]) -> None:
        for sequence in sequences:
            sequence.token_ids.append(1000 * (sequence.sample + 1) + sequence.num_output_tokens)
            if sequence.num_output_tokens == sequence.request.params.max_tokens:
                self.scheduler.finish(sequence)

    def run(self, *, max_steps: int = 1000) -> int:
        """Step until nothing is left; return how many steps that took."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                return steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {len(self.scheduler.waiting)} waiting")

    def computed_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)

    def check(self) -> None:
        tables = [s.table for s in self.scheduler.running if s.table is not None]
        assert len(tables) == len(self.scheduler.running)
        check_integrity(self.pool, self.tree, tables)
        for sequence in self.scheduler.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.table is not None
            assert sequence.table.num_committed == sequence.num_computed_tokens
        assert all(sequence.table is None for sequence in self.scheduler.waiting)

    def assert_whole(self) -> None:
        """The pool is whole again: nothing is used, nothing waits."""
        self.check()
        assert self.pool.num_used == 0
        assert not self.scheduler.has_work
