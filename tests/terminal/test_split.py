"""Where a fork inside a reply begins."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatpage.errors import InvalidRequestError
from chatpage.terminal.conversation import Conversation, Node
from chatpage.terminal.split import split_reply, token_ids_of
from tests.tiny_models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()


def _reply(text: str) -> Node:
    return Conversation().add(None, "assistant", text, token_ids=TOKENIZER.encode(text))


def test_a_number_keeps_so_many_tokens() -> None:
    reply = _reply("hello")
    assert split_reply(TOKENIZER, reply, "3") == (reply.token_ids[:3] if reply.token_ids else (), "hel")


def test_words_keep_what_stands_before_them() -> None:
    assert split_reply(TOKENIZER, _reply("one two two"), "two")[1] == "one "


@pytest.mark.parametrize(
    ("place", "problem"),
    [("0", "1 to 5"), ("6", "1 to 5"), ("xyz", "does not say"), ("he", "nothing would be kept")],
)
def test_a_place_that_is_not_there_is_refused(place: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        split_reply(TOKENIZER, _reply("hello"), place)


def test_a_text_that_a_person_wrote_is_tokenised_here() -> None:
    edited = Conversation().add(None, "assistant", "edited")
    assert token_ids_of(TOKENIZER, edited) == tuple(TOKENIZER.encode("edited"))
    assert split_reply(TOKENIZER, edited, "ted")[1] == "edi"


@given(st.text(min_size=1, max_size=12), st.integers(1, 40))
def test_a_cut_never_falls_inside_a_character(text: str, number: int) -> None:
    """With one token per byte, most cuts of a non-Latin text fall inside a character; half of one cannot be shown."""
    reply = _reply(text)
    assert reply.token_ids is not None
    token_ids, kept = split_reply(TOKENIZER, reply, str(min(number, len(reply.token_ids))))
    assert token_ids == reply.token_ids[: len(token_ids)]
    whole = TOKENIZER.decode(reply.token_ids)
    if "\ufffd" not in kept:
        assert whole.startswith(kept)
    else:
        assert len(token_ids) == 1 or "\ufffd" in whole
