"""Decides what the next step computes, within one token budget, and which blocks it may write.

There are no prefill and decode phases: every running sequence has tokens that are not computed yet (one when it decodes,
many when its prompt enters), and the budget is shared out over all of them.

    running   oldest first; each holds a block table     schedule() ──> StepPlan ──> the model ──> complete()
    waiting   oldest first; holds nothing                preemption moves the youngest back to the head of waiting

Invariants: a waiting sequence holds no block; after `complete()` every running table covers exactly what is computed.
Blocks are taken check-first: `BlockTable.prepare` either gives all it needs or changes nothing.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from chatpage.engine.block_pool import BlockCopy, BlockPool
from chatpage.engine.block_table import BlockTable
from chatpage.engine.prefix_tree import PrefixTree
from chatpage.engine.sequence import Request, Sequence, SequenceStatus
from chatpage.events import RequestId

# Beside running streams a long prompt gets this share of the budget, so that streams stay smooth while it enters.
PREFILL_SHARE_BESIDE_STREAMS = 0.25


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_tokens) of one sequence go through the model in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def wants_logits(self) -> bool:
        """Whether the step reaches the last known token, so that the next one can be sampled."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: run `copies` first, then the model over `scheduled`, then sample.

    `ready` sequences need no model: the logits at their tip were kept. `starved` ones can never go on: nobody else holds
    blocks they could wait for.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...]
    ready: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]
    starved: tuple[Sequence, ...]

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_tokens for scheduled in self.scheduled)


class Loads(Protocol):
    """Requests whose first blocks are on their way from elsewhere, and the blocks that hold what has arrived."""

    @property
    def has_loads(self) -> bool: ...

    def is_loading(self, request_id: RequestId) -> bool:
        """Whether the request must wait."""

    def give_up(self) -> bool:
        """Let go of the blocks of a load; False if none has any."""

    def keep(self, sequence: Sequence) -> None:
        """A sequence was preempted: save what it computed before it is evicted."""

    def resume(self, sequence: Sequence) -> bool:
        """A preempted sequence has room again: load what memory has lost of it; False if that is nothing, or takes longer."""


