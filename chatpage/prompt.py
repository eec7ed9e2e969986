"""A path of messages to token ids, with a prefix that stays from turn to turn.

Invariant: what a model generated is never tokenised again. A reply with token ids enters the prompt as those ids; only the
text between replies is encoded, cut at the same places every turn. So the prompt of a turn starts with the prompt of the
turn before and the reply to it, token for token, and its KV blocks are found again:

    turn 1   [<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n]   generated: (Hello, !)
    turn 2   [                    the same text                       ] (Hello, !) [<|im_end|>\\n<|im_start|>user\\n...]

Templates that rewrite history (drop earlier thinking, print today's date) break this. Then the prompt follows the template,
and a `PrefixBreak` says at which token, why, and how many tokens must be computed again. White space that a template trims
from the edges of a reply is no reason to break: the ids are what the model wrote, and they stay.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from chatpage.chat_template import Part, align, guard_of, marked, num_common, render, split_marked
from chatpage.engine.detokenizer import special_token_ids
from chatpage.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Args:
        role: One of `ROLES`.
        content: Its text.
        token_ids: For a reply: the ids that were generated, with or without the end token.

    Raises:
        InvalidRequestError: An unknown role, text that is not Unicode, or ids on a message that no model wrote.
    """

    role: str
    content: str
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequestError(f"The role {self.role!r} is unknown; known are {', '.join(ROLES)}.")
        if self.token_ids is not None and self.role != "assistant":
            raise InvalidRequestError(f"A {self.role} message has token ids, but only assistant messages are generated.")
        try:
            self.content.encode()
        except UnicodeEncodeError as error:
            problem = f"The {self.role} message has half a surrogate pair ({self.content[error.start]!r}) at character"
            raise InvalidRequestError(
                f"{problem} {error.start}, which is not text: remove it, or send the whole pair."
            ) from error


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """Where a prompt leaves the prefix that was computed before."""

    token_index: int  # the first token that differs
    message_index: int  # the message it belongs to, or the next one if the template wrote it
    reason: str
    num_tokens_lost: int  # tokens computed before, from there on, that are of no use to this prompt


@dataclass(frozen=True, slots=True)
class Encoding:
    """Token ids of a text and the characters `[start, stop)` of each; both ends never fall."""

    ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()

    def tokens_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of tokens that touch the characters `[start, stop)`."""
        first = bisect_right(self.stops, start)
        return first, max(first, bisect_left(self.starts, stop)) if stop > start else first


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """Tokens whose KV exists, and the encodings they were made from; the start of the next prompt of the conversation."""

    token_ids: tuple[int, ...]
    encodings: Mapping[str, Encoding] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    `spans[i]` are the tokens `[start, stop)` of the content of message i, without what the template writes around it; a token
    that holds both counts to the content. Empty for a message that the template leaves out.
    """

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    prefix_break: PrefixBreak | None = None
    encodings: Mapping[str, Encoding] = field(default_factory=dict, repr=False)

    def followed_by(self, generated_ids: Sequence[int]) -> PromptPrefix:
        """Return this prompt and the reply to it, to be given as `known` when the next turn is rendered."""
        return PromptPrefix((*self.token_ids, *generated_ids), self.encodings)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final: bool = False,
    known: PromptPrefix | None = None,
    template_variables: Mapping[str, Any] = _NO_VARIABLES,
) -> Prompt:
    """Render a conversation into token ids.

    Args:
        add_generation_prompt: End with the header of a reply, so that the model writes one.
        continue_final: Leave the last message, a reply, open at its end, so that the model goes on with it. Its span then
            reaches to the end of the prompt: with what is generated after it, these are the ids of the whole reply.
        known: What was computed for this conversation before; breaks are measured against it and its encodings are used
            again. Without it, only replies that the template rewrote are seen as breaks.
        template_variables: More variables for the template, such as `enable_thinking`.

    Raises:
        InvalidRequestError: No message, nothing to continue, or a conversation that the template refuses.
    """
    if not messages:
        raise InvalidRequestError("The conversation has no message: there is nothing to reply to.")
    if continue_final and (messages[-1].role != "assistant" or len(messages) < 2):
        raise InvalidRequestError("Only a reply that follows another message can be continued.")
    writer = _Writer(tokenizer, messages, {} if known is None else known.encodings, template_variables)
    writer.write(add_generation_prompt=add_generation_prompt, continue_final=continue_final)
    prompt = Prompt(tuple(writer.token_ids), tuple(writer.spans[i] for i in range(len(messages))), None, writer.encodings)
    found = writer.find_rewritten() if known is None else _find_break(tokenizer, prompt, known, writer.rewritten)
    return replace(prompt, prefix_break=found)


