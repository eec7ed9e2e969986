"""From a path of nodes, and what a run begins with, to the prompt of the engine.

Invariants: what a model generated enters a prompt as its token ids, never as text that is tokenised again, as long as the same
model answers; rendering happens on a thread of its own, so the event loop never waits for a tokenizer.

    reply        [ path ............ ][ input ] [ prefill ..   goes on
    regenerate   [ path to the parent ........] [ prefill ..   goes on
    continue     [ path to the parent ........] [ the reply .. goes on
    fork         [ path to the parent ........] [ its first k tokens, and one that was asked for .. goes on
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from chatpage import chat_template
from chatpage.engine.detokenizer import Detokenizer, special_token_ids
from chatpage.engine.stats import EngineInfo
from chatpage.errors import ContextLengthError, InvalidParameterError, InvalidRequestError
from chatpage.prompt import Message, Prompt, PromptPrefix, render_prompt
from chatpage.server.views import RunRequest
from chatpage.store.records import Node, NodeId, Role, RunKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
KEPT_PREFIXES = 128
_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Begun:
    """The reply that a run goes on with.

    Args:
        text: Its text.
        token_ids: Its tokens, if a model wrote them.
        num_kept: How many of them count; None: all.
        next_id: The token that follows those.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    num_kept: int | None = None
    next_id: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What a request means on a path: the history, the node that the samples hang below, and what they begin with."""

    history: tuple[Node, ...]
    parent_id: NodeId | None
    begun: Begun | None = None
    node: Node | None = None  # continue only: the reply that goes on


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt for the engine, and the part at its end that belongs to the reply."""

    prompt: Prompt
    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyTokens:
    """A reply as tokens: what the prompt has before it, its tokens without end tokens, and where in its text each ends.

    Half a character ends where the character before it does; its last token ends where it ends.
    """

    before: tuple[int, ...]
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]


