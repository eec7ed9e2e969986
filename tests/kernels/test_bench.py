"""The benchmark measures only what it has checked, and says what it could not measure."""

import json
from pathlib import Path

import pytest
import torch

from chatpage_kernels import bench, bench_peers
from chatpage_kernels.bench_cases import CPU_GRID, GPU_GRID, TINY_GRID, TINY_MODEL, Case, make_inputs
from chatpage_kernels.bench_peers import Contender


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run_checks_and_writes_every_case(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert bench.main(["--device", device, "--dry-run", "--rounds", "1", "--json", str(report)]) == 0
    written = json.loads(report.read_text())
    assert {row["case"] for row in written["rows"]} == {case.name for case in TINY_GRID}
    assert all(row["microseconds"] > 0 for row in written["rows"])
    assert written["dry_run"]
    assert written["backend"] == "triton" or device == "cpu"
    assert capsys.readouterr().out.count("SDPA, contiguous") == len(TINY_GRID)


def test_a_wrong_result_is_not_measured() -> None:
    exact = torch.ones(2, 3)
    bench._check(Contender("right", lambda i: exact + 1e-4 * i), exact, 1e-3)
    with pytest.raises(SystemExit, match=r"wrong is wrong by 5.00e-01"):
        bench._check(Contender("wrong", lambda _: exact + 0.5), exact, 1e-3)
    with pytest.raises(SystemExit, match="nan"):
        bench._check(Contender("poisoned", lambda _: exact * torch.nan), exact, 1e-3)


def test_shared_blocks_are_read_once() -> None:
    backend = bench._backend(TINY_MODEL, torch.device("cpu"))
    alone, shared = (
        make_inputs(Case("", 3, 64, 1, num_shared), TINY_MODEL, backend, torch.device("cpu"), flush_bytes=0)
        for num_shared in (0, 48)
    )
    row = 2 * TINY_MODEL.head_dim * 4
    queries = 3 * TINY_MODEL.num_q_heads
    assert alone.num_bytes == row * (3 * 64 * TINY_MODEL.num_kv_heads + queries)
    assert shared.num_bytes == row * ((48 + 3 * 16) * TINY_MODEL.num_kv_heads + queries)
    assert alone.num_flops == shared.num_flops == 4 * 3 * 64 * TINY_MODEL.num_q_heads * TINY_MODEL.head_dim


def test_a_contender_that_cannot_run_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(inputs: object) -> None:
        raise bench_peers.Unavailable("not today")

    monkeypatch.setattr(bench_peers, "_gathered_sdpa", missing)
    backend = bench._backend(TINY_MODEL, torch.device("cpu"))
    inputs = make_inputs(TINY_GRID[0], TINY_MODEL, backend, torch.device("cpu"), flush_bytes=0)
    assert ("gather + SDPA", "not today") in list(bench_peers.peers(inputs, with_flex=False))


def test_case_names_tell_cases_apart() -> None:
    for grid in (CPU_GRID, GPU_GRID, TINY_GRID):
        assert len({case.name for case in grid}) == len(grid)
