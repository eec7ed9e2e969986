"""Launcher of the choice of tokens in C++ (sampling.cpp), over a loaded library.

Invariant: the struct here and in sampling.h are the same, byte for byte; a library with another size is refused.
"""

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from chatpage_kernels.cpu.library import Library

_OUT_OF_MEMORY = 1  # Status of abi.h


class SampleCall(Structure):
    """Arguments of `chatpage_sample`; see sampling.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("raw", "edited", "raw_row", "edited_row", "temperature", "top_k")),
        *((name, c_void_p) for name in ("top_p", "min_p", "draw", "token", "logprob")),
        *((name, c_int64) for name in ("raw_stride", "edited_stride")),
        *((name, c_int32) for name in ("num_samples", "vocab_size", "num_threads")),
    )


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the samples of a step ask for, one entry per sample.

    Args:
        temperature: float32; 0 takes the likeliest token, the first of equal ones.
        top_k: int32; 0 is off.
        top_p: float64; 1 is off.
        min_p: float64; 0 is off.
        draw: float64 in [0, 1): the place in the cumulative distribution.
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    draw: NDArray[np.float64]


class CpuSampling:
    """The choice of tokens of one library."""

    def __init__(self, library: Library) -> None:
        """Bind the function of a library.

        Raises:
            OSError: The library was built from other sources.
        """
        library.check("chatpage_sample_abi", SampleCall)
        self._sample = library.bind("chatpage_sample", POINTER(SampleCall))

    def choose(
        self, raw: torch.Tensor, edited: torch.Tensor, rows: NDArray[np.int32], wanted: SamplingRows
    ) -> tuple[list[int], list[float]]:
        """Choose one token per sample.

        Args:
            raw: float32 [num_rows, vocab_size], rows may be strided: the logits of the model.
            edited: `raw` itself, or [num_samples, vocab_size]: what each sample chooses from. -inf rules a token out.
            rows: [num_samples] row of `raw` of each sample.
            wanted: How each sample chooses.

        Returns:
            The tokens, -1 where a row holds NaN or +inf or rules out every token, and their log probabilities by `raw`.

        Raises:
            ValueError: The shapes do not fit together.
            MemoryError: There is no memory for a row per thread.
        """
        num = len(rows)
        fields = (wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p, wanted.draw)
        if raw.stride(1) != 1 or edited.stride(1) != 1 or edited.shape[1] != raw.shape[1] or {len(x) for x in fields} != {num}:
            raise ValueError(
                f"logits {tuple(raw.shape)} and {tuple(edited.shape)} do not fit {num} samples, or are not in rows"
            )
        edited_rows = rows if edited is raw else np.arange(num, dtype=np.int32)
        tokens, logprobs = np.empty(num, np.int64), np.empty(num, np.float64)
        call = SampleCall(
            raw.data_ptr(),
            edited.data_ptr(),
            *(array.ctypes.data for array in (rows, edited_rows, *fields, tokens, logprobs)),
            raw.stride(0),
            edited.stride(0),
            num,
            raw.shape[1],
            torch.get_num_threads(),
        )
        status = self._sample(byref(call))
        if status == _OUT_OF_MEMORY:
            raise MemoryError("there is no memory to choose tokens from a row of logits")
        return tokens.tolist(), logprobs.tolist()