class PromptMaker:
    """Renders prompts with one tokenizer, and remembers the latest prefixes that the engine computed.

    Args:
        tokenizer: Of the model that answers.
        info: The engine that will compute the prompts.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self.opens_reasoning = _opens_reasoning(tokenizer)
        self._special = special_token_ids(tokenizer)
        self._known: OrderedDict[NodeId, PromptPrefix] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chatpage-prompt")

    def find_target(self, request: RunRequest, path: Sequence[Node]) -> Target:
        """Say what a request is about.

        Args:
            request: Any request of a run.
            path: From the root to its `parent_id`; empty if it has none.

        Raises:
            InvalidRequestError: The message that was named cannot be answered, made anew or go on.
        """
        last = path[-1] if path else None
        begun = Begun(request.prefill) if request.prefill else None
        if last is None or request.kind is RunKind.REPLY:
            if request.input is None and last is not None and last.role is Role.ASSISTANT:
                raise InvalidRequestError("A reply cannot be answered without an input: send one, or continue the reply.")
            return Target(tuple(path), None if last is None else last.id, begun)
        if last.role is not Role.ASSISTANT:
            if request.kind is RunKind.REGENERATE:
                return Target(tuple(path), last.id, begun)
            raise InvalidRequestError(f"Only a reply can {request.kind}; the message {last.id} is a {last.role} message.")
        history, above = tuple(path[:-1]), path[-2].id if len(path) > 1 else None
        if request.kind is RunKind.REGENERATE:
            return Target(history, above, begun)
        token_ids = last.token_ids if self.is_ours(last) else None
        whole = Begun(last.text, token_ids, request.branch_at_token, self._checked(request.branch_token_id))
        return Target(history, above, whole, last if request.kind is RunKind.CONTINUE else None)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def run(self, work: "Callable[[PreTrainedTokenizerBase], T]") -> T:
        """Call `work` with the tokenizer, on the thread that renders: a tokenizer serves one thread at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._tokenizer)

    async def render(
        self, target: Target, input: str | None, variables: Mapping[str, Any], *, add_generation_prompt: bool = True
    ) -> Rendered:
        """Render the prompt of a target.

        Args:
            target: From `find_target`.
            input: The user's message after the history.
            variables: For the chat template.
            add_generation_prompt: Open a reply at the end.

        Raises:
            InvalidRequestError: The template refuses the conversation.
            InvalidParameterError: There are fewer tokens than are to be kept.
            ContextLengthError: The prompt leaves no room for an answer.
        """
        messages = [self._message(node) for node in target.history]
        if input is not None:
            messages.append(Message("user", input))
        known = next((self._known[node.id] for node in reversed(target.history) if node.id in self._known), None)

        def work() -> Rendered:
            if target.begun is None:
                return Rendered(self._render(messages, known, variables, add_generation_prompt=add_generation_prompt))
            return self._render_begun(messages, target.begun, known, variables)

        rendered = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        num_tokens, limit = len(rendered.prompt.token_ids), self._info.max_model_len
        if num_tokens >= limit:
            raise ContextLengthError(
                f"The conversation has {num_tokens} tokens, but the context of the model holds {limit}, the answer included: "
                "shorten it, or branch off at an earlier message."
            )
        return rendered

    async def reply_tokens(self, path: Sequence[Node], variables: Mapping[str, Any] = _NO_VARIABLES) -> ReplyTokens:
        """Return the tokens of the reply at the end of a path, as `branch_at_token` of a fork counts them.

        Raises:
            InvalidRequestError: The last message is no reply, or the template refuses the conversation.
        """
        *history, last = path
        if last.role is not Role.ASSISTANT:
            raise InvalidRequestError(f"Only a reply has tokens of its own; the message {last.id} is a {last.role} message.")
        messages = [self._message(node) for node in history]
        known = next((self._known[node.id] for node in reversed(history) if node.id in self._known), None)
        whole = Begun(last.text, last.token_ids if self.is_ours(last) else None)

        def work(tokenizer: "PreTrainedTokenizerBase") -> ReplyTokens:
            rendered = self._render_begun(messages, whole, known, variables)
            before = rendered.prompt.token_ids[: len(rendered.prompt.token_ids) - len(rendered.token_ids)]
            return ReplyTokens(before, rendered.token_ids, _ends_of(Detokenizer(tokenizer, before), rendered.token_ids))

        return await self.run(work)

    async def token_texts(self, token_ids: Sequence[int], before: Sequence[int]) -> tuple[str, ...]:
        """Return the text that each of several tokens would add after others; half a character is shown as U+FFFD."""

        def work(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
            after = Detokenizer(tokenizer, before)
            return tuple(self._text_of(after.fork(), token_id) for token_id in token_ids)

        return await self.run(work)

    def remember(self, node_id: NodeId, rendered: Rendered, generated_ids: Sequence[int]) -> None:
        """Note that the engine computed a prompt and a reply to it, which is now the text of a node."""
        ids = list(generated_ids)
        while ids and ids[-1] in self._special:
            ids.pop()  # the template ends a reply in its own way
        self._known[node_id] = rendered.prompt.followed_by(ids)
        self._known.move_to_end(node_id)
        while len(self._known) > KEPT_PREFIXES:
            self._known.popitem(last=False)

    def without_end(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a reply without the special ones at its end, after which a model would not go on."""
        num_text = len(token_ids)
        while num_text and token_ids[num_text - 1] in self._special:
            num_text -= 1
        return tuple(token_ids[:num_text])

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text."""
        return token_id in self._special

    def is_ours(self, node: Node) -> bool:
        """Whether the tokens of a node mean something to the model that answers now."""
        return node.num_tokens > 0 and node.model == self._info.model and max(node.token_ids) < self._info.vocab_size

    def _checked(self, token_id: int | None) -> int | None:
        """Return a token that may be forced upon a reply: one that is text."""
        if token_id is None:
            return None
        if token_id >= self._info.vocab_size:
            raise InvalidParameterError(
                f"branch_token_id is {token_id}, but the model has the tokens 0 to {self._info.vocab_size - 1}."
            )
        if token_id in self._special:
            raise InvalidParameterError(f"branch_token_id {token_id} is a token that ends or frames a text: choose another.")
        return token_id

    def _text_of(self, detokenizer: Detokenizer, token_id: int) -> str:
        text = detokenizer.append([token_id])[0] + detokenizer.finish()
        return text or ("" if token_id in self._special else "\ufffd")

    def _message(self, node: Node) -> Message:
        has_ids = node.role is Role.ASSISTANT and self.is_ours(node)
        return Message(str(node.role), node.text, node.token_ids if has_ids else None)

    def _render(
        self, messages: Sequence[Message], known: PromptPrefix | None, variables: Mapping[str, Any], **options: bool
    ) -> Prompt:
        return render_prompt(self._tokenizer, messages, known=known, template_variables=variables, **options)

    def _render_begun(
        self, messages: Sequence[Message], begun: Begun, known: PromptPrefix | None, variables: Mapping[str, Any]
    ) -> Rendered:
        if begun.num_kept is not None:
            begun = self._cut(messages, begun, known, variables)
        if not begun.text and not begun.token_ids:
            return Rendered(self._render(messages, known, variables))
        reply = Message("assistant", begun.text, begun.token_ids)
        prompt = self._render([*messages, reply], known, variables, continue_final=True)
        start, stop = prompt.spans[-1]
        return Rendered(prompt, begun.text, prompt.token_ids[start:stop])

    def _cut(
        self, messages: Sequence[Message], begun: Begun, known: PromptPrefix | None, variables: Mapping[str, Any]
    ) -> Begun:
        """Keep the first tokens of a reply and the text that is theirs; of a character cut in two nothing is kept."""
        whole = self._render_begun(messages, replace(begun, num_kept=None, next_id=None), known, variables)
        kept = begun.num_kept or 0
        if kept > len(whole.token_ids):
            raise InvalidParameterError(
                f"branch_at_token is {kept}, but the reply has {len(whole.token_ids)} tokens of text: choose fewer."
            )
        before = whole.prompt.token_ids[: len(whole.prompt.token_ids) - len(whole.token_ids)]
        if begun.next_id is not None:  # it may complete the character, or begin one that the model completes
            token_ids = (*whole.token_ids[:kept], begun.next_id)
            return Begun(Detokenizer(self._tokenizer, before).append(token_ids)[0], token_ids)
        for num_kept in range(kept, -1, -1):
            detokenizer = Detokenizer(self._tokenizer, before)
            text, _ = detokenizer.append(whole.token_ids[:num_kept])
            held_back = detokenizer.finish()
            # Replacement characters that the reply itself shows are no character that was cut: its bytes are like that.
            if not held_back or whole.text.startswith(text + held_back):
                return Begun(text + held_back, whole.token_ids[:num_kept])
        raise AssertionError("no tokens hold nothing back")


def _opens_reasoning(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the template begins a reply with `<think>`, so that only the end of its reasoning is in its text."""
    try:
        text = chat_template.render(tokenizer, [("user", "Hello")], add_generation_prompt=True, variables={})
    except InvalidRequestError:
        return False
    return text.rstrip().endswith("<think>")


def _ends_of(detokenizer: Detokenizer, token_ids: Sequence[int]) -> tuple[int, ...]:
    ends, length = [], 0
    for token_id in token_ids:
        length += len(detokenizer.append([token_id])[0])
        ends.append(length)
    if ends:
        ends[-1] = length + len(detokenizer.finish())
    return tuple(ends)
