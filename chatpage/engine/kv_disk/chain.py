"""Names of blocks on disk: a digest of everything that must agree before a block may be used.

Invariant: two blocks have the same name only if model, layout, salt, all tokens before them and their own tokens are the same.
A name alone proves nothing, though: a reader compares the tokens.

    root    = H(format, model id, layout, block size, cache salt)
    block i = H(name of block i - 1, tokens of block i)          so branches share the files of what they have in common
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FORMAT = "chatpage-kv-1"  # part of every name and file: raise it when the meaning of a file changes
Name = bytes
_DIGEST_SIZE = 24


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the bytes of a block depend on beside tokens.

    Args:
        model_id: Digest of weights, dtype, quantization and settings (positions included).
        layout: How the backend in use arranges a block, and the shapes of all layers.
        block_size: Tokens per block.
        num_bytes: Of one block.
    """

    model_id: str
    layout: str
    block_size: int
    num_bytes: int


def root_name(geometry: Geometry, cache_salt: str) -> Name:
    """Return the name that the first block of a chain hangs on."""
    parts = (FORMAT, geometry.model_id, geometry.layout, str(geometry.block_size), cache_salt)
    return _digest(*(len(part := text.encode("utf-8", "surrogatepass")).to_bytes(8, "little") + part for text in parts))


def next_name(parent: Name, tokens: Sequence[int]) -> Name:
    """Return the name of the block that holds `tokens` behind the block `parent`."""
    return _digest(parent, array("q", tokens).tobytes())


def names_of(root: Name, tokens: Sequence[int], block_size: int) -> Iterator[Name]:
    """Yield the name of every full block of `tokens`."""
    name = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        name = next_name(name, tokens[start : start + block_size])
        yield name


def _digest(*parts: bytes) -> Name:
    digest = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for part in parts:
        digest.update(part)
    return digest.digest()
