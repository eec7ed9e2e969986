"""The arguments of commands: anything becomes a value or a clear error."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatpage.errors import InvalidParameterError
from chatpage.terminal.arguments import number, parse_value, shorten, split_setting


@given(st.sampled_from(["seed", "stop", "ignore_eos", "logit_bias", "temperature"]), st.text())
def test_no_text_raises_anything_but_a_parameter_error(name: str, text: str) -> None:
    with contextlib.suppress(InvalidParameterError):
        parse_value(name, text)
    with contextlib.suppress(InvalidParameterError):
        assert number(text, "N") >= 0


def test_a_long_number_is_refused_with_a_short_message() -> None:
    with pytest.raises(InvalidParameterError) as refused:
        number("1" * 5000, "/go NODE")
    assert len(str(refused.value)) < 100
    assert number("1" * 18, "N") == int("1" * 18)


@pytest.mark.parametrize(
    ("argument", "parts"),
    [
        ("", ("", "")),
        ("seed", ("seed", "")),
        ("seed  4", ("seed", "4")),
        ("seed=4", ("seed", "4")),
        ("seed= 4", ("seed", "4")),
        ("stop a=b", ("stop", "a=b")),
    ],
)
def test_a_name_and_its_value_come_apart(argument: str, parts: tuple[str, str]) -> None:
    assert split_setting(argument) == parts


def test_what_is_shortened_shows_that_it_was() -> None:
    assert (shorten("abc", 3), shorten("abcd", 3)) == ("abc", "ab…")
