"""The line below a reply."""

import pytest

from chatpage.terminal.summary import PromptCost, decode_speed, summarize


def test_speed_counts_the_tokens_after_the_first_of_every_sample() -> None:
    assert decode_speed(18, 2, ttft_s=1.0, wall_s=3.0) == 8.0


@pytest.mark.parametrize(("num_tokens", "ttft_s", "wall_s"), [(2, 1.0, 3.0), (18, None, 3.0), (18, 3.0, 3.0)])
def test_too_little_has_no_speed(num_tokens: int, ttft_s: float | None, wall_s: float) -> None:
    assert decode_speed(num_tokens, 2, ttft_s=ttft_s, wall_s=wall_s) is None


def test_the_line_says_what_is_known() -> None:
    cost = PromptCost(tokens=1200, cached=1180, computed=20, blocks_shared=73)
    line = summarize(cost, 1, ttft_s=0.0042, tok_s=612.4, was_interrupted=False, details=["", "stop word"])
    assert line.split(" · ") == [
        "prompt 1,200 tokens: 1,180 cached, 20 computed",
        *("73 blocks shared", "first token 4 ms", "1 token", "612 tok/s", "stop word"),
    ]
    assert summarize(None, 0, ttft_s=None, tok_s=None, was_interrupted=True, details=["x"]) == "0 tokens · stopped"
