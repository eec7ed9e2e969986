"""The cache takes the memory it was given, copies rows exactly, and changes its kernels without losing a row."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from chatpage.engine import kv_cache, memory_limits
from chatpage.engine.batch import BatchRow, build_batch
from chatpage.engine.block_pool import BlockCopy, BlockId
from chatpage.engine.kv_cache import KvCache, LayerSpec, backend_for, bytes_per_block, num_blocks_for
from chatpage.errors import ConfigError
from chatpage_kernels.backend import Backend
from tests.engine.model_driving import CPU, reference_backend

SPECS = (LayerSpec(2, 8, 6), LayerSpec(1, 16, 16, window=5))
GIB = 2**30


def _cache(backend: Backend | None = None) -> KvCache:
    return KvCache(SPECS, num_blocks=6, block_size=4, dtype=torch.float32, device=CPU, backend=backend or reference_backend())


def test_bytes_count_keys_and_values_of_every_layer() -> None:
    assert bytes_per_block(SPECS, 4, torch.bfloat16) == (2 * (8 + 6) + 1 * 32) * 4 * 2
    cache = _cache()
    held = sum(tensor.numel() * tensor.itemsize for layer in cache.layers for tensor in layer)
    assert held == cache.num_blocks * cache.bytes_per_block


def test_a_copy_moves_the_filled_rows_of_every_layer_and_nothing_else() -> None:
    cache = _cache()
    cache.poison()
    for layer in cache.layers:
        for tensor in layer:
            tensor[2] = torch.randn_like(tensor[2])
            tensor[4] = 7.0
    cache.copy([BlockCopy(BlockId(2), BlockId(4), 3)])
    for layer in cache.layers:
        for tensor in layer:
            assert torch.equal(tensor[4, :3], tensor[2, :3])
            assert (tensor[4, 3] == 7.0).all()
            assert tensor[5].isnan().all()


def test_no_copies_are_fine() -> None:
    _cache().copy([])


def test_blocks_leave_and_come_back_byte_for_byte() -> None:
    cache = _cache()
    for layer in cache.layers:
        for tensor in layer:
            tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for layer in cache.layers for tensor in layer]
    rows = cache.read_blocks([5, 2])
    assert rows.shape == (2, cache.bytes_per_block)
    cache.write_blocks([1, 5], list(rows))
    cache.clear_block(3)
    for old, new in zip(before, (tensor for layer in cache.layers for tensor in layer), strict=True):
        assert torch.equal(new[1], old[5])
        assert torch.equal(new[5], old[2])
        assert not new[3].any()
        assert all(torch.equal(new[i], old[i]) for i in (0, 2, 4))


def test_a_block_that_came_from_elsewhere_is_converted_with_the_others() -> None:
    """Loaded blocks were never written by a step, and would have kept the layout of the backend before."""
    converted: list[int] = []
    better = replace(reference_backend(), name="better", convert_cache=lambda keys, _: converted.append(keys.shape[0]))
    cache = _cache(replace(reference_backend(), successor=lambda: better))
    cache.write_blocks([4], list(cache.read_blocks([0])))
    layout = cache.layout
    cache.begin_step(build_batch([BatchRow([1], 0, [0], [0], wants_logits=True)], CPU))
    assert converted == [5, 5]
    assert cache.layout != layout


@pytest.fixture
def ten_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 10 * GIB)


@pytest.mark.usefixtures("ten_gib")
def test_the_default_is_a_share_of_what_is_available_and_never_more_than_useful() -> None:
    mib = 2**20
    assert num_blocks_for(mib, CPU, kv_memory=None, max_useful=10**6) == 3072
    assert num_blocks_for(mib, CPU, kv_memory=None, max_useful=100) == 100
    assert num_blocks_for(mib, CPU, kv_memory=5 * GIB, max_useful=100) == 5 * 1024


def test_a_cpu_gives_four_gib_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 100 * GIB)
    assert num_blocks_for(2**20, CPU, kv_memory=None, max_useful=10**6) == 4096
    assert num_blocks_for(2**20, torch.device("cuda"), kv_memory=None, max_useful=10**6) == 30 * 1024


@pytest.mark.usefixtures("ten_gib")
def test_too_little_memory_is_an_error_with_numbers_and_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"Only 3 KV blocks fit into 3\.5 MiB .* --kv-memory 8MiB"):
        num_blocks_for(2**20, CPU, kv_memory=int(3.5 * 2**20), max_useful=100)
    with pytest.raises(ConfigError, match=r"Only 3 KV blocks .*30% of the 10,240\.0 MiB available on cpu"):
        num_blocks_for(GIB, CPU, kv_memory=None, max_useful=100)
    with pytest.raises(ConfigError, match=r"kv_memory is 11,264\.0 MiB, but only 10,240\.0 MiB are available"):
        num_blocks_for(2**20, CPU, kv_memory=11 * GIB, max_useful=100)


def test_memory_of_control_groups_counts_from_the_innermost_to_the_root(tmp_path: Path) -> None:
    """A container with 2 GiB on a machine with 256 took a share of 256 and was killed."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("5\n")
    (inner.parent / "memory.max").write_text("1000\n")
    (inner.parent / "memory.current").write_text("700\n")
    (inner.parent / "memory.stat").write_text("anon 300\ninactive_file 200\nactive_file 100\n")
    assert min(memory_limits._cgroup_memory(tmp_path, "/outer/inner")) == 500
    assert min(memory_limits._cgroup_memory(tmp_path, "/")) == 2**62


def test_memory_of_this_machine_is_a_sane_number() -> None:
    assert 2**26 < memory_limits.available_memory(CPU) < 2**50


def test_a_better_backend_takes_over_between_steps_and_keeps_what_was_written() -> None:
    """The kernels of a CPU are compiled behind the first steps; rows written before must survive the change of layout."""
    converted: list[tuple[int, int]] = []

    def convert(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
        converted.append((key_cache.shape[0], value_cache.shape[0]))
        key_cache.neg_()

    answers: list[Backend | None] = []
    first = replace(reference_backend(), successor=lambda: answers.pop() if answers else None)
    better = replace(reference_backend(), name="better", convert_cache=convert)
    cache = _cache(first)
    for key_cache, _ in cache.layers:
        key_cache.fill_(1.0)
    batch = build_batch([BatchRow([1], 7, [0, 3], [15], wants_logits=True)], CPU)
    cache.begin_step(batch)
    assert cache.backend is first
    answers.append(better)
    cache.begin_step(batch)
    assert cache.backend is better
    # Blocks 0 to 3 were touched; 4 and 5 never were, and touching them would take memory for nothing.
    assert converted == [(4, 4), (4, 4)]
    assert [float(key_cache[3].max()) for key_cache, _ in cache.layers] == [-1.0, -1.0]
    assert [float(key_cache[4].min()) for key_cache, _ in cache.layers] == [1.0, 1.0]


def test_layers_of_different_width_get_one_backend_that_serves_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def select(device: torch.device, dtype: torch.dtype, *, head_dim: int, value_dim: int) -> Backend:
        return replace(reference_backend(), name="fast" if head_dim < 100 else "reference")

    monkeypatch.setattr(kv_cache, "select_backend", select)
    assert backend_for(SPECS, torch.float32, CPU).name == "fast"
    assert backend_for((*SPECS, LayerSpec(1, 512, 512)), torch.float32, CPU).name == "reference"
