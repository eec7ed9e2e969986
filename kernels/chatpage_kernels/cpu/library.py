"""The C interface of the compiled kernels: structs that mirror abi.h, and the functions with their types.

Invariant: the structs here and in abi.h are the same, byte for byte; a library with other sizes is refused.
Calls release the interpreter lock.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

_ABI_FACTOR = 1000


class CacheShape(Structure):
    """The KV cache of one layer; `packed` chooses the layout of layout.h."""

    _fields_ = (
        *((name, c_int32) for name in ("block_size", "num_kv_heads", "head_dim", "value_dim")),
        ("dtype", c_int32),
        ("packed", c_int32),
        ("num_blocks", c_int64),
    )


class AttentionCall(Structure):
    """Arguments of `chatpage_attention`; see abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "out", "key_cache", "value_cache", "sinks")),
        *((name, c_int64) for name in ("query_row_stride", "query_head_stride")),
        *((name, c_void_p) for name in ("items", "units", "row_index", "row_positions", "block_tables")),
        *((name, c_void_p) for name in ("merge_rows", "merge_indptr", "merge_parts")),
        *((name, c_int32) for name in ("num_units", "table_stride", "num_merges", "num_parts", "window")),
        *((name, c_int32) for name in ("num_query_heads", "num_threads")),
        ("scale", c_float),
        ("softcap", c_float),
        ("cache", CacheShape),
    )


class WriteCall(Structure):
    """Arguments of `chatpage_write_kv`; see abi.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value", "key_cache", "value_cache", "slots")),
        *((name, c_int64) for name in ("key_row_stride", "key_head_stride", "value_row_stride", "value_head_stride")),
        *((name, c_int32) for name in ("num_tokens", "num_threads")),
        ("cache", CacheShape),
    )


_FUNCTIONS = {
    "chatpage_attention": (c_int32, [POINTER(AttentionCall)]),
    "chatpage_write_kv": (c_int32, [POINTER(WriteCall)]),
    "chatpage_copy_blocks": (c_int32, [c_void_p, c_int32, c_void_p, c_int32, POINTER(CacheShape), c_int32]),
    "chatpage_convert": (c_int32, [c_void_p, c_int32, c_int32, POINTER(CacheShape), c_int32]),
    "chatpage_read_memory": (c_double, [c_void_p, c_int64, c_int32]),
    "chatpage_multiply": (c_double, [c_int32, c_int64, c_int32]),
    "chatpage_use_openmp": (None, [c_void_p]),
    "chatpage_use_own_threads": (None, []),
    "chatpage_abi": (c_int64, []),
}


class Library:
    """A loaded library. Its functions are attributes named without `chatpage_`."""

    def __init__(self, path: Path, isa: str) -> None:
        """Load a library.

        Args:
            path: The shared library.
            isa: Name of the instruction set it was compiled for.

        Raises:
            OSError: It cannot be loaded, or is not what this version of the package would build.
        """
        self.path, self.isa = path, isa
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            try:
                function = getattr(library, name)
            except AttributeError as error:
                raise OSError(f"{path} lacks the function {name}") from error
            function.restype, function.argtypes = result, arguments
        expected = ctypes.sizeof(AttentionCall) * _ABI_FACTOR + ctypes.sizeof(WriteCall)
        if library.chatpage_abi() != expected:
            raise OSError(f"{path} was built with other structs: {library.chatpage_abi()} instead of {expected}")
        self.attention = library.chatpage_attention
        self.write_kv = library.chatpage_write_kv
        self.copy_blocks = library.chatpage_copy_blocks
        self.convert = library.chatpage_convert
        self.read_memory = library.chatpage_read_memory
        self.multiply = library.chatpage_multiply
        self.use_own_threads = library.chatpage_use_own_threads
        library.chatpage_use_openmp(_torch_openmp())


def _torch_openmp() -> c_void_p | None:
    """Return GOMP_parallel of the OpenMP runtime that torch has loaded, None if it has none of the kind.

    Looked up through torch's own library: its dependencies are searched with it, so this is its runtime, whatever its name.
    """
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(torch_library)).GOMP_parallel, c_void_p)
    except (OSError, AttributeError):
        return None
