"""The tensors of a GGUF file, found without reading its vocabulary again.

The reader of the gguf package walks over every token of the vocabulary first, which takes seconds; so where each tensor lies is
kept beside the converted settings. Invariant: that folder belongs to one content of the file (see `gguf_files`), so what is
kept there is never stale.
"""

import json
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from numpy.typing import NDArray

from chatpage.engine.models.cache_dir import publishing
from chatpage.errors import BrokenModelError
from chatpage_kernels.gguf_blocks import from_gguf_blocks
from chatpage_kernels.quantized_weights import QuantizedRows

_WIDE = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})
_INDEX = "index.json"


class GgufTensors:
    """The tensors of one file, by the names of llama.cpp.

    Args:
        file: The GGUF file.
        settings: Its folder from `gguf_files.convert_settings`.

    Raises:
        BrokenModelError: The file is damaged or truncated.
    """

    def __init__(self, file: Path, settings: Path) -> None:
        self.file = file
        self._entries: dict[str, tuple[int, list[int], int, int]] = json.loads(_index(file, settings).read_text())
        self._bytes: NDArray[np.uint8] = np.memmap(file, np.uint8, mode="r")
        end = max((offset + size for _, _, offset, size in self._entries.values()), default=0)
        if end > len(self._bytes):
            raise BrokenModelError(f"{file} is incomplete: it has {len(self._bytes):,} bytes of {end:,}. Fetch it again.")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor has fewer bits than a half type."""
        return GGMLQuantizationType(self._entry(name)[0]) not in _WIDE

    def matrix(self, name: str) -> QuantizedRows:
        """Read a matrix [num_outputs, num_inputs], see `from_gguf_blocks`.

        Raises:
            BrokenModelError: It is missing, or no matrix whose inputs go in groups of 32.
        """
        kind, shape, offset, size = self._entry(name)
        try:
            num_outputs, num_inputs = shape
            return from_gguf_blocks(self._bytes[offset : offset + size], GGMLQuantizationType(kind), (num_outputs, num_inputs))
        except ValueError as error:
            raise BrokenModelError(f"{name} in {self.file} cannot be read: {error}.") from error

    def vector(self, name: str) -> torch.Tensor:
        """Read a tensor of one dimension as fp32.

        Raises:
            BrokenModelError: It is missing.
        """
        kind, shape, offset, size = self._entry(name)
        raw = np.ascontiguousarray(self._bytes[offset : offset + size])
        return torch.from_numpy(dequantize(raw, GGMLQuantizationType(kind)).astype(np.float32).reshape(shape))

    def _entry(self, name: str) -> tuple[int, list[int], int, int]:
        if name not in self._entries:
            raise BrokenModelError(f"{self.file} is incomplete: it has no tensor {name}. Fetch it again.")
        return self._entries[name]


def _index(file: Path, settings: Path) -> Path:
    """Return a file with type, shape, offset and bytes of every tensor, made on first use."""
    target = settings / "tensors"
    with publishing(target) as folder:
        if folder is not None:
            try:
                tensors = GGUFReader(file).tensors
            except Exception as error:
                raise BrokenModelError(f"{file} is damaged or incomplete ({type(error).__name__}: {error}).") from error
            entries = {
                tensor.name: (
                    int(tensor.tensor_type),
                    [int(size) for size in reversed(tensor.shape)],  # GGUF names the innermost dimension first
                    int(tensor.data_offset),
                    int(tensor.n_bytes),
                )
                for tensor in tensors
            }
            (folder / _INDEX).write_text(json.dumps(entries))
    return target / _INDEX