class Scheduler:
    """Owns the waiting and running sequences and is the only one that moves them.

    Args:
        has_tip: Whether the logits after a sequence's last token were kept, so that nothing of it must be computed again.
        loads: What is on its way from disk; None if there is none.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixTree,
        *,
        max_batched_tokens: int,
        max_num_seqs: int,
        has_tip: Callable[[Sequence], bool],
        loads: Loads | None = None,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._max_batched_tokens = max_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._has_tip = has_tip
        self._loads = loads
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.step_number = 0
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that the known tokens of running sequences, and one more of each, still take."""
        return sum(_blocks_to_go(sequence) for sequence in self.running)

    def add(self, request: Request) -> None:
        """Queue a new request behind the older ones; its first sequence leads."""
        leader = request.sequences[0]
        leader.move_to(SequenceStatus.WAITING)
        self.waiting.append(leader)

    def fork_samples(self, leader: Sequence) -> None:
        """Let every sibling go its own way on the leader's blocks, once the whole prompt is computed."""
        request = leader.request
        siblings = [sequence for sequence in request.sequences if sequence.status is SequenceStatus.PENDING]
        for sibling in siblings:
            sibling.share_blocks_of(leader)
        at = self.running.index(leader) + 1
        self.running[at:at] = siblings
        request.is_forked = True

    def finish(self, sequence: Sequence) -> None:
        """End a sequence wherever it stands and give its blocks back; a leader hands its work to a sibling first."""
        if sequence.status is not SequenceStatus.PENDING:
            queue = self.running if sequence.status is SequenceStatus.RUNNING else self.waiting
            heir = next((s for s in sequence.request.sequences if s.status is SequenceStatus.PENDING), None)
            if heir is None:
                queue.remove(sequence)
            else:
                heir.take_over(sequence)
                queue[queue.index(sequence)] = heir
        sequence.release_blocks()
        sequence.move_to(SequenceStatus.FINISHED)

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step and make their slots writable."""
        self.step_number += 1
        candidates = self._find_candidates()
        shares = self._share_budget({s: s.num_tokens_to_compute for s in self.running} | candidates)
        scheduled: list[ScheduledSequence] = []
        copies: list[BlockCopy] = []
        starved: list[Sequence] = []
        preempted_before = self.num_preemptions
        for sequence in tuple(self.running):
            if sequence.status is not SequenceStatus.RUNNING or not shares.get(sequence):
                continue
            if self._make_room(sequence, shares[sequence]):
                self._take(sequence, shares[sequence], scheduled, copies)
            elif sequence.status is SequenceStatus.RUNNING:
                starved.append(sequence)
        admitted: list[Sequence] = []
        if self.num_preemptions == preempted_before and not starved:
            admitted = self._admit(tuple(candidates))
            if not self.running and self.waiting and not admitted and not (self._loads and self._loads.has_loads):
                starved.append(self.waiting[0])
        for sequence in admitted:
            tokens = min(sequence.num_tokens_to_compute, shares.get(sequence, 0))
            if tokens:
                self._take(sequence, tokens, scheduled, copies)
        ready = tuple(sequence for sequence in admitted if sequence.num_tokens_to_compute == 0)
        return StepPlan(tuple(scheduled), tuple(copies), ready, tuple(admitted), tuple(starved))

    def complete(self, plan: StepPlan) -> None:
        """Record that the step ran: its tokens are computed, findable by others, and the sources of copies free to go."""
        self.release_copies(plan)
        for scheduled in plan.scheduled:
            sequence = scheduled.sequence
            if sequence.is_finished:
                continue
            assert sequence.table is not None
            sequence.num_computed_tokens = scheduled.start + scheduled.num_tokens
            sequence.table.commit(sequence.token_ids, sequence.num_computed_tokens)
            in_prompt = min(sequence.num_computed_tokens, sequence.num_prompt_tokens) - scheduled.start
            sequence.request.num_computed_prompt_tokens += max(0, in_prompt)

    def release_copies(self, plan: StepPlan) -> None:
        """Unpin the sources of the step's copies: they ran, or never will."""
        for copy in plan.copies:
            self._pool.release(copy.src)

    # -- choosing --------------------------------------------------------------------------------------------------

    def _find_candidates(self) -> dict[Sequence, int]:
        """Waiting sequences that may enter now, oldest first, with the tokens they must compute.

        One that a running neighbour computes for, or whose blocks come from disk, is passed over.
        """
        candidates: dict[Sequence, int] = {}
        slots = self._max_num_seqs - sum(_num_slots(sequence) for sequence in self.running)
        tokens = self._max_batched_tokens - len(self.running)
        for sequence in self.waiting:
            if self._loads and self._loads.is_loading(sequence.request.id):
                continue
            slots -= _num_slots(sequence)
            if slots < 0 or tokens <= 0:
                break
            cached, limit = self._match_length(sequence)
            if self._is_computed_by_another(sequence, cached, limit, candidates):
                continue
            candidates[sequence] = sequence.num_tokens - cached
            tokens -= candidates[sequence]
        return candidates

    def _match_length(self, sequence: Sequence) -> tuple[int, int]:
        limit = self._reuse_limit(sequence)
        return self._tree.match(sequence.request.root, sequence.token_ids, limit).num_tokens, limit

    def _reuse_limit(self, sequence: Sequence) -> int:
        """All tokens if the logits after the last were kept; else the last one must go through the model."""
        return sequence.num_tokens if self._has_tip(sequence) else sequence.num_tokens - 1

    def _is_computed_by_another(self, sequence: Sequence, cached: int, limit: int, candidates: Iterable[Sequence]) -> bool:
        """Whether waiting a step or more gives this sequence tokens that a neighbour's prompt is about to compute.

        Four identical prompts posted together are computed once because of this: three wait for the first.
        """
        entering = [s for s in self.running if s.num_output_tokens == 0 or s.num_tokens_to_compute > 1]
        return any(
            other.request.root == sequence.request.root
            and min(limit, _common_prefix(sequence.token_ids, other.token_ids)) > cached
            for other in (*entering, *candidates)
        )

    def _share_budget(self, needs: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """Share the token budget: everyone gets a fair part, nobody more than needed, the longest unserved first.

        A sequence that decodes needs one token; what they leave goes to entering prompts in equal parts, so a short
        prompt does not wait behind a long one.
        """
        order = sorted((s for s, need in needs.items() if need), key=lambda s: (s.last_step, s.age))
        order = order[: self._max_batched_tokens]
        num_streams = sum(1 for s in order if needs[s] == 1)
        budget = self._max_batched_tokens
        if num_streams:
            budget = max(len(order), min(budget, num_streams + int(budget * PREFILL_SHARE_BESIDE_STREAMS)))
        shares: dict[Sequence, int] = {}
        for position, sequence in enumerate(sorted(order, key=lambda s: needs[s])):
            share = min(needs[sequence], budget // (len(order) - position))
            shares[sequence] = share
            budget -= share
        return shares

    # -- taking ----------------------------------------------------------------------------------------------------

    def _take(self, sequence: Sequence, num_tokens: int, scheduled: list[ScheduledSequence], copies: list[BlockCopy]) -> None:
        assert sequence.table is not None
        copies += sequence.table.prepare(sequence.num_computed_tokens + num_tokens)
        sequence.last_step = self.step_number
        scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens))

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt from the youngest on until `sequence` can take its blocks; False if it was preempted or nobody is left."""
        assert sequence.table is not None
        while sequence.table.blocks_needed(sequence.num_computed_tokens + num_tokens) > self._pool.num_available:
            if self._loads and self._loads.give_up():
                continue
            victim = max(self.running, key=lambda s: s.age)
            if victim is sequence:
                if len(self.running) == 1:
                    return False
                self.preempt(sequence)
                return False
            self.preempt(victim)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Send a running sequence back to wait; its tokens stay, and what is not evicted is found again."""
        self.running.remove(sequence)
        sequence.release_blocks()
        sequence.num_computed_tokens = 0
        sequence.move_to(SequenceStatus.PREEMPTED)
        sequence.request.num_preemptions += 1
        if self._loads:
            self._loads.keep(sequence)
            sequence.may_be_on_disk = True
        self.num_preemptions += 1
        older = len(tuple(takewhile(lambda waiting: waiting.age < sequence.age, self.waiting)))
        self.waiting.insert(older, sequence)

    def _admit(self, candidates: Iterable[Sequence]) -> list[Sequence]:
        """Let candidates in, oldest first, while all their known tokens fit beside what running prompts still need."""
        admitted: list[Sequence] = []
        promised = self.num_promised_blocks
        for sequence in candidates:
            table = BlockTable(self._pool, self._tree, sequence.request.root)
            # All hits are held before anything is allocated, else allocating could evict them.
            match = self._tree.match(sequence.request.root, sequence.token_ids, self._reuse_limit(sequence))
            table.adopt(match)
            needed = table.blocks_needed(sequence.num_tokens + 1)
            if needed + promised > self._pool.num_available:
                table.free()
                break
            if self._must_load(sequence):
                table.free()
                promised += needed
                continue
            self._enter(sequence, table, match.num_tokens)
            admitted.append(sequence)
            promised += needed
        return admitted

    def _must_load(self, sequence: Sequence) -> bool:
        """Whether a preempted sequence waits a little longer, because blocks of it come back from disk; tried only once."""
        is_asked, sequence.may_be_on_disk = sequence.may_be_on_disk, False
        return is_asked and self._loads is not None and self._loads.resume(sequence)

    def _enter(self, sequence: Sequence, table: BlockTable, num_cached_tokens: int) -> None:
        self.waiting.remove(sequence)
        sequence.table = table
        sequence.num_computed_tokens = num_cached_tokens
        sequence.move_to(SequenceStatus.RUNNING)
        younger = len(tuple(takewhile(lambda running: running.age < sequence.age, self.running)))
        self.running.insert(younger, sequence)
        if sequence.request.num_cached_tokens is None:
            sequence.request.num_cached_tokens = num_cached_tokens


def _num_slots(sequence: Sequence) -> int:
    """Sequences this one stands for: a leader for all that live, any other for itself."""
    return 1 if sequence.request.is_forked else len(sequence.request.live_sequences)


def _blocks_to_go(sequence: Sequence) -> int:
    assert sequence.table is not None
    return sequence.table.blocks_needed(sequence.num_tokens + 1)


def _common_prefix(a: SequenceOf[int], b: SequenceOf[int]) -> int:
    """Length of the longest common prefix; doubling slices let C compare most of it."""
    low, high = 0, min(len(a), len(b))
    step = 32
    while low < high:
        stop = min(low + step, high)
        if a[low:stop] == b[low:stop]:
            low, step = stop, step * 2
        elif stop - low == 1:
            return low
        else:
            high, step = stop, (stop - low) // 2
    return low
