"""Replies that think aloud."""

import pytest

from chatpage_ui.rendering import render_blocks

FOLDED = '<details class="reasoning"><summary>Reasoning</summary>'


@pytest.mark.parametrize(
    "text", ["<think>\nhm *so*\n</think>\n\nYes.", "\n<think>hm *so*</think> Yes.", "hm *so*\n</think>\n\nYes."]
)
def test_reasoning_is_folded_and_the_answer_is_not(text: str) -> None:
    first, second = render_blocks(text, is_open=False)
    assert first.html == f"{FOLDED}<p>hm <em>so</em></p>\n</details>"
    assert second.html == "<p>Yes.</p>\n"
    assert text[second.start : second.end].strip() == "Yes."


def test_reasoning_that_the_prompt_opened_needs_only_its_end() -> None:
    open_ = render_blocks("hm\n\nso\n\n", is_open=True, in_reasoning=True)
    assert [block.html for block in open_] == [f'{FOLDED}<div class="plain">hm\n\nso\n\n</div></details>']
    assert not open_[0].is_settled
    closed = render_blocks("hm\n\nso</think>a\n\nb\n", is_open=True, in_reasoning=True)
    assert [block.is_settled for block in closed] == [True, True, False]
    assert closed[0].html == f"{FOLDED}<p>hm</p>\n<p>so</p>\n</details>"


def test_reasoning_that_was_stopped_is_still_folded() -> None:
    assert render_blocks("<think>\nhm", is_open=False)[0].html == f"{FOLDED}<p>hm</p>\n</details>"


@pytest.mark.parametrize("text", ["Write `</think>` to end it.", "a\n\n<think>b</think>", "`<think>`\n\n```\n</think>\n```"])
def test_an_answer_about_reasoning_is_no_reasoning(text: str) -> None:
    assert "<details" not in "".join(block.html for block in render_blocks(text, is_open=False))
