"""Finds the place inside a reply where a fork begins.

Invariant: a cut never falls inside a character, and it keeps token ids as they were generated: nothing is tokenised again.
"""

from typing import TYPE_CHECKING

from chatpage.errors import InvalidRequestError
from chatpage.terminal.arguments import number
from chatpage.terminal.conversation import Node

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HALF_CHARACTER = "\ufffd"


def token_ids_of(tokenizer: "PreTrainedTokenizerBase", reply: Node) -> tuple[int, ...]:
    """The generated ids of a reply; the ids of its text, if a person wrote it."""
    if reply.token_ids is not None:
        return reply.token_ids
    return tuple(tokenizer.encode(reply.text, add_special_tokens=False))


def split_reply(tokenizer: "PreTrainedTokenizerBase", reply: Node, place: str) -> tuple[tuple[int, ...], str]:
    """Return the tokens and the text that stay when a reply is forked.

    Args:
        tokenizer: Of the model that gave the reply.
        reply: The message to fork.
        place: A number of tokens to keep, or words of the reply: what comes before their first occurrence is kept.

    Raises:
        InvalidRequestError: The reply has not so many tokens, or has no such words after its first token.
    """
    ids = token_ids_of(tokenizer, reply)
    is_number = place.isascii() and place.isdecimal()
    num_kept = number(place, "/fork at TOKEN") if is_number else _tokens_before(tokenizer, ids, reply, place)
    if not 1 <= num_kept <= len(ids):
        raise InvalidRequestError(f"#{reply.id} has {len(ids)} tokens; fork it after 1 to {len(ids)} of them, not {num_kept}.")
    while num_kept > 1 and _decode(tokenizer, ids[:num_kept]).endswith(_HALF_CHARACTER):
        num_kept -= 1
    return ids[:num_kept], _decode(tokenizer, ids[:num_kept])


def _tokens_before(tokenizer: "PreTrainedTokenizerBase", ids: tuple[int, ...], reply: Node, words: str) -> int:
    position = _decode(tokenizer, ids).find(words)
    if position < 0:
        raise InvalidRequestError(f"#{reply.id} does not say {words!r}; /go {reply.id} shows it.")
    num_before = 0
    # A token may carry the space before the word; it goes with the word.
    while num_before < len(ids) and len(_decode(tokenizer, ids[: num_before + 1])) <= position:
        num_before += 1
    if num_before == 0:
        raise InvalidRequestError(f"#{reply.id} begins with {words!r}: nothing would be kept. Use /regenerate.")
    return num_before


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: tuple[int, ...]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    assert isinstance(text, str)
    return text
