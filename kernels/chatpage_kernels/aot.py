"""Compiles the Triton kernels for every GPU they are meant for, on a machine that has none: `python -m chatpage_kernels.aot`.

Invariant: what it prints without a complaint has no register spills, fits the shared memory of the GPU, multiplies with its
matrix units and reads 16 bytes at a time. Tiles, warps and stages are those that `triton_config` gives a launch.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from chatpage_kernels import triton_config

# Shared memory that one program can have, in bytes.
TARGETS = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx90a": 65_536,
    "gfx942": 65_536,
    "gfx950": 163_840,
}
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_ALIGNED = {  # divisible by 16 in every launch of an engine: pointers, and strides of 16-element rows
    *("out", "parts", "part_lse", "query", "key_cache", "value_cache", "k_scale", "v_scale", "sinks"),
    *("items", "num_items", "row_index", "row_positions", "block_tables", "merge_rows", "merge_indptr", "merge_parts"),
    *("num_merges", "key", "value", "slots", "addresses", "row_words", "copies"),
    *("s_qt", "s_qh", "s_kb", "s_kt", "s_kh", "s_vb", "s_vt", "s_vh", "s_ot", "s_oh", "s_pp", "s_ph"),
    *("s_kh", "s_kcb", "s_kct", "s_kch", "s_vcb", "s_vct", "s_vch"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a kernel."""

    kernel: Literal["attention", "merge", "write", "copy"]
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    value_dim: int = 128
    prefill: bool = False
    kv_format: str = "same"
    masks: bool = False  # window, softcap and scales

    @property
    def name(self) -> str:
        if self.kernel != "attention":
            return self.kernel
        words = ["prefill" if self.prefill else "decode", _TYPES[self.dtype], f"{self.head_dim}x{self.value_dim}"]
        return " ".join(words + [self.kv_format] * (self.kv_format != "same") + ["window softcap"] * self.masks)


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of one variant for one GPU."""

    variant: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix_instructions: int
    wide_loads: int

    def complaints(self) -> list[str]:
        """Say which of the rules it breaks."""
        rules = {
            f"spills {self.spilled_bytes} bytes of registers": self.spilled_bytes > 0,
            f"needs {self.shared_bytes} of {TARGETS[self.target]} bytes of shared memory": self.shared_bytes
            > TARGETS[self.target],
            "has no matrix instruction": self.is_attention and not self.matrix_instructions,
            "reads nothing 16 bytes at a time": not self.wide_loads and (self.is_attention or self.variant == "copy"),
        }
        return [f"{self.variant} on {self.target} {rule}" for rule, is_broken in rules.items() if is_broken]

    @property
    def is_attention(self) -> bool:
        return self.variant.startswith(("decode", "prefill"))


CORE = (
    Variant("attention", head_dim=64, value_dim=64),
    Variant("attention"),
    Variant("attention", prefill=True),
    Variant("attention", kv_format="e4m3"),
    Variant("attention", torch.float32),
    Variant("copy"),
)
ALL = (
    *CORE,
    *(Variant("attention", head_dim=dim, value_dim=dim, prefill=prefill) for dim in (96, 256) for prefill in (False, True)),
    *(Variant("attention", torch.float32, dim, dim, prefill=True) for dim in (64, 128, 256)),
    Variant("attention", torch.float32, 256, 256),
    Variant("attention", torch.float16, 192, 128),
    Variant("attention", prefill=True, kv_format="e4m3"),
    Variant("attention", kv_format="e5m2", masks=True),
    Variant("attention", prefill=True, masks=True),
    Variant("merge"),
    Variant("write"),
)


def compile_variant(variant: Variant, target: str) -> Report:
    """Compile one variant for one GPU and read what came out.

    Raises:
        RuntimeError: This process interprets kernels (TRITON_INTERPRET was set when it imported them).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing can be compiled in this process")
    is_hip = target.startswith("gfx")
    kernel, constants, types, options = _specialise(variant, target)
    names = [parameter.name for parameter in kernel.params]
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constants,
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in _ALIGNED},
    )
    gpu = GPUTarget("hip", target, 64) if is_hip else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=gpu, options=options)
    numbers = _read_amdgcn(compiled.asm["amdgcn"]) if is_hip else _read_cubin(compiled.asm["cubin"])
    return Report(variant.name, target, shared_bytes=compiled.metadata.shared, **numbers)


def compile_all(variants: Iterable[Variant], targets: Iterable[str], *, processes: int | None = None) -> list[Report]:
    """Compile variants for targets, in processes of their own."""
    jobs = [(variant, target) for target in targets for variant in variants]
    with ProcessPoolExecutor(processes or os.cpu_count()) as pool:
        return list(pool.map(compile_variant, *zip(*jobs, strict=True)))


def _family(target: str) -> triton_config.Family:
    digits = int(target.removeprefix("sm_")) if target.startswith("sm_") else 0
    return triton_config.family_of(divmod(digits, 10), is_hip=target.startswith("gfx"))


