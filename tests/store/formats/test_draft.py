"""Careful reading: a value of the wrong type is no value."""

import pytest

from chatpage.store.formats.draft import as_key, as_moment, as_name, as_tags, as_text, title_from

MOMENT = 1_700_000_000_000_000


@pytest.mark.parametrize(
    "value",
    [
        1_700_000_000,
        1_700_000_000.0,
        1_700_000_000_000,
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20",
        "2023-11-14T23:13:20+01:00",
    ],
)
def test_times_are_read_as_seconds_milliseconds_and_iso_dates(value: object) -> None:
    assert as_moment(value) == MOMENT


def test_times_are_read_as_english_dates() -> None:
    assert as_moment("November 14, 2023 10:13pm") == MOMENT - 20_000_000


@pytest.mark.parametrize(
    "value", [None, True, -1, 0, float("inf"), float("nan"), 10**400, 1e300, "tomorrow", "9" * 100, [], {}]
)
def test_what_is_no_time_is_none(value: object) -> None:
    assert as_moment(value) is None


def test_texts_names_and_keys_take_only_their_own() -> None:
    assert (as_text("a\ud800"), as_text(5), as_text(None)) == ("a\ufffd", "", "")
    assert (as_name("a"), as_name(""), as_name("x" * 201), as_name(5)) == ("a", None, None, None)
    assert (as_key("a"), as_key(5), as_key(True), as_key(2**70), as_key([])) == ("a", "5", None, None, None)


def test_tags_are_the_usable_ones_once() -> None:
    assert as_tags(["a", " a ", "", 5, None, "x" * 101, "b"]) == ("a", "b")
    assert as_tags("ab") == ()


def test_a_title_is_the_beginning_of_the_first_line() -> None:
    assert title_from("  Hello\nworld") == "Hello"
    assert title_from("x" * 100) == "x" * 59 + "…"
