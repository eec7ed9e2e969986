"""Taking files apart: any layout, any chunk border, any damage, and always an end."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatpage.errors import ImportFileError
from chatpage.store.formats import reading
from chatpage.store.formats.reading import Record, read_records

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet='ab"\\[]{},:\n é', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='ab"\\[]{}', max_size=4), inner, max_size=3),
    max_leaves=12,
)
RECORDS = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), min_size=1, max_size=6)


def records_of(content: bytes) -> list[Record]:
    return list(read_records(io.BytesIO(content)))


def values_of(content: bytes) -> list[object]:
    return [record.value for record in records_of(content)]


@given(RECORDS, st.sampled_from([None, 1]), st.sampled_from([b"", b"\xef\xbb\xbf", b" \n\t"]), st.integers(1, 40))
def test_a_list_is_read_whatever_its_strings_hold_and_wherever_a_chunk_ends(
    records: list[dict[str, object]], indent: int | None, before: bytes, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_CHUNK", chunk)
        assert values_of(before + json.dumps(records, indent=indent).encode()) == records


@given(RECORDS)
def test_lines_and_single_records_are_told_apart(records: list[dict[str, object]]) -> None:
    assert values_of(b"\n\n".join(json.dumps(record).encode() for record in records)) == records
    assert values_of(json.dumps(records[0], indent=2).encode()) == records[:1]


@given(st.binary(max_size=60))
def test_any_bytes_end_in_records_or_one_typed_error(content: bytes) -> None:
    for start in (b"", b"[", b"{", b'[{"a":1},', b'{"a":1}\n{'):
        try:
            records = records_of(start + content)
        except ImportFileError:
            continue
        assert all((record.value is None) == bool(record.problem) for record in records)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'[{"a":1}, 5, {"b":2}]', "is not a JSON object"),
        (b'[{"a":1}, "x, ]", {"b":2}]', "is not a JSON object"),
        (b'[{"a":1}, [1], {"b":2}]', "is not a JSON object"),
        (b'[{"a":1}, {"x" 1}, {"b":2}]', "is not valid JSON"),
        (b'{"a":1}\n{"x":\n{"b":2}\n', "is not valid JSON"),
        (b'[{"a":1}, {"x":"\xff"}, {"b":2}]', "is not valid JSON"),
        (b'[{"a":1}, {"x":' + b"1" * 5000 + b'}, {"b":2}]', "is not valid JSON"),
        (b'[{"a":1}, {"x":' + b"[" * 101 + b"]" * 101 + b'}, {"b":2}]', "nested deeper than 100 levels"),
    ],
)
def test_a_bad_record_does_not_spoil_its_neighbours(content: bytes, problem: str) -> None:
    first, bad, last = records_of(content)
    assert (first.value, last.value) == ({"a": 1}, {"b": 2})
    assert bad.value is None
    assert problem in bad.problem


@pytest.mark.parametrize("content", [b'[{"a":1},{"b":', b'[{"a":1},{"b":"', b'[{"a":1},', b'[{"a":1}'])
def test_a_file_that_was_cut_off_keeps_what_came_before(content: bytes) -> None:
    first, bad = records_of(content)
    assert first.value == {"a": 1}
    assert "ends" in bad.problem


def test_numbers_that_are_none_become_nothing() -> None:
    assert values_of(b'{"a": NaN, "b": -Infinity}') == [{"a": None, "b": None}]


def test_a_record_beyond_the_limit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_RECORD_BYTES", 1000)
    monkeypatch.setattr(reading, "_CHUNK", 100)
    long = b'{"x":"' + b"y" * 3000 + b'"}'
    assert [record.problem[:20] for record in records_of(b'{"a":1}\n' + long + b'\n{"b":2}')] == [
        "",
        "it is longer than 10",
        "",
    ]
    assert [record.problem[:20] for record in records_of(b'[{"a":1},' + long + b"]")] == ["", "it is longer than 10"]


def test_a_record_of_too_many_objects_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of empty lists are a small file and gigabytes of memory."""
    monkeypatch.setattr(reading, "MAX_CONTAINERS", 100)
    (record,) = records_of(b'[{"x":[' + b"[]," * 200 + b"[]]}]")
    assert "more than 100 objects and lists" in record.problem


def test_a_million_open_brackets_end_quickly() -> None:
    (record,) = records_of(b"[" * 10**6)
    assert record.value is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"PK\x03\x04rest", "is a ZIP archive"),
        (b"\xff\xfe[\0", "is in UTF-16"),
        (b"hello", "does not begin like JSON"),
        (b"\x00\x01\x02", "does not begin like JSON"),
    ],
)
def test_a_file_that_is_nothing_says_what_to_do(content: bytes, message: str) -> None:
    with pytest.raises(ImportFileError, match=message):
        read_records(io.BytesIO(content))
