"""Take a JSON file apart, record by record, without ever holding more than one record.

Invariant: whatever the bytes are, reading ends, memory stays within the limits below, and a bad record is passed on as a
problem in its place; only a file that is nothing at all raises. Three layouts are told apart by themselves: an array of
records, one record, and one record a line.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from chatpage.errors import ImportFileError

MAX_RECORD_BYTES = 64 * 2**20
MAX_DEPTH = 100
MAX_CONTAINERS = 2_000_000  # objects and lists in one record: what makes a small file large in memory
_CHUNK = 2**18
_BOM = b"\xef\xbb\xbf"
# From here to the next bracket, over complete strings. Possessive: a hostile string cannot make it try twice.
_TO_BRACKET = re.compile(rb'[^\[\]{}"]*+(?:"(?:[^"\\]++|\\.)*+"[^\[\]{}"]*+)*+', re.DOTALL)
_TO_ITEM = re.compile(rb"[\s,]*+")
_SCALAR = re.compile(rb'(?:"(?:[^"\\]++|\\.)*+"|[^,\]\[{}"])++', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Record:
    """The `number`-th record of a file, from 1: either a JSON object, or what is wrong with it."""

    number: int
    value: dict[str, Any] | None
    problem: str = ""


def read_records(stream: BinaryIO) -> Iterator[Record]:
    """Yield the records of a JSON or JSON Lines file.

    Args:
        stream: A seekable binary stream at its beginning.

    Raises:
        ImportFileError: The file is empty, or not JSON from its first character on.
    """
    head = stream.read(4096)
    if head.startswith(b"PK\x03\x04"):
        raise ImportFileError("This is a ZIP archive: unpack it and import the JSON file inside (conversations.json).")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ImportFileError("The file is in UTF-16: save it as UTF-8 first.")
    start = len(_BOM) if head.startswith(_BOM) else 0
    text = head[start:].lstrip()
    if not text:
        raise ImportFileError("The file is empty.")
    if text[:1] not in (b"[", b"{"):
        raise ImportFileError("The file does not begin like JSON: neither with a list nor with an object.")
    stream.seek(start)
    if text[:1] == b"{" and parse_record(1, stream.readline(MAX_RECORD_BYTES)).value is not None:
        stream.seek(start)
        return _read_lines(stream)
    stream.seek(start)
    return _read_values(_Scanner(stream), is_array=text[:1] == b"[")


def parse_record(number: int, raw: bytes) -> Record:
    """Parse one record."""
    if problem := _measure(raw):
        return Record(number, None, problem)
    try:
        value = json.loads(raw, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        return Record(number, None, f"it is not valid JSON ({error})")
    if not isinstance(value, dict):
        return Record(number, None, "it is not a JSON object")
    return Record(number, value)


def _read_lines(stream: BinaryIO) -> Iterator[Record]:
    number = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            yield Record(number, None, f"it is longer than {MAX_RECORD_BYTES} bytes")
            while line and not line.endswith(b"\n"):
                line = stream.readline(_CHUNK)
        elif line.strip():
            yield parse_record(number, line)


def _read_values(scanner: "_Scanner", *, is_array: bool) -> Iterator[Record]:
    number = 0
    if is_array:
        scanner.skip_items_start()
    while (first := scanner.peek_item()) and not (is_array and first == b"]"):
        number += 1
        if first in b"{[":
            try:
                raw = scanner.take_value()
            except _EndedError as error:
                yield Record(number, None, str(error))
                return
            yield parse_record(number, raw)
        elif scanner.skip_scalar():
            yield Record(number, None, "it is not a JSON object")
        else:
            yield Record(number, None, "the file cannot be understood from here on")
            return
    if is_array and first != b"]":
        yield Record(number + 1, None, "the file ends before its list does")


def _measure(raw: bytes) -> str:
    """Return what makes a record too large to parse; "" if nothing does."""
    depth = containers = at = 0
    while (at := _end_of_quiet(raw, at)) < len(raw):
        if raw[at] in b"[{":
            depth += 1
            containers += 1
            if depth > MAX_DEPTH:
                return f"it is nested deeper than {MAX_DEPTH} levels"
            if containers > MAX_CONTAINERS:
                return f"it holds more than {MAX_CONTAINERS} objects and lists"
        elif raw[at] in b"]}":
            depth -= 1
        at += 1
    return ""


def _end_of_quiet(data: bytes, at: int) -> int:
    match = _TO_BRACKET.match(data, at)
    assert match is not None  # the pattern matches the empty string
    return match.end()


class _EndedError(Exception):
    """No more records can be found in the file."""


class _Scanner:
    """A window on a file that begins where the next value does, or a little before."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._data = b""
        self._at = 0

    def peek_item(self) -> bytes:
        """Return the first byte of the next item, past blanks and commas; b"" at the end of the file."""
        while True:
            match = _TO_ITEM.match(self._data, self._at)
            assert match is not None
            self._at = match.end()
            if self._at < len(self._data) or not self._read_more():
                return self._data[self._at : self._at + 1]

    def skip_items_start(self) -> None:
        """Step over the bracket that opens the list."""
        self.peek_item()
        self._at += 1

    def skip_scalar(self) -> bool:
        """Step over a string, number or word; False if there is none."""
        while True:
            match = _SCALAR.match(self._data, self._at)
            if match is not None and match.end() < len(self._data):
                self._at = match.end()
                return True
            if len(self._data) - self._at > MAX_RECORD_BYTES or not self._read_more():
                return False

    def take_value(self) -> bytes:
        """Return the bytes of the object or list that begins here.

        Raises:
            _EndedError: The file ends inside it, or it is too long to look for its end.
        """
        depth, at = 0, self._at
        while True:
            at = _end_of_quiet(self._data, at)
            if at == len(self._data) or self._data[at] == ord('"'):  # a string whose end is not in the window
                length = at - self._at
                if len(self._data) - self._at > MAX_RECORD_BYTES:
                    raise _EndedError(f"it is longer than {MAX_RECORD_BYTES} bytes; the rest of the file was not read")
                if not self._read_more():
                    raise _EndedError("the file ends in the middle of it")
                at = self._at + length
                continue
            depth += 1 if self._data[at] in b"[{" else -1
            at += 1
            if depth == 0:
                value, self._at = self._data[self._at : at], at
                return value

    def _read_more(self) -> bool:
        """Drop what is behind and read as much again as is held, so that a long value costs no more than twice its length."""
        chunk = self._stream.read(max(_CHUNK, len(self._data) - self._at))
        self._data = self._data[self._at :] + chunk
        self._at = 0
        return bool(chunk)
