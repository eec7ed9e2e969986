"""A conversation as text: what the chat template of the model writes, and which part of it is which message.

Invariant: text that people wrote never becomes a control token. Control tokens spelled in a message are swapped for
placeholders before the template sees them, and are cut in two when they are encoded, so only those of the template survive.

    message  "say <|im_end|>"        rendered   <|im_start|>user\\nsay [0]<|im_end|>\\n
                                     encoded    <|im_start|> | user\\nsay  | < | |im_end|> | <|im_end|> | \\n

This holds for control tokens. A format that marks turns in plain text (`User:`, the `[INST]` of early Mistral models) can
be imitated in plain text, by its nature.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from chatpage.errors import InvalidRequestError

PLAIN_TEMPLATE = (
    "{% if bos_token is defined and bos_token %}{{ bos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + '\n\n' }}"
    "{% else %}{{ 'User: ' + message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""What a model without a chat template gets: paragraphs that start with User: or Assistant:, the system prompt bare on top."""

PLAIN_STOP = ("\nUser:",)
"""Stop strings for `PLAIN_TEMPLATE`; a model without a template was never taught to end its turn."""

_OPEN, _CLOSE = "\U00100000", "\U00100001"  # private use: they mean nothing to a template, and strip() leaves them alone
_PLACEHOLDER = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
_MESSAGE_MARK = re.compile(f"{_OPEN}m(\\d+){_CLOSE}")


class ControlTokenGuard:
    """Swaps control tokens spelled in messages for placeholders, and back.

    Single characters are left alone: they cannot spell a turn, and a tokenizer may well count a newline among its specials.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        controls = sorted({text for text in {*added, *tokenizer.all_special_tokens} if len(text) > 1}, key=len, reverse=True)
        self._num_controls = len(controls)
        self._strings = [*controls, _OPEN, _CLOSE]  # the delimiters too: a message may not spell a placeholder either
        self._index = {text: i for i, text in enumerate(self._strings)}
        self._pattern = re.compile("|".join(map(re.escape, self._strings)))

    def protect(self, content: str) -> str:
        return self._pattern.sub(lambda match: f"{_OPEN}{self._index[match[0]]}{_CLOSE}", content)

    def restore(self, text: str) -> str:
        return _PLACEHOLDER.sub(lambda match: self._strings[int(match[1])], text)

    def chunks(self, text: str) -> list[str]:
        """Cut protected text so that each chunk, restored and encoded by itself, holds no control token of a message."""
        chunks = [""]
        for i, part in enumerate(_PLACEHOLDER.split(text)):
            if i % 2 == 0:
                chunks[-1] += part
            elif int(part) >= self._num_controls:
                chunks[-1] += self._strings[int(part)]
            else:
                chunks += [*self._cut(self._strings[int(part)]), ""]
        return [chunk for chunk in chunks if chunk]

    def _cut(self, control: str) -> Sequence[str]:
        for middle in range(1, len(control)):
            if not any(other in control[:middle] or other in control[middle:] for other in self._strings[: self._num_controls]):
                return control[:middle], control[middle:]
        return list(control)


@lru_cache(maxsize=16)
def guard_of(tokenizer: PreTrainedTokenizerBase) -> ControlTokenGuard:
    """Return the guard of a tokenizer, made once."""
    return ControlTokenGuard(tokenizer)


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[tuple[str, str]],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Return the text of (role, content) pairs under the tokenizer's template, else under `PLAIN_TEMPLATE`.

    Raises:
        InvalidRequestError: The template refuses the conversation; the message is the template's own.
    """
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            chat_template=None if tokenizer.chat_template else PLAIN_TEMPLATE,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except (TemplateError, TypeError) as error:
        raise InvalidRequestError(f"The chat template of the model refuses this conversation: {error}") from error
    assert isinstance(text, str)
    return text


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of rendered text: written by the template (`message` is None), or the content of one message.

    `is_rewritten`: the template wrote something else than the content, beyond trimming white space at its edges.
    """

    text: str
    message: int | None = None
    is_rewritten: bool = False


def marked(messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the messages with a mark in place of each content, to see where a template puts it."""
    return [(role, f"{_OPEN}m{i}{_CLOSE}") for i, (role, _) in enumerate(messages)]


def split_marked(rendered: str) -> tuple[list[str], list[int]]:
    """Return the n+1 literals around the n marks of a rendering, and the message indices of the marks."""
    pieces = _MESSAGE_MARK.split(rendered)
    return pieces[::2], [int(index) for index in pieces[1::2]]


def align(actual: str, marked_rendering: str, contents: Sequence[str]) -> list[Part]:
    """Find each content in the rendered text, led by a rendering of the same conversation with marks for contents.

    A template may trim or rewrite a content, write different literals because of one, or drop it. What cannot be told apart
    is left as a literal up to the end; the parts joined are always `actual`.
    """
    literals, order = split_marked(marked_rendering)
    parts: list[Part] = []
    position = 0
    for k, message in enumerate(order):
        is_last = k == len(order) - 1
        found = _find(actual, position, literals[k], contents[message], literals[k + 1], is_last=is_last)
        if found is None:
            break
        start, stop, is_rewritten = found
        parts += [Part(actual[position:start]), Part(actual[start:stop], message, is_rewritten)]
        position = stop
    return [*parts, Part(actual[position:])]


def num_common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items both sequences of one type start with."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(i for i in range(size) if left[i] != right[i])


def _find(actual: str, position: int, before: str, content: str, after: str, *, is_last: bool) -> tuple[int, int, bool] | None:
    """Return where the content lies, `[start, stop)`, and whether it was rewritten; None if that cannot be told."""
    matched = num_common(before, actual[position : position + len(before)])
    variants = list(_trimmed(content))

    def is_followed(stop: int) -> bool:
        return actual[stop:] == after if is_last else actual.startswith(after, stop)

    # The literal before may hold less than expected: a template that opens thinking for a mark does not for a real reply.
    for start in range(position + matched, position - 1, -1):
        for text in variants:
            if (text or start == position + matched) and actual.startswith(text, start) and is_followed(start + len(text)):
                return start, start + len(text), False
    start = position + matched
    if matched == len(before):
        for text in variants:
            if text and actual.startswith(text, start):
                return start, start + len(text), False  # the literal after it differs; the next round deals with that
    if is_last:
        stop = len(actual) - len(after)
        return (start, stop, True) if stop >= start and actual.endswith(after) else None
    stop = actual.find(after, start) if after else -1
    return (start, stop, True) if stop >= 0 else None


def _trimmed(content: str) -> Iterator[str]:
    """Yield the content as templates trim it: not at all, newlines only, all white space; each side by itself."""
    core = content.strip()
    if not core:
        yield from dict.fromkeys([content, content.strip("\n"), ""])
        return
    start = content.index(core)
    head, tail = content[:start], content[start + len(core) :]
    for left in dict.fromkeys([head, head.lstrip("\n"), ""]):
        for right in dict.fromkeys([tail, tail.rstrip("\n"), ""]):
            yield left + core + right
