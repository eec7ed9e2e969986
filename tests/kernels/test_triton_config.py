"""The Triton backend says what it cannot serve, and gives each kind of GPU tiles its matrix units take."""

import pytest
import torch

from chatpage_kernels.triton_config import family_of, family_of_device, launch_options, tiles, why_unsupported


def test_what_the_kernels_cannot_do_is_refused_with_a_reason() -> None:
    assert why_unsupported(torch.bfloat16, torch.float8_e5m2, 128, 128, capability=(9, 0)) is None
    assert "float64" in str(why_unsupported(torch.float64, torch.float64, 64, 64))
    assert "not 512" in str(why_unsupported(torch.float16, torch.float16, 512, 64))
    assert "7.5" in str(why_unsupported(torch.float16, torch.float16, 64, 64, capability=(7, 5)))


def test_gpus_are_told_apart_by_their_matrix_units() -> None:
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert [family_of(c, is_hip=False) for c in capabilities] == ["mma", "mma", "mma", "wgmma", "wgmma", "mma"]
    assert family_of((9, 4), is_hip=True) == "mfma"
    assert family_of_device(torch.device("cpu")) == "mma"


@pytest.mark.parametrize("family", ["mma", "wgmma", "mfma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_tiles_are_powers_of_two_that_a_matrix_product_takes(family: str, dtype: torch.dtype, head_dim: int) -> None:
    for tile in tiles(family, dtype, head_dim, 132):  # type: ignore[arg-type]
        assert tile.num_workers == 264
        for size in (tile.max_rows, tile.kv_tokens):
            assert size >= 16
            assert size & (size - 1) == 0
        options = launch_options(family, dtype, rows=tile.max_rows, head_dim=head_dim, is_8_bit=False)  # type: ignore[arg-type]
        assert options["num_warps"] in (4, 8)
