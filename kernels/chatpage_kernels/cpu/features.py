"""Which instruction sets this CPU has, and what a compiler must be told to use each.

Invariant: an `Isa` is offered only if the kernel of the operating system reports every flag it needs.
"""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set the kernels are written for.

    Args:
        name: "avx512_bf16", "avx512_vnni", "avx512" or "avx2".
        needs: Flags of /proc/cpuinfo.
        options: Of the compiler.
    """

    name: str
    needs: frozenset[str]
    options: tuple[str, ...]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX2_OPTIONS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_OPTIONS = (*_AVX2_OPTIONS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

ISAS = (  # best first
    Isa("avx512_bf16", _AVX512 | {"avx512_vnni", "avx512_bf16"}, (*_AVX512_OPTIONS, "-mavx512vnni", "-mavx512bf16")),
    Isa("avx512_vnni", _AVX512 | {"avx512_vnni"}, (*_AVX512_OPTIONS, "-mavx512vnni")),
    Isa("avx512", _AVX512, _AVX512_OPTIONS),
    Isa("avx2", _AVX2, _AVX2_OPTIONS),
)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of the first CPU; none if the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def usable_isas(flags: frozenset[str] | None = None) -> list[Isa]:
    """Return the instruction sets that CPU flags (default: of this CPU) allow, best first."""
    flags = cpu_flags() if flags is None else flags
    return [isa for isa in ISAS if isa.needs <= flags]


def why_unsupported() -> str:
    """Say why no C++ kernels exist for this machine; empty if they do."""
    if sys.platform != "linux":
        return f"the C++ kernels are for Linux, not {sys.platform}"
    if not usable_isas():
        return f"this {platform.machine()} CPU has neither AVX-512 nor AVX2, which the C++ kernels are written for"
    return ""
