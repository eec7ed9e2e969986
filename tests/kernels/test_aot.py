"""The kernels compile for every GPU without one: no spills, memory in the limits, and the numbers of the last release.

Compiled in a process of its own: this one interprets kernels. After a change that means to alter the numbers, write them anew
with `python -m chatpage_kernels.aot --json tests/kernels/aot_snapshot.json`.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import chatpage_kernels
from chatpage_kernels.aot import ALL, CORE, TARGETS, Report, Variant, compile_variant

SNAPSHOT = json.loads((Path(__file__).parent / "aot_snapshot.json").read_text())
GOOD = Report(
    "decode bf16 64x64", "sm_90", registers=80, spilled_bytes=0, shared_bytes=20_000, matrix_instructions=48, wide_loads=33
)


def _by_name(reports: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(report["variant"], report["target"]): report for report in reports}


@pytest.mark.timeout(1200)
def test_what_most_models_use_compiles_for_every_gpu_as_before(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(chatpage_kernels.__file__).parents[1])
    command = [sys.executable, "-m", "chatpage_kernels.aot", "--core", "--json", str(tmp_path / "reports.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = _by_name(json.loads((tmp_path / "reports.json").read_text())["reports"])
    assert len(reports) == len(CORE) * len(TARGETS)
    if triton.__version__ == SNAPSHOT["triton"]:  # another compiler may choose other registers, within the rules
        assert reports == {key: _by_name(SNAPSHOT["reports"])[key] for key in reports}


def test_the_snapshot_has_every_variant_for_every_gpu_and_no_complaint() -> None:
    names = {(variant.name, target) for variant in ALL for target in TARGETS}
    assert len(names) == len(ALL) * len(TARGETS)
    assert _by_name(SNAPSHOT["reports"]).keys() == names
    assert [complaint for report in SNAPSHOT["reports"] for complaint in Report(**report).complaints()] == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"spilled_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": 232_449}, "needs 232449 of 232448 bytes"),
        ({"target": "sm_86", "shared_bytes": 150_000}, "needs 150000 of 101376 bytes"),
        ({"matrix_instructions": 0}, "no matrix instruction"),
        ({"wide_loads": 0}, "16 bytes"),
    ],
)
def test_a_broken_rule_is_a_complaint(change: dict[str, Any], complaint: str) -> None:
    assert GOOD.complaints() == []
    (found,) = dataclasses.replace(GOOD, **change).complaints()
    assert complaint in found


def test_a_process_that_interprets_cannot_compile() -> None:
    """A check that compiled nothing would pass for ever."""
    if not triton.knobs.runtime.interpret:
        pytest.skip("this run tests compiled kernels")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_variant(Variant("attention", torch.float16), "sm_90")
