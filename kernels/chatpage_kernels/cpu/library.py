"""The C interface of the compiled kernels: structs that mirror abi.h, and the functions with their types.

Invariant: the structs here and in abi.h are the same, byte for byte; a library with other sizes is refused.
Calls release the interpreter lock.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

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


class Library:
    """A loaded library: functions whose structs are here, as attributes without `chatpage_`; `bind` gives the others."""

    def __init__(self, path: Path, isa: str) -> None:
        """Load a library.

        Args:
            path: The shared library.
            isa: Name of the instruction set it was compiled for.

        Raises:
            OSError: It cannot be loaded, or is not what this version of the package would build.
        """
        self.path, self.isa = path, isa
        self._loaded = ctypes.CDLL(str(path))
        self.check("chatpage_abi", AttentionCall, WriteCall)
        self.attention = self.bind("chatpage_attention", POINTER(AttentionCall))
        self.write_kv = self.bind("chatpage_write_kv", POINTER(WriteCall))
        self.copy_blocks = self.bind("chatpage_copy_blocks", c_void_p, c_int32, c_void_p, c_int32, POINTER(CacheShape), c_int32)
        self.convert = self.bind("chatpage_convert", c_void_p, c_int32, c_int32, POINTER(CacheShape), c_int32)
        self.read_memory = self.bind("chatpage_read_memory", c_void_p, c_int64, c_int32, result=c_double)
        self.multiply = self.bind("chatpage_multiply", c_int32, c_int64, c_int32, result=c_double)
        self.use_own_threads = self.bind("chatpage_use_own_threads", result=None)
        self.bind("chatpage_use_openmp", c_void_p, result=None)(_torch_openmp())

    def check(self, name: str, *structs: type[Structure]) -> None:
        """Hold the sizes of structs against those that the library's function `name` tells.

        Raises:
            OSError: The library was built from other sources.
        """
        expected = 0
        for struct in structs:
            expected = expected * _ABI_FACTOR + ctypes.sizeof(struct)
        found = self.bind(name, result=c_int64)()
        if found != expected:
            raise OSError(f"{self.path} was built with other structs: {name} says {found} instead of {expected}")

    def bind(self, name: str, *arguments: Any, result: Any = c_int32) -> Any:
        """Return a function of the library, with its types.

        Raises:
            OSError: It is not there.
        """
        try:
            function = getattr(self._loaded, name)
        except AttributeError as error:
            raise OSError(f"{self.path} lacks the function {name}") from error
        function.restype, function.argtypes = result, arguments
        return function


def _torch_openmp() -> c_void_p | None:
    """Return GOMP_parallel of the OpenMP runtime that torch has loaded, None if it has none of the kind.

    Looked up through torch's own library: its dependencies are searched with it, so this is its runtime, whatever its name.
    """
    torch_library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(torch_library)).GOMP_parallel, c_void_p)
    except (OSError, AttributeError):
        return None
