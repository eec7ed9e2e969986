"""Huge pages change how fast memory is found, and nothing else."""

import sys

import pytest
import torch

from chatpage_kernels.cpu import huge_pages


def test_advice_changes_no_value() -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float64)
    huge_pages.advise(tensor)
    assert torch.equal(tensor, torch.arange(1 << 20, dtype=torch.float64))


@pytest.mark.parametrize(
    "tensor", [torch.empty(0), torch.zeros(1000), torch.zeros(4000, 1000).t()], ids=["none", "small", "strided"]
)
def test_memory_that_is_not_wholly_the_tensors_is_left_alone(tensor: torch.Tensor) -> None:
    assert not huge_pages.advise(tensor)


def test_other_systems_take_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not huge_pages.advise(torch.empty(1 << 22))
