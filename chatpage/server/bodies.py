"""What the requests of `/api` carry.

Invariant: as on the websocket, an unknown key, a wrong type or a value out of range is an error.
"""

import json
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue, Strict

from chatpage.sampling_params import MAX_SAMPLES
from chatpage.server.views import ConversationView, Count, Id, KvView, Model, RunParams, RunRequest, Text, TokenId
from chatpage.store import Role
from chatpage.store.conversations import MAX_TAG, MAX_TAGS, MAX_TITLE


def _reader(model: type[Model]) -> BeforeValidator:
    """FastAPI hands over what `json.loads` made; these models are strict about lists and enums unless they read JSON."""

    def read(value: Any) -> Any:
        return value if value is None or isinstance(value, bytes) else model.model_validate_json(json.dumps(value))

    return BeforeValidator(read)


Params = Annotated[RunParams, _reader(RunParams)]
RunBody = Annotated[RunRequest, _reader(RunRequest)]
Title = Annotated[str, Field(max_length=MAX_TITLE)]
Tags = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=MAX_TAG)], ...], Field(max_length=MAX_TAGS), Strict(False)]


class NewConversation(Model):
    """A conversation to be made; a system prompt (given, else the preset's) becomes its root message."""

    title: Title = ""
    system_prompt: Text | None = None
    preset_id: Id | None = None
    params: Params | None = None
    tags: Tags = ()


class ConversationChange(Model):
    """What is left out stays as it is."""

    title: Title | None = None
    is_pinned: bool | None = None
    tags: Tags | None = None
    params: Params | None = None
    preset_id: Id | None = None
    without_preset: bool = False


class Fork(Model):
    """A conversation to be made of the messages of another: those up to `node_id`, or all."""

    node_id: Id | None = None
    title: Title | None = None


class NewMessage(Model):
    """A message that nobody generates."""

    role: Annotated[Role, Strict(False)]
    text: Text
    parent_id: Id | None = None


class Edit(Model):
    """Another version of a message."""

    text: Text


class Answer(Model):
    """Another version of a user's message, to be answered at once."""

    text: Text
    n: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    params: Params | None = None
    client_msg_id: Id | None = None


class Cancel(Model):
    """Which sample to stop; none: all."""

    sample: int | None = Field(default=None, ge=0, lt=MAX_SAMPLES)


class NewPreset(Model):
    """A system prompt and parameters under a name."""

    name: Id
    system_prompt: Text = ""
    params: Params | None = None


class PresetChange(Model):
    """What is left out stays as it is."""

    name: Id | None = None
    system_prompt: Text | None = None
    params: Params | None = None


class Keep(Model):
    """Whether a message is marked."""

    keep: bool


class TokenSpan(Model):
    """A token and its place in the text of its message, `[start, end)` in UTF-16 code units, as browsers count.

    Tokens that are parts of one character all have the place and the text of the whole character.
    """

    id: TokenId
    text: str
    start: Count
    end: Count


class TokenView(Model):
    """The tokens of a reply, without end tokens. Forks with `branch_at_token` count these.

    `ends`: where in the text each of them ends, in characters; half a character ends where the character before it does.
    """

    tokens: tuple[TokenSpan, ...]
    ends: tuple[Count, ...]


class TokenChoice(Model):
    """A token and its log probability under the model, before temperature and filters.

    `text`: what it adds; half a character is shown as U+FFFD. `logprob`: null only if the model cannot be made to say it.
    """

    token_id: TokenId
    text: str
    logprob: float | None


class TokenUsage(Model):
    """What asking cost: tokens before the place, and those of them that were in the KV cache."""

    prompt_tokens: Count
    cached_tokens: Count


class TokenAlternatives(Model):
    """What the model would have said in place of a token, the likeliest first; the chosen one is among them if it is likely."""

    token_index: Count
    chosen: TokenChoice
    alternatives: tuple[TokenChoice, ...]
    usage: TokenUsage


class KvPaths(Model):
    """The messages at the ends of paths to look for in the KV cache."""

    leaf_ids: list[Id] = Field(min_length=1, max_length=64)


class MessageSpan(Model):
    """The tokens `[start, end)` of a message in its path, without what the template writes around it."""

    node_id: Id
    start: Count
    end: Count


class PathLocation(Model):
    """Where the path to a message lies: its first `num_cached` tokens are in `block_ids`, in order."""

    leaf_id: Id
    num_tokens: Count
    num_cached: Count
    block_ids: tuple[Count, ...]
    nodes: tuple[MessageSpan, ...]


class KvLocations(Model):
    """Which blocks hold which paths now; block i of a path holds its tokens `[i * block_size, (i + 1) * block_size)`."""

    block_size: Count
    paths: tuple[PathLocation, ...]


class ConversationKv(KvView):
    """The block map while the branches of one conversation are held, so that it shows what they share."""

    num_branches: Count


class ConversationList(Model):
    """Conversations, pinned ones first, then the last changed first."""

    conversations: tuple[ConversationView, ...]


class PresetView(Model):
    """A preset as it is."""

    id: Id
    name: str
    system_prompt: str
    params: dict[str, JsonValue]
    created_at: int
    updated_at: int


class PresetList(Model):
    """Presets by name."""

    presets: tuple[PresetView, ...]


class TagView(Model):
    """A tag and how many conversations have it."""

    name: str
    num_conversations: int


class TagList(Model):
    """Tags by name."""

    tags: tuple[TagView, ...]


class HitView(Model):
    """One message that holds what was looked for; select `node_id`, or show the path to `leaf_id`."""

    conversation_id: Id
    title: str
    node_id: Id
    leaf_id: Id
    role: Role
    created_at: int
    snippet: str
    highlights: tuple[tuple[int, int], ...]


class HitList(Model):
    """Hits, the best first."""

    hits: tuple[HitView, ...]


class SkipView(Model):
    """Something that an import left out, and why."""

    where: str
    reason: str


class ImportResult(Model):
    """What an import did."""

    conversation_ids: tuple[Id, ...]
    num_added: int
    num_grown: int
    num_unchanged: int
    num_nodes_added: int
    num_skipped: int
    skips: tuple[SkipView, ...]
