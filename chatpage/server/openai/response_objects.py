"""Responses as clients see them: the object, its one output message, its input items.

Invariant: a response is shown from what is known of it, whether it is being written, was read from the store, or was never
stored; the same state gives the same object.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chatpage.events import TokenLogprob
from chatpage.server.openai.token_texts import TokenTexts
from chatpage.store import Node, Role

Json = Mapping[str, Any]
IN_PROGRESS, COMPLETED, INCOMPLETE, CANCELLED, FAILED = "in_progress", "completed", "incomplete", "cancelled", "failed"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """What a response cost, in tokens."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def view(self) -> Json:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.prompt_tokens - self.cached_tokens,
            },
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class ReplyState:
    """How far a response is. `status` other than in progress: nothing more comes."""

    status: str = IN_PROGRESS
    text: str = ""
    tokens: Sequence[TokenLogprob] = ()
    usage: TokenUsage | None = None
    error: str | None = None
    completed_at: float | None = None

    @property
    def is_final(self) -> bool:
        return self.status != IN_PROGRESS

    @property
    def has_item(self) -> bool:
        """Whether there is an output message: with text, or whole without any."""
        return bool(self.text) or self.status in (COMPLETED, INCOMPLETE)


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What of a response never changes."""

    id: str
    created_at: float
    model: str
    echo: Json
    item_id: str | None  # of its output message; None: nothing is generated
    texts: TokenTexts = field(repr=False)

    def view(self, state: ReplyState) -> Json:
        """Return the response as an object."""
        incomplete = {"reason": "max_output_tokens"} if state.status == INCOMPLETE else None
        is_shown = state.is_final and state.has_item and self.item_id is not None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": state.completed_at if state.status == COMPLETED else None,
            "status": state.status,
            "error": None if state.error is None else {"code": "server_error", "message": state.error},
            "incomplete_details": incomplete,
            "model": self.model,
            "output": [self.item(state)] if is_shown else [],
            "usage": None if state.usage is None else state.usage.view(),
            "max_tool_calls": None,
            "parallel_tool_calls": True,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            **self.echo,
        }

    def item(self, state: ReplyState) -> Json:
        """Return the output message."""
        status = state.status if state.status in (IN_PROGRESS, COMPLETED) else INCOMPLETE
        content = [self.part(state)] if state.is_final else []
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def part(self, state: ReplyState) -> Json:
        """Return the text of the output message."""
        logprobs = self.texts.chat_view(state.tokens)
        return {"type": "output_text", "text": state.text, "annotations": [], "logprobs": logprobs}


def input_item(node: Node) -> Json:
    """Return a message of the path as an item."""
    part: dict[str, Any] = {"type": "input_text", "text": node.text}
    if node.role is Role.ASSISTANT:
        part |= {"type": "output_text", "annotations": [], "logprobs": []}
    return {"id": item_id(node.id), "type": "message", "status": "completed", "role": str(node.role), "content": [part]}


def item_id(node_id: str) -> str:
    return f"msg_{node_id}"
