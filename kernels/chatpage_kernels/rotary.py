"""Norms of heads and rotation by position in plain torch: the oracle of the C++ kernel, and what runs without it."""

import torch


def rotary_table(frequencies: torch.Tensor, num_positions: int, factor: float = 1.0) -> torch.Tensor:
    """Return cosines and sines of every position.

    Args:
        frequencies: [rotary_dim / 2] radians per position.
        num_positions: Positions from 0.
        factor: Of all cosines and sines (YaRN).

    Returns:
        fp32 [num_positions, rotary_dim]: rotary_dim / 2 cosines, then as many sines.
    """
    # In fp64: position times frequency loses the angle in fp32 from some ten thousand positions on.
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies.double()
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * factor).float()


def rotate(
    heads: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    norm: torch.Tensor | None = None,
    norm_epsilon: float = 1e-5,
) -> torch.Tensor:
    """Rotate heads by their positions, in fp32.

    Args:
        heads: [num_tokens, num_heads, head_dim].
        positions: int64 [num_tokens], rows of `table`.
        table: From `rotary_table`. Dims d and d + rotary_dim / 2 form a pair; those behind rotary_dim stay.
        norm: fp32 [head_dim]: each head goes through RMSNorm first.
        norm_epsilon: Of the norm.

    Returns:
        fp32 of heads' shape.
    """
    heads = heads.float()
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(2, keepdim=True) + norm_epsilon) * norm
    half = table.shape[1] // 2
    cosine, sine = table[positions][:, None].split(half, dim=2)
    first, second, rest = heads.split([half, half, heads.shape[2] - 2 * half], dim=2)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=2)
