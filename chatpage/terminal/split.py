"""Finds the place inside a reply where a fork begins.

Invariant: a place is a number of the reply's own tokens: nothing is tokenised again.
"""

from collections.abc import Sequence

from chatpage.errors import InvalidRequestError
from chatpage.terminal.arguments import number
from chatpage.terminal.conversation import Node


def num_tokens_before(reply: Node, ends: Sequence[int], place: str) -> int:
    """Return how many tokens stay when a reply is forked.

    Args:
        reply: The message to fork.
        ends: Where in its text each of its tokens ends.
        place: A number of tokens to keep, or words of the reply: what comes before their first occurrence is kept.

    Raises:
        InvalidRequestError: The reply has not so many tokens, or has no such words after its first token.
    """
    is_number = place.isascii() and place.isdecimal()
    num_kept = number(place, "/fork at TOKEN") if is_number else _before_words(reply, ends, place)
    if not 1 <= num_kept <= len(ends):
        raise InvalidRequestError(
            f"#{reply.id} has {len(ends)} tokens; fork it after 1 to {len(ends)} of them, not {num_kept}."
        )
    return num_kept


def _before_words(reply: Node, ends: Sequence[int], words: str) -> int:
    position = reply.text.find(words)
    if position < 0:
        raise InvalidRequestError(f"#{reply.id} does not say {words!r}; /go {reply.id} shows it.")
    # A token may carry the space before the word; it goes with the word.
    num_before = sum(end <= position for end in ends)
    if num_before == 0 or position == 0:
        raise InvalidRequestError(f"#{reply.id} begins with {words!r}: nothing would be kept. Use /regenerate.")
    return num_before
