"""What a reply cost and how fast it was, as one line."""

from collections.abc import Iterable
from dataclasses import dataclass

from chatpage.terminal.text import count, format_seconds


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What became of the tokens of a prompt."""

    tokens: int
    cached: int
    computed: int
    blocks_shared: int


def decode_speed(num_tokens: int, num_samples: int, *, ttft_s: float | None, wall_s: float) -> float | None:
    """Return the tokens per second of all samples together after their first ones; None if there were too few."""
    num_later = num_tokens - num_samples
    if ttft_s is None or num_later <= 0 or wall_s <= ttft_s:
        return None
    return num_later / (wall_s - ttft_s)


def summarize(
    prompt: PromptCost | None,
    num_tokens: int,
    *,
    ttft_s: float | None,
    tok_s: float | None,
    was_interrupted: bool,
    details: Iterable[str],
) -> str:
    """Return the line: what was reused, what was computed, how fast it went, and how it ended if that is worth a word."""
    parts = []
    if prompt is not None:
        parts.append(f"prompt {count(prompt.tokens, 'token')}: {prompt.cached:,} cached, {prompt.computed:,} computed")
        parts.append(f"{count(prompt.blocks_shared, 'block')} shared")
    if ttft_s is not None:
        parts.append(f"first token {format_seconds(ttft_s)}")
    parts.append(count(num_tokens, "token"))
    if tok_s is not None:
        parts.append(f"{tok_s:.0f} tok/s")
    if was_interrupted:
        parts.append("stopped")
    elif told := sorted({detail for detail in details if detail}):
        parts.append(told[0])
    return " · ".join(parts)