def _specialise(variant: Variant, target: str) -> tuple[Any, dict[str, Any], dict[str, str], dict[str, int]]:
    """Return (kernel, its constants, types of its other arguments, compiler options) as the launchers would choose them."""
    import triton.language as tl

    from chatpage_kernels import triton_attention, triton_cache

    value = f"*{_TYPES[variant.dtype]}"
    pointers = dict.fromkeys(("parts", "part_lse", "k_scale", "v_scale", "sinks"), "*fp32")
    pointers |= dict.fromkeys(("items", "num_items", "row_index", "row_positions", "block_tables"), "*i32")
    pointers |= dict.fromkeys(("merge_rows", "merge_indptr", "merge_parts", "num_merges"), "*i32")
    pointers |= {"out": value, "query": value, "qk_scale": "fp32", "softcap": "fp32"}
    if variant.kernel == "attention":
        constants, options = _attention_constants(variant, target)
        cache = value if variant.kv_format == "same" else "*u8"
        return triton_attention.attention_kernel, constants, pointers | {"key_cache": cache, "value_cache": cache}, options
    if variant.kernel == "merge":
        merge_constants = {"VALUE_DIM": 128, "VALUE_WIDTH": 128, "AT_ONCE": 8, "HAS_SINKS": True}
        return triton_attention.merge_kernel, merge_constants, pointers, {"num_warps": 2}
    if variant.kernel == "write":
        words = dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*i16")
        sizes = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "VALUE_DIM": 128, "NUM_KV_HEADS": 8, "KEY_WIDTH": 1024, "VALUE_WIDTH": 1024}
        return triton_cache.write_kernel, sizes, words | {"slots": "*i64"}, {"num_warps": 4}
    arguments = dict.fromkeys(("addresses", "row_words", "copies"), "*i64")
    return (
        triton_cache.copy_kernel,
        {"BLOCK_SIZE": 16, "AT_ONCE": 1024, "WORD": tl.int32, "ALIGN": 4},
        arguments,
        {"num_warps": 4},
    )


def _attention_constants(variant: Variant, target: str) -> tuple[dict[str, Any], dict[str, int]]:
    family = _family(target)
    widest = max(variant.head_dim, variant.value_dim)
    tile = triton_config.tiles(family, variant.dtype, widest, 132)[variant.prefill]
    constants = {
        **{"NUM_HEADS": 32, "GROUP": 4, "BLOCK_SIZE": 16, "ROWS": tile.max_rows, "KV_TILE": tile.kv_tokens},
        **{"HEAD_DIM": variant.head_dim, "KEY_WIDTH": 1 << (variant.head_dim - 1).bit_length()},
        **{"VALUE_DIM": variant.value_dim, "VALUE_WIDTH": 1 << (variant.value_dim - 1).bit_length()},
        **dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SCALES"), variant.masks),
        **{"KV_FORMAT": variant.kv_format, "FP32_PRECISION": triton_config.fp32_precision(family)},
    }
    is_8_bit = variant.kv_format != "same"
    options = triton_config.launch_options(family, variant.dtype, rows=tile.max_rows, head_dim=widest, is_8_bit=is_8_bit)
    return constants, options


def _read_cubin(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, flag, file], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": used["REG"],
        "spilled_bytes": used["STACK"] + used["LOCAL"] + len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "matrix_instructions": len(re.findall(r"\b(?:HMMA|HGMMA|UTCHMMA)\b", code)),
        "wide_loads": len(re.findall(r"\b(?:LDG|LDGSTS)\.\S*\b128\b", code)),
    }


def _read_amdgcn(code: str) -> dict[str, int]:
    counts = {name: int(number) for name, number in re.findall(r"^\s*\.(\w+):\s+(\d+)$", code, re.MULTILINE)}
    return {
        "registers": counts["vgpr_count"],
        "spilled_bytes": counts["private_segment_fixed_size"] + 4 * counts["vgpr_spill_count"],
        "matrix_instructions": len(re.findall(r"\bv_mfma", code)),
        "wide_loads": len(re.findall(r"\b(?:global|buffer)_load_dwordx4", code)),
    }


def main() -> int:
    """Compile, print a table, and return 1 if a rule is broken."""
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported, which is when it decides
    import triton

    parser = argparse.ArgumentParser(
        prog="python -m chatpage_kernels.aot", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--core", action="store_true", help="only the variants that most models use")
    parser.add_argument("--json", type=Path, help="write the reports to this file")
    arguments = parser.parse_args()
    reports = compile_all(CORE if arguments.core else ALL, arguments.targets)
    print(f"{'variant':32} {'target':8} {'registers':>9} {'shared':>8} {'matrix':>7} {'16-byte loads':>13}")
    for report in reports:
        numbers = f"{report.registers:9} {report.shared_bytes:8} {report.matrix_instructions:7} {report.wide_loads:13}"
        print(f"{report.variant:32} {report.target:8} {numbers}")
    if arguments.json:
        rows = ",\n".join(json.dumps(asdict(report)) for report in reports)
        arguments.json.write_text(f'{{"triton": "{triton.__version__}", "reports": [\n{rows}\n]}}\n')
    complaints = [complaint for report in reports for complaint in report.complaints()]
    print("\n".join(complaints) or f"{len(reports)} compiled; no spills, all in the limits")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
