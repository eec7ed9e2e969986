"""What the engine is, what it did, as numbers that only grow, and what a prompt would cost before it is sent.

Invariant: counters count tokens and rows exactly; nothing here is sampled or estimated except the times.
"""

from dataclasses import dataclass

from chatpage.engine.accounting import MemoryReport
from chatpage.engine.block_pool import BlockId
from chatpage.engine.kv_disk.stats import KvDiskStats
from chatpage.engine.scheduler import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is: constant from its start to its end.

    Args:
        model: The name of the model as the user gave it.
        model_id: Digest of weights, dtype and settings.
        description: For people: architecture, size, dtype, quantization, device.
        tokenizer_path: The folder its tokenizer was loaded from.
        max_model_len: Longest sequence in tokens, prompt and output together, after every limit.
    """

    model: str
    model_id: str
    description: str
    tokenizer_path: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    max_num_seqs: int
    max_batched_tokens: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    device: str
    dtype: str
    backend: str
    backend_reason: str


@dataclass(frozen=True, slots=True)
class PrefixCost:
    """What sending a prompt would cost now."""

    prompt_tokens: int
    cached_tokens: int
    tokens_to_compute: int
    blocks_shared: int


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """Where the cached beginning of some tokens lies: block i holds the tokens `[i * block_size, (i + 1) * block_size)`.

    The last one may hold fewer of them: `num_tokens` are there in all.
    """

    block_ids: tuple[BlockId, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: totals since the engine started, queues and memory as they are now."""

    num_steps: int
    num_waiting: int
    num_running: int
    num_preemptions: int
    prompt_tokens: int  # of all requests that entered
    cached_tokens: int  # of those, found in shared blocks
    computed_tokens: int  # tokens that went through the model
    generated_tokens: int
    num_block_copies: int  # copies on write
    copied_rows: int
    copied_bytes: int
    step_seconds: float
    last_step_seconds: float
    memory: MemoryReport
    disk: KvDiskStats | None = None  # None if KV does not outlive the process


@dataclass(slots=True)
class StepCounters:
    """The running totals behind `EngineStats`."""

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    num_block_copies: int = 0
    copied_rows: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0

    def record_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def record_step(self, plan: StepPlan, generated_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        self.computed_tokens += plan.num_tokens
        self.generated_tokens += generated_tokens
        self.num_block_copies += len(plan.copies)
        self.copied_rows += sum(copy.num_rows for copy in plan.copies)
        self.step_seconds += seconds
        self.last_step_seconds = seconds
