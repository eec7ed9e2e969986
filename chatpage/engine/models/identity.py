"""What makes two models the same for the KV cache.

Invariant: equal ids mean interchangeable keys and values. A model under the same name with other weights, another dtype or
quantization, or other settings of its architecture gets another id.

Reading all weights would take longer than loading them, so of every weight file this takes the size, the time of its last
change, its header (names, shapes, types and offsets of the tensors), and samples spread over the whole file: new weights
differ everywhere, so samples see them even where size and time were kept.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

_HEADER_BYTES = 2**20
_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096


def weights_digest(files: Iterable[Path]) -> str:
    """Return a digest of weight files, of each in the order of their names; a few milliseconds each."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        with file.open("rb", buffering=0) as stream:
            digest.update(stream.read(_HEADER_BYTES))
            for i in range(_NUM_SAMPLES):
                stream.seek(stat.st_size * i // _NUM_SAMPLES, os.SEEK_SET)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def model_id(*, weights: str, config_json: str, dtype: str, quantization: str) -> str:
    """Return the id of a model as it is computed: its weights, settings, dtype and quantization."""
    parts = "\0".join((weights, config_json, dtype, quantization))
    return hashlib.sha256(parts.encode()).hexdigest()
