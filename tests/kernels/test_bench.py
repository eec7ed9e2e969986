"""The benchmark measures only what it has checked, and says what it could not measure."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from chatpage_kernels import bench, bench_chart, bench_peers
from chatpage_kernels.bench_cases import CPU_GRID, GPU_GRID, TINY_GRID, TINY_MODEL, Case, make_inputs
from chatpage_kernels.bench_peers import Contender


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dry_run_checks_and_writes_every_case(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, chart = tmp_path / "report.json", tmp_path / "chart.svg"
    files = ["--json", str(report), "--chart", str(chart)]
    assert bench.main(["--device", device, "--dry-run", "--rounds", "1", *files]) == 0
    written = json.loads(report.read_text())
    assert {row["case"] for row in written["rows"]} == {case.name for case in TINY_GRID}
    assert all(row["microseconds"] > 0 for row in written["rows"])
    assert written["dry_run"]
    assert written["backend"] == "triton" or device == "cpu"
    assert capsys.readouterr().out.count("SDPA, contiguous") == len(TINY_GRID)
    texts = [element.text or "" for element in ElementTree.parse(chart).iter("{http://www.w3.org/2000/svg}text")]
    assert {case.name for case in TINY_GRID} | {row["contender"] for row in written["rows"]} <= set(texts)
    assert sum(text.endswith("TFLOP/s") for text in texts) == len(written["rows"])
    assert "A dry run: its times mean nothing" in texts


def test_what_sharing_is_worth_is_measured_where_something_is_shared(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    bench.main(["--device", "cpu", "--dry-run", "--rounds", "1", "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    apart = [row for row in rows if row["contender"] == "chatpage, nothing shared"]
    assert [row["case"] for row in apart] == [case.name for case in TINY_GRID if case.num_shared]
    assert all(row["speedup_of_ours"] > 0 for row in apart)


def test_plans_with_and_without_sharing_differ_in_sharing_alone() -> None:
    backend = bench._backend(TINY_MODEL, torch.device("cpu"))
    shared, apart = (
        make_inputs(Case("", 3, 300, 1, num_shared), TINY_MODEL, backend, torch.device("cpu"), flush_bytes=0)
        for num_shared in (256, 0)
    )
    rows = [plan.items[:, 1].max() for plan in (shared.plan, shared.plan_apart, apart.plan, apart.plan_apart)]
    assert rows == [3, 1, 1, 1]


def test_a_chart_scales_bars_to_the_slowest_and_escapes_reasons() -> None:
    fast = {"case": "a", "contender": "chatpage (cpp)", "microseconds": 10.0, "gb_s": 8.0, "tflop_s": 0.001}
    slow = {"case": "a", "contender": "SDPA", "microseconds": 40.0, "gb_s": 2.0, "tflop_s": 0.00025}
    absent = {"case": "a", "contender": "FlashInfer", "unavailable": "no <device> & more"}
    report = {"backend": "cpp", "reason": "", "torch": "2", "threads": 2, "dry_run": False, "rows": [fast, slow, absent]}
    root = ElementTree.fromstring(bench_chart.draw(report | {"ceilings": {"gb_s": 16.0, "tflop_s": 1.0}}))
    bars = [float(bar.attrib["width"]) for bar in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert bars[0] * 4 == pytest.approx(bars[1])
    ticks = [float(path.attrib["d"].split()[0][1:]) for path in root.iter("{http://www.w3.org/2000/svg}path")]
    assert ticks[0] == pytest.approx(ticks[1])  # both contenders could take the same time at best
    assert "not measured: no <device> & more" in [element.text for element in root.iter() if element.text]


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
