"""The C++ kernels of every instruction set that this machine can run, for tests.

They are built once into the user's cache, where an installed chatpage keeps them too; their names hold what they are made of.
"""

from functools import cache

import pytest

from chatpage_kernels.cpu import features, toolchain
from chatpage_kernels.cpu.kernels import CpuKernels
from chatpage_kernels.cpu.library import Library

ISA_NAMES = [isa.name for isa in features.ISAS]


def isa_named(name: str) -> features.Isa:
    """Return an instruction set, or skip the test where this CPU lacks it."""
    for isa in features.usable_isas():
        if isa.name == name:
            return isa
    pytest.skip(f"this CPU has no {name}")


@cache
def _load(isa: features.Isa) -> CpuKernels | str:
    try:
        compiler = toolchain.find_compiler()
    except toolchain.BuildError as error:
        return str(error)
    return CpuKernels(Library(toolchain.compile_library(isa, compiler), isa.name))


def kernels_for(name: str) -> CpuKernels:
    """Return the kernels of an instruction set, or skip the test where they cannot be made."""
    kernels = _load(isa_named(name))
    if isinstance(kernels, str):
        pytest.skip(kernels)
    return kernels


def best_kernels() -> CpuKernels:
    """Return the kernels that this machine would use, or skip the test where there are none."""
    isas = features.usable_isas()
    if not isas:
        pytest.skip(features.why_unsupported())
    return kernels_for(isas[0].name)
