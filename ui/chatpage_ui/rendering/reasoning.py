"""Where a reply thinks aloud: `<think>...</think>` at its beginning.

Invariant: reasoning is found by its tags alone; a tag inside the answer, say in code about such tags, is left there.
"""

import re
from dataclasses import dataclass

_OPENING = re.compile(r"\s*<think>")
_CLOSING = "</think>"
_LONE_CLOSING = re.compile(r"^[ \t]*</think>[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reasoning:
    """`text` is what was thought; with its tags it is at `[start, end)`."""

    start: int
    end: int
    text: str
    is_closed: bool


def split_reasoning(text: str, *, in_reasoning: bool) -> Reasoning | None:
    """Find the reasoning at the beginning of a reply.

    Args:
        text: The reply.
        in_reasoning: Whether the prompt opened it, so that only its end is in the text. Without it, a `</think>` that stands
            alone on its line ends it.
    """
    opening = _OPENING.match(text)
    if opening is None and not in_reasoning:
        lone = _LONE_CLOSING.search(text)
        if lone is None or "<think>" in text[: lone.start()]:
            return None
        return Reasoning(0, lone.end(), text[: lone.start()], is_closed=True)
    start = opening.end() if opening else 0
    closing = text.find(_CLOSING, start)
    if closing < 0:
        return Reasoning(0, len(text), text[start:], is_closed=False)
    return Reasoning(0, closing + len(_CLOSING), text[start:closing], is_closed=True)
