"""Text for a terminal: safe, wrapped as it arrives, and errors that say where."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from chatpage.errors import InvalidRequestError
from chatpage.terminal.text import WordWriter, WrappedText, check_unicode, clean, count, decode, format_bytes, format_seconds


@given(st.text())
def test_no_control_character_but_newline_survives(text: str) -> None:
    assert all(c == "\n" or unicodedata.category(c) not in ("Cc", "Cs") for c in clean(text))


@pytest.mark.parametrize(
    ("hostile", "harmless"),
    [
        ("\x1b[2J\x1b]0;owned\x07", "[2J]0;owned"),
        ("\x9b31mred", "31mred"),  # C1 introducer
        ("a\rb\x08c", "abc"),
        ("tab\there", "tab    here"),
        ("one\ntwo", "one\ntwo"),
        ("one\u2028two\u2029three", "one\ntwo\nthree"),
        ("pay \u202e01\u202c \u2066now\u2069", "pay 01 now"),
        ("smörgåsbord 🍞", "smörgåsbord 🍞"),
    ],
)
def test_escape_sequences_become_plain_text(hostile: str, harmless: str) -> None:
    """A model that was told to print an escape sequence could retitle the window or move the cursor over earlier text."""
    assert clean(hostile) == harmless


@given(st.text(alphabet=st.characters(exclude_categories=["Cc", "Cs", "Mn", "Me", "Cf", "Zl", "Zp"])), st.integers(2, 30))
def test_wrapped_lines_fit_and_lose_nothing_but_spaces(text: str, width: int) -> None:
    wrapped = WrappedText(width)
    wrapped.append(text)
    assert all(cell_len(line) <= width for line in wrapped.lines)
    assert "".join(wrapped.lines).replace(" ", "") == text.replace(" ", "")


@given(st.lists(st.text(alphabet="ab \n日"), max_size=8), st.integers(2, 12))
def test_wrapping_does_not_depend_on_how_the_text_was_cut(pieces: list[str], width: int) -> None:
    by_piece, at_once = WrappedText(width), WrappedText(width)
    for piece in pieces:
        by_piece.append(piece)
    at_once.append("".join(pieces))
    assert by_piece.lines == at_once.lines


def test_words_move_whole_to_the_next_line_and_long_ones_are_cut() -> None:
    wrapped = WrappedText(8)
    wrapped.append("the lighthouse keeper")
    assert wrapped.lines == ["the", "lighthou", "se", "keeper"]
    assert wrapped.last_lines(2) == ["se", "keeper"]
    assert wrapped.last_lines(1) == ["keeper"]


@given(st.lists(st.text(alphabet="ab \n日"), max_size=8), st.integers(2, 12))
def test_what_is_written_word_by_word_is_the_wrapped_text(pieces: list[str], width: int) -> None:
    writer, wrapped = WordWriter(width), WrappedText(width)
    written = "".join(writer.append(piece) for piece in pieces) + writer.finish()
    wrapped.append("".join(pieces))
    assert [line.rstrip(" ") for line in written.split("\n")] == [line.rstrip(" ") for line in wrapped.lines]


def test_a_word_is_held_back_until_it_is_known_to_fit() -> None:
    writer = WordWriter(10)
    assert writer.append("a light") == "a "
    assert writer.append("house") == "\n"
    assert writer.append(" x") == "lighthouse\n"
    assert writer.finish() == "x"


def test_bytes_that_are_not_utf8_are_refused_with_their_place() -> None:
    assert decode("grüße".encode(), "stdin") == "grüße"
    with pytest.raises(InvalidRequestError, match=r"notes\.txt is not valid UTF-8: byte 0xff at position 3"):
        decode(b"abc\xffdef", "notes.txt")


def test_half_a_surrogate_pair_is_refused() -> None:
    """Bytes on a command line that are not UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    assert check_unicode("fine", "--prompt") == "fine"
    with pytest.raises(InvalidRequestError, match="--prompt is not valid UTF-8 at character 2"):
        check_unicode("ab\udcff", "--prompt")


def test_numbers_read_well() -> None:
    assert [count(0, "token"), count(1, "token"), count(1024, "token")] == ["0 tokens", "1 token", "1,024 tokens"]
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "5120.0 GiB",
    ]
    assert [format_seconds(s) for s in (0.0123, 0.999, 1.239)] == ["12 ms", "999 ms", "1.24 s"]
