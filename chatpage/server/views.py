"""What the messages of `chatpage.v1` are made of: parameters, a run request, and views of what the server holds.

Invariant: the same as of the messages, in `chatpage.server.protocol`: what exists is whole and within limits.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

from chatpage.sampling_params import MAX_LOGPROBS, MAX_SAMPLES, MAX_SEED, MAX_STOP_STRINGS
from chatpage.store.records import NodeStatus, Role, RunKind

MAX_MESSAGE_BYTES = 2**20
MAX_INPUT = 400_000  # characters
MAX_ID = 200

Id = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID, pattern=r"^[^\x00-\x1f\x7f]+$")]
Text = Annotated[str, StringConstraints(max_length=MAX_INPUT)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0)]


class Model(BaseModel):
    """Base of everything on the wire."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), ser_json_inf_nan="null"
    )

    def to_json(self) -> str:
        """Return the message as one line of JSON, without the fields that are not set."""
        return self.model_dump_json(exclude_none=True)


class SamplingFields(Model):
    """How tokens are chosen, for every interface alike."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    top_p: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop_token_ids: tuple[TokenId, ...] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)


class RunParams(SamplingFields):
    """Sampling parameters; what is left out comes from the conversation, its preset, and the server, in this order."""

    stop: tuple[Annotated[str, StringConstraints(min_length=1, max_length=1000)], ...] | None = Field(
        default=None, max_length=MAX_STOP_STRINGS
    )
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    template_variables: dict[Annotated[str, StringConstraints(max_length=100)], bool | int | float | str] | None = Field(
        default=None, max_length=16, description="variables for the chat template, such as enable_thinking"
    )


class RunRequest(Model):
    """One user action on the engine.

    Args:
        parent_id: reply: the message it follows (None: the start of the conversation). regenerate: the reply to make anew,
            or the message to answer. continue, fork: the reply that goes on.
        input: reply only: the user's message; without it the parent itself is answered.
        prefill: reply and regenerate: what every sample begins with.
        branch_at_token: fork only: how many tokens of the reply are kept.
        branch_token_id: fork only: the token that follows those in every sample, before anything is drawn.
    """

    client_msg_id: Id | None = None
    conversation_id: Id
    parent_id: Id | None = None
    kind: RunKind
    input: Text | None = None
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    params: RunParams = RunParams()
    prefill: Text | None = None
    branch_at_token: int | None = Field(default=None, ge=0, lt=2**31)
    branch_token_id: TokenId | None = None

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.kind is not RunKind.REPLY and self.input is not None:
            raise ValueError(f"input belongs to reply, not to {self.kind}")
        if self.kind in (RunKind.CONTINUE, RunKind.FORK) and self.prefill is not None:
            raise ValueError(f"prefill belongs to reply and regenerate, not to {self.kind}")
        if (self.branch_at_token is not None) != (self.kind is RunKind.FORK):
            raise ValueError("branch_at_token belongs to fork, and fork needs it")
        if self.branch_token_id is not None and self.kind is not RunKind.FORK:
            raise ValueError(f"branch_token_id belongs to fork, not to {self.kind}")
        if self.parent_id is None and (self.kind is not RunKind.REPLY or self.input is None):
            raise ValueError("without parent_id only a reply with an input can start")
        return self


class PrefixView(Model):
    """What is in the KV cache of a prompt: `tokens = cached + computed`."""

    tokens: Count
    cached: Count
    computed: Count
    blocks_shared: Count


class BreakView(Model):
    """Where a prompt leaves the prefix that was computed before, because the template rewrites history."""

    token_index: Count
    message_index: Count
    reason: str
    num_tokens_lost: Count


class UsageView(Model):
    """Token counts; the prompt counts once, whatever n is."""

    prompt_tokens: Count
    cached_tokens: Count
    completion_tokens: Count


class NodeView(Model):
    """One message of a conversation."""

    id: Id
    parent_id: Id | None = None
    role: Role
    text: str
    status: NodeStatus
    created_at: int = Field(description="microseconds since 1970; orders siblings, then the id")
    num_tokens: Count
    finish_reason: str | None = None
    model: str | None = None
    params: dict[str, JsonValue] = {}
    usage: dict[str, JsonValue] = {}
    timing: dict[str, JsonValue] = {}
    extra: dict[str, JsonValue] = {}
    detail: str | None = Field(default=None, description="why it ended early, for people")
    is_kept: bool = Field(default=False, description="marked by its user, in this conversation")


class ConversationView(Model):
    """A conversation without its messages."""

    id: Id
    title: str
    version: Count
    created_at: int
    updated_at: int
    is_pinned: bool
    tags: tuple[str, ...]
    params: dict[str, JsonValue] = {}
    preset_id: Id | None = None
    forked_from: Id | None = None
    source: str | None = None
    is_deleted: bool = False


class ChoiceView(Model):
    """Which child is shown below a message; without parent_id, at the root."""

    child_id: Id
    parent_id: Id | None = None


class SampleView(Model):
    """One sample of a run as it stands; `text` is the whole text of its message, what it began with included."""

    sample: Count
    node_id: Id
    text: str
    num_tokens: Count = Field(description="tokens generated by this run")
    num_prefix_tokens: Count = Field(default=0, description="tokens the message began with")
    finish_reason: str | None = Field(default=None, description="stop, length, abort, error; none while it runs")
    detail: str | None = None
    ttft_ms: float | None = None
    tok_s: float | None = None
    sum_logprob: float | None = None
    usage: UsageView | None = None


class ErrorView(Model):
    """What went wrong, for machines and for people."""

    code: str
    message: str
    retryable: bool = False


class LimitsView(Model):
    """What one user may ask for."""

    max_samples: int
    max_tokens: int | None = None
    max_running_runs: int
    max_queued_runs: int
    max_input: int = MAX_INPUT
    max_message_bytes: int = MAX_MESSAGE_BYTES


class ModelView(Model):
    """The model that answers."""

    name: str
    max_model_len: int
    block_size: int
    vocab_size: int
    opens_reasoning: bool = Field(default=False, description="its replies begin within reasoning: only </think> is in them")


class KvStats(Model):
    """The block memory in numbers; a shared block counts once."""

    type: Literal["kv.stats"] = "kv.stats"
    num_blocks: Count
    block_size: Count
    bytes_per_block: Count
    blocks_used: Count
    blocks_cached: Count
    blocks_blank: Count
    blocks_shared: Count
    rows_held: Count
    rows_shared: Count
    rows_wasted: Count
    rows_without_sharing: Count
    num_running: Count
    num_waiting: Count
    num_preemptions: Count
    prompt_tokens: Count
    cached_tokens: Count
    computed_tokens: Count
    generated_tokens: Count
    num_block_copies: Count
    copied_bytes: Count


class HolderView(Model):
    """Who holds a block. The names of conversations are told to their owner only; `kind` other is somebody else."""

    kind: Literal["sample", "warm", "pin", "other"]
    conversation_id: Id | None = None
    node_id: Id | None = None
    run_id: Id | None = None
    sample: Count | None = None


class BlockView(Model):
    """One block of the block map."""

    id: Count
    state: str
    ref_count: Count
    num_rows: Count
    holders: tuple[HolderView, ...] = ()


class KvView(Model):
    """The block memory, block by block."""

    stats: KvStats
    blocks: tuple[BlockView, ...]
