"""One block as a safetensors file, and the proof that a file is exactly the one that was asked for.

Invariant: `decode` returns bytes that `encode` was given for the same model, layout, parent and tokens, or raises.

    8 bytes: length of the header | header: JSON, padded | tokens I64 [num_rows] | kv U8 [bytes of a block]

The header follows from what the reader knows and one checksum, so it is compared as a whole: whatever differs is damage.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from chatpage.engine.kv_disk.chain import FORMAT, Geometry, Name

_MAX_HEADER = 2**16
_ALIGNMENT = 8


class DamagedFile(Exception):
    """A file is not what its name says; the message is for the log."""


@dataclass(frozen=True, slots=True)
class Block:
    """The committed rows of one block: their tokens, and the bytes of the whole block."""

    tokens: tuple[int, ...]
    kv: memoryview


def encode(geometry: Geometry, parent: Name, tokens: Sequence[int], kv: memoryview) -> list[bytes | memoryview]:
    """Return the parts of a file in order."""
    assert 0 < len(tokens) <= geometry.block_size, f"{len(tokens)} tokens in a block of {geometry.block_size}"
    assert kv.nbytes == geometry.num_bytes, f"{kv.nbytes} bytes for a block of {geometry.num_bytes}"
    ids = array("q", tokens).tobytes()
    digest = hashlib.sha256(ids)
    digest.update(kv)
    return [_header(geometry, parent, len(tokens), digest.hexdigest()), ids, kv]


def decode(geometry: Geometry, parent: Name, data: bytes | bytearray) -> Block:
    """Return the block in a file.

    Raises:
        DamagedFile: It is not a whole file of this model, layout and parent.
    """
    view = memoryview(data)
    length = int.from_bytes(view[:_ALIGNMENT], "little")
    if len(view) < _ALIGNMENT or not 0 < length <= _MAX_HEADER:
        raise DamagedFile("it is no safetensors file")
    end = _ALIGNMENT + length
    checksum, num_rows = _claims(bytes(view[_ALIGNMENT:end]))
    if not 0 < num_rows <= geometry.block_size or view[:end] != _header(geometry, parent, num_rows, checksum):
        raise DamagedFile("its header is of another block, model or layout")
    if len(view) != end + 8 * num_rows + geometry.num_bytes:
        raise DamagedFile(f"it has {len(view)} bytes")
    if hashlib.sha256(view[end:]).hexdigest() != checksum:
        raise DamagedFile("its checksum is wrong")
    return Block(tuple(array("q", bytes(view[end : end + 8 * num_rows]))), view[end + 8 * num_rows :])


def max_file_size(geometry: Geometry) -> int:
    """Return a size that no file of a block exceeds."""
    return _ALIGNMENT + _MAX_HEADER + 8 * geometry.block_size + geometry.num_bytes


def _header(geometry: Geometry, parent: Name, num_rows: int, checksum: str) -> bytes:
    start = 8 * num_rows
    header = {
        "__metadata__": {
            "format": FORMAT,
            "model": geometry.model_id,
            "layout": geometry.layout,
            "block_size": str(geometry.block_size),
            "parent": parent.hex(),
            "sha256": checksum,
        },
        "tokens": {"dtype": "I64", "shape": [num_rows], "data_offsets": [0, start]},
        "kv": {"dtype": "U8", "shape": [geometry.num_bytes], "data_offsets": [start, start + geometry.num_bytes]},
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_ALIGNMENT, "little") + text


def _claims(header: bytes) -> tuple[str, int]:
    """Read what the header says of its checksum and its number of rows; the caller checks both."""
    try:
        fields = json.loads(header)
        checksum, num_rows = fields["__metadata__"]["sha256"], fields["tokens"]["shape"][0]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise DamagedFile("its header cannot be read") from error
    if not isinstance(checksum, str) or type(num_rows) is not int:
        raise DamagedFile("its header cannot be read")
    return checksum, num_rows
