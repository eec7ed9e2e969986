"""Choosing a backend never waits, names its reason, and leads to the best one in the end."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import chatpage_kernels
from chatpage_kernels import reference, select_backend
from chatpage_kernels.backend import Backend
from chatpage_kernels.cpu import build
from tests.kernels.steps import Heads, Step, Tensors, attend, dense_attention, make_tensors

PYTHON = "import sys; sys.path.insert(0, {!r}); import chatpage_kernels; {}"


def test_importing_starts_nothing() -> None:
    """Importing triton takes a second, and on a machine without a GPU it is never needed."""
    check = "sys.exit(sorted({'triton', 'setuptools', 'torch.utils.cpp_extension'} & sys.modules.keys()) or None)"
    code = PYTHON.format(str(Path(chatpage_kernels.__file__).parents[1]), check)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_device_without_kernels_gets_the_reference_and_the_reason() -> None:
    backend = select_backend("meta", torch.float32, head_dim=64)
    assert backend.name == "reference"
    assert "no kernels for meta" in backend.reason
    assert backend.successor() is None


def test_until_the_kernels_are_built_torch_computes_and_the_successor_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer of a fresh machine must not wait a minute for a compiler."""
    built: list[Backend] = []
    monkeypatch.setattr(build, "start", lambda: None)
    monkeypatch.setattr(build, "describe", lambda: "the C++ kernels are being built")
    monkeypatch.setattr("chatpage_kernels.cpu.backend", lambda dtype, *, head_dim, kv_dtype: built[0] if built else None)
    backend = select_backend("cpu", torch.float32, head_dim=64)
    assert (backend.name, backend.reason) == ("reference", "the C++ kernels are being built")
    assert backend.successor() is None
    built.append(select_backend("meta", torch.float32, head_dim=64))
    assert backend.successor() is built[0]
    assert select_backend("cpu", torch.float32, head_dim=64) is built[0]


def test_few_rows_get_the_decode_tile_and_many_the_prefill_tile() -> None:
    backend = select_backend("meta", torch.float32, head_dim=64)
    assert backend.tile_for(1, 3) is backend.tile
    assert backend.tile_for(reference.TILE.max_rows + 1, 1) is backend.prefill_tile


def test_the_backend_of_this_machine_writes_attends_and_copies() -> None:
    """The three functions belong together: a backend may keep keys its own way, so only its own functions may touch them."""
    backend = select_backend("cpu", torch.float32, head_dim=16)
    step = Step(np.array([0, 5], np.int32), np.array([5], np.int32), np.array([[1]], np.int32), 16)
    plain = make_tensors(step, Heads(1, 1))
    expected = dense_attention(step, plain, scale=0.25).float()
    key_cache, value_cache = torch.zeros(4, 16, 1, 16), torch.zeros(4, 16, 1, 16)
    backend.write_kv(plain.key_cache[1, :5], plain.value_cache[1, :5], key_cache, value_cache, torch.arange(16, 21))
    backend.copy_blocks([key_cache, value_cache], torch.tensor([[1, 3, 5]]))
    tensors = Tensors(plain.query, key_cache, value_cache)
    for block in (1, 3):
        step.block_tables[:] = block
        torch.testing.assert_close(attend(backend.paged_attention, step, tensors, backend.tile, scale=0.25), expected)
