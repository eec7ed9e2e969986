"""Asks Linux for huge pages behind large tensors that are read all the time: KV caches and weights.

A CPU finds physical memory through small tables it keeps of recent 4 KiB pages; a model's memory has far more of them, and in a
virtual machine each miss walks two levels of tables. With 2 MiB pages the tables suffice.
"""

import ctypes
import sys

import torch

HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


def advise(tensor: torch.Tensor) -> bool:
    """Ask for huge pages behind a tensor; before it is first written is best.

    Only whole huge pages inside the tensor's memory are meant, so neighbours are left alone. Values never change.

    Args:
        tensor: On the CPU, contiguous.

    Returns:
        Whether the system has taken note; False for small tensors, other devices, and systems without huge pages.
    """
    if sys.platform != "linux" or not tensor.is_cpu or not tensor.is_contiguous():
        return False
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= begin:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return bool(madvise(begin, end - begin, _MADV_HUGEPAGE) == 0)
