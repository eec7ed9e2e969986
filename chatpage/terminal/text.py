"""Makes text from a model or a person safe and fit for a terminal.

Invariant: what `clean` returns holds no control character but newline, so nobody can send escape sequences through a chat, nor
characters that show the text in another order than it has.
"""

import unicodedata

from rich.cells import get_character_cell_size

from chatpage.errors import InvalidRequestError

_REORDERING = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_TRANSLATED = {ord("\t"): "    ", 0x2028: "\n", 0x2029: "\n"} | dict.fromkeys(_REORDERING, "")


def clean(text: str) -> str:
    """Expand tabs, make every kind of line break a newline, and drop all other control characters: category Cc (escape, bell,
    C1 ...), and those that reorder what stands beside them (U+202A to U+202E, U+2066 to U+2069)."""
    if text.isprintable():
        return text
    expanded = text.translate(_TRANSLATED)
    return "".join(c for c in expanded if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs"))


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8 strictly.

    Raises:
        InvalidRequestError: The bytes are not UTF-8; the message says where.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{source} is not valid UTF-8: byte 0x{data[error.start]:02x} at position {error.start}. Convert it to UTF-8 first."
        ) from error


def check_unicode(text: str, source: str) -> str:
    """Return the text if it can be encoded.

    Raises:
        InvalidRequestError: It holds a lone surrogate: what Python makes of bytes on a command line that are not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{source} is not valid UTF-8 at character {error.start}; convert it first.") from error
    return text


def count(number: int, noun: str) -> str:
    """Write a number with its noun: "1 token", "1,024 tokens"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(number: float) -> str:
    """Write a number of bytes with a binary unit, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("the loop returns at its last unit")


def format_seconds(seconds: float) -> str:
    """Write a duration with a fitting unit: "85 ms", "1.24 s"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


class WrappedText:
    """Text wrapped to a width as it arrives; each append costs the length of what is new.

    Breaks at spaces where it can, inside a word where it must; `lines` joined without breaks has all visible characters.
    """

    def __init__(self, width: int) -> None:
        self._width = max(width, 2)
        self._done: list[str] = []
        self._open = ""
        self._open_cells = 0

    @property
    def lines(self) -> list[str]:
        return [*self._done, self._open]

    def lines_from(self, number: int) -> list[str]:
        """The lines behind the first `number`."""
        return [*self._done[number:], self._open]

    def last_lines(self, number: int) -> list[str]:
        """The last `number` lines, or fewer if there are not so many."""
        return [*self._done[-number + 1 :], self._open] if number > 1 else [self._open]

    def append(self, text: str) -> None:
        for character in text:
            self._put(character)

    def _put(self, character: str) -> None:
        if character == "\n":
            self._break(self._open, "")
            return
        cells = get_character_cell_size(character)
        if self._open_cells + cells <= self._width:
            self._open += character
            self._open_cells += cells
            return
        if character == " ":
            self._break(self._open, "")  # a space at the edge becomes the break
            return
        head, space, word = self._open.rpartition(" ")
        if space and head.strip():
            self._break(head, word + character)
        else:
            self._break(self._open, character)

    def _break(self, line: str, rest: str) -> None:
        self._done.append(line)
        self._open = rest
        self._open_cells = sum(map(get_character_cell_size, rest))


class WordWriter:
    """Turns text that arrives in pieces into what to print next, so that no word is cut at the edge of the terminal.

    The last word of a line is held back until it is known to fit: a word that was printed cannot be moved to the next line.
    """

    def __init__(self, width: int) -> None:
        self._wrapped = WrappedText(width)
        self._num_lines = 0  # lines that were printed whole
        self._num_printed = 0  # characters of the line after them that were printed

    def append(self, text: str) -> str:
        """Take a piece and return what can be printed now."""
        self._wrapped.append(text)
        parts = []
        *done, current = self._wrapped.lines_from(self._num_lines)
        for line in done:
            parts.append(line[self._num_printed :] + "\n")
            self._num_lines += 1
            self._num_printed = 0
        settled = current.rfind(" ") + 1
        if settled > self._num_printed:
            parts.append(current[self._num_printed : settled])
            self._num_printed = settled
        return "".join(parts)

    def finish(self) -> str:
        """Return the word that was held back."""
        return self._wrapped.last_lines(1)[0][self._num_printed :]
