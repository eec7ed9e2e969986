"""Requests and their sequences: what the scheduler moves and the memory holds.

A `Request` is one action of a user; a `Sequence` is one sample of it. Invariants: `token_ids` only grows;
`num_computed_tokens <= num_tokens`; only a running sequence holds blocks, and its table covers what it has computed.

    token_ids   [ prompt ................ | output ....... ]
                0                num_prompt_tokens      num_tokens
    computed    [ ..................................... )  num_computed_tokens; the rest goes through the model next
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from chatpage.engine.block_table import BlockTable
from chatpage.engine.prefix_tree import RootKey
from chatpage.events import RequestId
from chatpage.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence stands; `Sequence.move_to` holds the allowed moves."""

    PENDING = auto()  # a sibling computes the prompt for it
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()  # waits again, with output that was already sent
    FINISHED = auto()


_MOVES = {
    SequenceStatus.PENDING: {SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED},
    SequenceStatus.WAITING: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.RUNNING: {SequenceStatus.PREEMPTED, SequenceStatus.FINISHED},
    SequenceStatus.PREEMPTED: {SequenceStatus.RUNNING, SequenceStatus.FINISHED},
    SequenceStatus.FINISHED: set[SequenceStatus](),
}


@dataclass(slots=True, eq=False)
class Request:
    """One user action: a prompt and how many samples of what follows.

    Until the prompt is computed one sequence, the leader, stands for all of them; then each goes its own way.
    `arrival` orders requests: an older one is served first and preempted last.
    """

    id: RequestId
    prompt_token_ids: list[int]
    params: SamplingParams
    root: RootKey
    seed: int
    arrival: int
    added_at: float
    prefill_only: bool = False
    sequences: list["Sequence"] = field(default_factory=list)
    is_started: bool = False
    is_forked: bool = False
    num_cached_tokens: int | None = None  # None until it first entered
    num_computed_prompt_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.sequences = [
            Sequence(request=self, sample=sample, token_ids=list(self.prompt_token_ids)) for sample in range(self.params.n)
        ]

    @property
    def live_sequences(self) -> list["Sequence"]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def num_completion_tokens(self) -> int:
        return sum(sequence.num_output_tokens for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request: its tokens, how many are computed, and the blocks that hold them."""

    request: Request
    sample: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    table: BlockTable | None = None
    status: SequenceStatus = SequenceStatus.PENDING
    may_be_on_disk: bool = False  # since it was preempted
    last_step: int = 0  # number of the step that last computed it, so that a small budget goes round

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_tokens_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: older first."""
        return self.request.arrival, self.sample

    def move_to(self, status: SequenceStatus) -> None:
        assert status in _MOVES[self.status], f"sequence cannot go from {self.status.name} to {status.name}"
        self.status = status

    def share_blocks_of(self, leader: "Sequence") -> None:
        """Start from what the leader computed: the same blocks, nothing copied until one of the two writes."""
        assert leader.table is not None
        self.num_computed_tokens = leader.num_computed_tokens
        self.table = leader.table.fork(leader.num_computed_tokens)
        self.last_step = leader.last_step
        self.move_to(SequenceStatus.RUNNING)

    def take_over(self, leader: "Sequence") -> None:
        """Become the leader in its place: its blocks and its state are now ours."""
        self.num_computed_tokens, leader.num_computed_tokens = leader.num_computed_tokens, 0
        self.table, leader.table = leader.table, None
        self.last_step = leader.last_step
        self.move_to(leader.status)

    def release_blocks(self) -> None:
        """Give every block back; what was committed stays findable until it is evicted."""
        if self.table is not None:
            self.table.free()
            self.table = None