class _Writer:
    """Writes one prompt: text is collected until a kept reply, or the end, makes it a piece to encode."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        known: Mapping[str, Encoding],
        variables: Mapping[str, Any],
    ) -> None:
        self.token_ids: list[int] = []
        self.spans: dict[int, tuple[int, int]] = {}
        self.rewritten: dict[int, str] = {}  # replies with ids that the template changed, and why
        self.encodings: dict[str, Encoding] = {}
        self._tokenizer = tokenizer
        self._guard = guard_of(tokenizer)
        self._messages = messages
        self._pairs = [(message.role, self._guard.protect(message.content)) for message in messages]
        self._known = known
        self._variables = variables
        self._text = ""  # protected text not encoded yet
        self._contents: list[tuple[int, int, int]] = []  # (message, start, stop) in its restored characters

    def write(self, *, add_generation_prompt: bool, continue_final: bool) -> None:
        closed = self._pairs[:-1] if continue_final else self._pairs
        add_header = add_generation_prompt or continue_final
        marks = self._render(marked(closed), add_header)
        self._write_parts(align(self._render(closed, add_header), marks, [content for _, content in closed]), len(closed))
        if continue_final:
            self._write_open_reply(marks)
        self._flush()
        end = 0
        for i, message in enumerate(self._messages):
            if i not in self.spans and message.token_ids is not None:
                self.rewritten[i] = "the chat template leaves this reply out, or changes it beyond recognition"
            end = self.spans.setdefault(i, (end, end))[1]  # empty, after the one before it

    def find_rewritten(self) -> PrefixBreak | None:
        """Return the break at the first rewritten reply; what is lost reaches to the end of the last generated reply."""
        if not self.rewritten:
            return None
        first = min(self.rewritten)
        last = max(i for i, message in enumerate(self._messages) if message.token_ids is not None)
        start, stop = self.spans[first]
        kept = num_common(tuple(self.token_ids[start:stop]), self._messages[first].token_ids or ())
        num_lost = self.spans[last][1] - start - kept
        for i in self.rewritten:  # what was computed are their ids, not what the template made of them
            num_lost += len(self._messages[i].token_ids or ()) - (self.spans[i][1] - self.spans[i][0])
        return PrefixBreak(start + kept, first, self.rewritten[first], num_lost)

    def _render(self, pairs: Sequence[tuple[str, str]], add_generation_prompt: bool) -> str:
        return render(self._tokenizer, pairs, add_generation_prompt=add_generation_prompt, variables=self._variables)

    def _write_parts(self, parts: Sequence[Part], num_closed: int) -> None:
        has_kept = any(message.token_ids is not None for message in self._messages[:num_closed])
        header = self._reply_header(num_closed) if has_kept else None
        num_skipped = 0
        for i, part in enumerate(parts):
            if part.message is None:
                self._text += part.text[num_skipped:]
                num_skipped = 0
            elif (ids := self._messages[part.message].token_ids) is None or part.is_rewritten:
                self._write_content(part)
            else:
                before, after = parts[i - 1].text, parts[i + 1].text
                if i >= 2 and self._role_of(parts[i - 2]) == "user" and header is not None:
                    self._drop_end(_space_after(header, before))
                self._flush()
                ids, num_skipped = self._without_end(ids, after)
                self._write_ids(part.message, ids)

    def _reply_header(self, num_closed: int) -> str | None:
        """Return what stands between a user message and the reply when the model is asked; None if there is no user."""
        last_user = max((i for i in range(num_closed) if self._messages[i].role == "user"), default=None)
        if last_user is None:
            return None
        literals, order = split_marked(self._render(marked(self._pairs[: last_user + 1]), True))
        return literals[-1] if order and order[-1] == last_user else None

    def _role_of(self, part: Part) -> str | None:
        return None if part.message is None else self._messages[part.message].role

    def _drop_end(self, space: str) -> None:
        """Take back white space that the template puts before a reply, but not before one to be generated.

        A model that was asked after `[/INST]` wrote `_Hello` itself; the template's `[/INST] Hello` has the same space.
        """
        if space:
            self._text = self._text.removesuffix(space)

    def _without_end(self, ids: tuple[int, ...], after: str) -> tuple[tuple[int, ...], int]:
        """Return the ids without an end token that the template writes as well, and how much white space before it to skip."""
        if not ids or ids[-1] not in special_token_ids(self._tokenizer):
            return ids, 0
        end = self._tokenizer.convert_ids_to_tokens(ids[-1])
        assert isinstance(end, str)
        if not after.lstrip().startswith(end):
            return ids, 0
        return ids[:-1], len(after) - len(after.lstrip())

    def _write_content(self, part: Part) -> None:
        assert part.message is not None
        message = self._messages[part.message]
        start = len(self._guard.restore(self._text))
        self._text += part.text
        stop = len(self._guard.restore(self._text))
        self._contents.append((part.message, start, stop))
        if message.token_ids is not None:
            sizes = f"{len(message.content)} characters as {stop - start}"
            self.rewritten[part.message] = f"the chat template rewrites this reply, {sizes}"

    def _write_open_reply(self, marks: str) -> None:
        """Write the last reply without its end; a text is encoded after its header, but not merged with it."""
        last = len(self._messages) - 1
        ids = self._messages[last].token_ids
        if ids is not None:
            self._flush()
            special = special_token_ids(self._tokenizer)
            num_text = len(ids)
            while num_text and ids[num_text - 1] in special:
                num_text -= 1
            self._write_ids(last, ids[:num_text])
            return
        head, text = self._text, self._space_before_open_reply(marks) + self._pairs[last][1]
        head_ids = self._encode(head).ids
        start = len(self.token_ids) + len(head_ids)
        if self._encode(head + text).ids[: len(head_ids)] != head_ids:
            self._flush()
        self._text += text
        self._flush()
        self.spans[last] = (start, len(self.token_ids))

    def _space_before_open_reply(self, marks: str) -> str:
        try:
            literals, order = split_marked(self._render(marked(self._pairs), False))
        except InvalidRequestError:
            return ""  # a template that refuses to end in a reply has no opinion about its first space
        is_shown = bool(order) and order[-1] == len(self._pairs) - 1
        return _space_after(split_marked(marks)[0][-1], literals[-2]) if is_shown else ""

    def _flush(self) -> None:
        encoding = self._encode(self._text)
        offset = len(self.token_ids)
        for message, start, stop in self._contents:
            first, end = encoding.tokens_of(start, stop)
            self.spans[message] = (offset + first, offset + end)
        self.token_ids += encoding.ids
        self._text, self._contents = "", []

    def _write_ids(self, message: int, ids: tuple[int, ...]) -> None:
        self.spans[message] = (len(self.token_ids), len(self.token_ids) + len(ids))
        self.token_ids += ids

    def _encode(self, text: str) -> Encoding:
        encoding = self._known.get(text) or self.encodings.get(text)
        if encoding is None:
            encoding = _encode(self._tokenizer, self._guard.chunks(text))
        self.encodings[text] = encoding
        return encoding


def _space_after(header: str, literal: str) -> str:
    """Return the white space that `literal` has after `header`; empty if there is more than white space, or no header."""
    rest = literal.removeprefix(header)
    return rest if literal.startswith(header) and rest.isspace() else ""


def _encode(tokenizer: PreTrainedTokenizerBase, chunks: Sequence[str]) -> Encoding:
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    position = 0
    for chunk in chunks:
        encoded = tokenizer(
            chunk,
            add_special_tokens=False,
            split_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=tokenizer.is_fast,
            verbose=False,
        )
        chunk_ids = encoded["input_ids"]
        ids += chunk_ids
        chunk_offsets = encoded["offset_mapping"] if tokenizer.is_fast else _estimated_offsets(tokenizer, chunk_ids, len(chunk))
        offsets += [(position + start, position + stop) for start, stop in chunk_offsets]
        position += len(chunk)
    # Some tokenizers give an invisible token the range (0, 0); a running maximum keeps both ends in order.
    starts = tuple(accumulate((start for start, _ in offsets), max))
    return Encoding(tuple(ids), starts, tuple(accumulate((stop for _, stop in offsets), max)))


def _estimated_offsets(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Return where tokens lie by the length of their own texts, for tokenizers in Python, which do not tell."""
    stops = [min(stop, length) for stop in accumulate(len(tokenizer.decode([token_id])) for token_id in ids)]
    return list(zip([0, *stops[:-1]], stops, strict=True)) if stops else []


def _find_break(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, known: PromptPrefix, rewritten: Mapping[int, str]
) -> PrefixBreak | None:
    """Compare with what was computed before. A prompt that merely ends sooner breaks nothing."""
    index = num_common(prompt.token_ids, known.token_ids)
    if index == min(len(prompt.token_ids), len(known.token_ids)):
        return None
    message = next((i for i, (_, stop) in enumerate(prompt.spans) if stop > index), len(prompt.spans) - 1)
    before, now = (tokenizer.decode(list(ids[index : index + 12])) for ids in (known.token_ids, prompt.token_ids))
    reason = rewritten.get(message) or f"the prompt now has {now!r} where {before!r} was computed"
    return PrefixBreak(index, message, reason, len(known.token_ids) - index)
