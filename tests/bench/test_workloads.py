"""The prompts of the workloads."""

from typing import Any

import pytest

from chatpage.bench.text import paragraph
from chatpage.bench.workloads import TITLES, Prompts, Sizes, parse_names
from chatpage.errors import InvalidParameterError
from tests.tiny_models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()
PROMPTS = Prompts(TOKENIZER)


@pytest.mark.parametrize("num_tokens", [40, 300, 1500])
def test_a_prompt_has_exactly_the_length_asked_for_and_ends_where_a_reply_begins(num_tokens: int) -> None:
    prompt = PROMPTS.chat("one", num_tokens)
    assert len(prompt) == num_tokens
    assert TOKENIZER.decode(prompt).startswith("<|im_start|>user\nThese are")
    assert TOKENIZER.decode(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_of_different_seeds_part_early() -> None:
    """A cold run that shares text with the run before it would not be cold."""
    first, second = PROMPTS.chat("W2 number 0", 300), PROMPTS.chat("W2 number 1", 300)
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert common < 60
    assert PROMPTS.chat("W2 number 0", 300) == first


def test_eight_chats_have_the_system_prompt_in_common_and_nothing_else() -> None:
    system = PROMPTS.system("five", 200)
    chats = PROMPTS.questions(system, 25)
    assert len(system) == 200
    assert [len(chat) for chat in chats] == [225] * 8
    assert all(chat[:200] == system for chat in chats)
    assert len({tuple(chat) for chat in chats + PROMPTS.questions(system, 25, is_second=True)}) == 16


def test_a_turn_is_the_end_of_a_prompt() -> None:
    turn = PROMPTS.turn("And then?", 40)
    assert len(turn) == 40
    assert TOKENIZER.decode(turn).endswith("then?<|im_end|>\n<|im_start|>assistant\n")


def test_names_are_read_in_the_order_of_the_workloads() -> None:
    assert parse_names("w4, W1,W4") == ("W1", "W4")
    assert parse_names(",".join(TITLES)) == tuple(TITLES)
    for wrong in ("W9", "", "W1 W2"):
        with pytest.raises(InvalidParameterError, match="known are W1, W2"):
            parse_names(wrong)


def test_quick_sizes_keep_turns_and_questions() -> None:
    sizes = Sizes().scaled(0.1)
    assert (sizes.prompt, sizes.fork, sizes.next_turn, sizes.question) == (150, 400, 28, 25)


def test_a_paragraph_is_whole_sentences_and_long_enough() -> None:
    text = paragraph("a test", 500)
    assert 500 <= len(text) < 700
    assert text.endswith(".")
