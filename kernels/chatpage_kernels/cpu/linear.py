"""Launchers of the linear layers in C++ (linear.cpp) over a loaded library.

Invariant: the structs here and in linear.h are the same, byte for byte; a library with other sizes is refused. A call whose
tensors stay where they are can be prepared once and run again with another number of rows.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p

import torch

from chatpage_kernels.cpu.library import Library
from chatpage_kernels.quantized_weights import PackedLinear

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # DType of abi.h, as far as linear layers serve them

_OUT_OF_MEMORY, _NO_SUCH_ROW = 1, 3  # Status of abi.h
_WORK_PER_THREAD = 1 << 16  # products that make up for waking a thread


class LinearCall(Structure):
    """Arguments of `chatpage_linear`; see linear.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out", "residual", "norm_weight", "bias", "weight")),
        *((name, c_int64) for name in ("x_row_stride", "out_row_stride", "residual_row_stride")),
        *((name, c_int32) for name in ("num_rows", "num_inputs", "num_outputs")),
        *((name, c_int32) for name in ("format", "x_dtype", "out_dtype", "is_gated", "num_threads")),
        ("norm_epsilon", c_float),
    )


class EmbedCall(Structure):
    """Arguments of `chatpage_embed`; see linear.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "ids", "out")),
        *((name, c_int32) for name in ("num_rows", "num_inputs", "num_outputs", "format", "out_dtype")),
    )


class CpuLinear:
    """The linear layers of one library."""

    def __init__(self, library: Library) -> None:
        """Bind the functions of a library.

        Raises:
            OSError: The library was built from other sources.
        """
        library.check("chatpage_linear_abi", LinearCall, EmbedCall)
        self._linear = library.bind("chatpage_linear", POINTER(LinearCall))
        self._embed = library.bind("chatpage_embed", POINTER(EmbedCall))

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        out: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_epsilon: float = 1e-5,
    ) -> None:
        """Compute a layer into `out`; the arguments are checked by `quantized_linear.linear`.

        Raises:
            MemoryError: There is no memory for the quantised activations.
        """
        self.run(self.prepare(x, packed, out, residual=residual, norm_weight=norm_weight, norm_epsilon=norm_epsilon))

    def prepare(
        self,
        x: torch.Tensor,
        packed: PackedLinear,
        out: torch.Tensor,
        *,
        residual: torch.Tensor | None = None,
        norm_weight: torch.Tensor | None = None,
        norm_epsilon: float = 1e-5,
    ) -> LinearCall:
        """Return the call for `run`. It holds addresses only: keep the tensors alive. `num_rows` may change before a run."""
        num_rows = x.shape[0]
        work = num_rows * packed.num_outputs * packed.num_inputs
        threads = min(torch.get_num_threads(), work // _WORK_PER_THREAD + 1)
        return LinearCall(
            x.data_ptr(),
            out.data_ptr(),
            None if residual is None else residual.data_ptr(),
            None if norm_weight is None else norm_weight.data_ptr(),
            None if packed.bias is None else packed.bias.data_ptr(),
            packed.data.data_ptr(),
            x.stride(0),
            out.stride(0),
            0 if residual is None else residual.stride(0),
            num_rows,
            packed.num_inputs,
            packed.num_outputs,
            packed.format.value,
            DTYPES[x.dtype],
            DTYPES[out.dtype],
            packed.is_gated,
            threads,
            norm_epsilon,
        )

    def run(self, call: LinearCall) -> None:
        """Compute a prepared layer.

        Raises:
            MemoryError: There is no memory for the quantised activations.
        """
        status = self._linear(byref(call))
        if status:
            _fail(status)

    def embed(self, ids: torch.Tensor, packed: PackedLinear, out: torch.Tensor) -> None:
        """Write the rows that contiguous int64 ids name into contiguous `out`.

        Raises:
            ValueError: An id has no row.
        """
        call = EmbedCall(
            packed.data.data_ptr(),
            ids.data_ptr(),
            out.data_ptr(),
            ids.shape[0],
            packed.num_inputs,
            packed.num_outputs,
            packed.format.value,
            DTYPES[out.dtype],
        )
        status = self._embed(byref(call))
        if status:
            _fail(status)


def _fail(status: int) -> None:
    if status == _NO_SUCH_ROW:
        raise ValueError("ids are not all rows of the packed weights; nothing was read")
    if status == _OUT_OF_MEMORY:
        raise MemoryError("there is no memory for the quantised activations of a linear layer")
    raise RuntimeError(f"a linear layer in C++ failed with status {status}")
