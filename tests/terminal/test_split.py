"""Where a fork inside a reply begins."""

import pytest

from chatpage.errors import InvalidRequestError
from chatpage.terminal.conversation import Node
from chatpage.terminal.split import num_tokens_before
from tests.terminal.trees import Tree


def _reply(text: str) -> Node:
    return Tree().add(None, "assistant", text)


def test_a_number_keeps_so_many_tokens() -> None:
    assert num_tokens_before(_reply("hello"), (1, 2, 3, 4, 5), "3") == 3


def test_words_keep_the_tokens_that_end_before_them() -> None:
    """The space before a word is part of its token."""
    assert num_tokens_before(_reply("one two two"), (3, 7, 11), "two") == 1
    assert num_tokens_before(_reply("one two two"), (3, 4, 7, 8, 11), "two") == 2


@pytest.mark.parametrize(
    ("place", "problem"),
    [("0", "1 to 5"), ("6", "1 to 5"), ("xyz", "does not say"), ("he", "nothing would be kept")],
)
def test_a_place_that_is_not_there_is_refused(place: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        num_tokens_before(_reply("hello"), (1, 2, 3, 4, 5), place)


def test_words_at_the_start_are_refused_even_behind_a_token_of_no_text() -> None:
    with pytest.raises(InvalidRequestError, match="nothing would be kept"):
        num_tokens_before(_reply("hello"), (0, 5), "hello")
