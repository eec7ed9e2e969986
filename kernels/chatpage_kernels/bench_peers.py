"""What the kernels are compared with: torch on contiguous keys, torch on gathered blocks, flex_attention, FlashInfer.

Invariant: a contender gets its keys in the form it likes best, made outside the measured time (except for the gather, which is
the point of that contender), and must give the same result as the kernels before it is measured.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chatpage_kernels.bench_cases import Inputs, copy_of

_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to compute a case. `run(i)` uses the i-th cache and returns [num_tokens, num_q_heads, head_dim]."""

    name: str
    run: Callable[[int], torch.Tensor]


class Unavailable(Exception):
    """A contender cannot run here; the message says why."""


def peers(inputs: Inputs, *, with_flex: bool) -> Iterator[Contender | tuple[str, str]]:
    """Yield the contenders of a case; for those that cannot run (name, reason)."""
    makers: list[tuple[str, Callable[[Inputs], Callable[[int], torch.Tensor]]]] = [
        ("SDPA, contiguous", _contiguous_sdpa),
        ("gather + SDPA", _gathered_sdpa),
    ]
    if with_flex:
        makers.append(("flex_attention, contiguous", _flex_attention))
    if inputs.query.is_cuda:
        makers.append(("FlashInfer", _flashinfer))
    for name, make in makers:
        try:
            yield Contender(name, make(inputs))
        except Unavailable as error:
            yield name, str(error)


def _attend(inputs: Inputs, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend with torch's own kernel; key and value [num_seqs, num_kv_heads, kv_len, head_dim]."""
    case, model = inputs.case, inputs.model
    group = model.num_q_heads // model.num_kv_heads
    query = inputs.query.view(case.num_seqs, case.q_len, model.num_q_heads, model.head_dim)
    if case.q_len == 1:  # heads that share keys as rows: several times faster than expanded keys
        grouped = query.view(case.num_seqs, model.num_kv_heads, group, model.head_dim)
        return F.scaled_dot_product_attention(grouped, key, value).view(-1, model.num_q_heads, model.head_dim)
    heads = query.transpose(1, 2)
    if case.q_len == case.kv_len:
        out = F.scaled_dot_product_attention(heads, key, value, is_causal=True, enable_gqa=key.shape[1] != heads.shape[1])
    else:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(case.q_len, case.kv_len)
        out = F.scaled_dot_product_attention(heads, key, value, attn_mask=mask, enable_gqa=key.shape[1] != heads.shape[1])
    return out.transpose(1, 2).reshape(-1, model.num_q_heads, model.head_dim)


def _expand(inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    group = inputs.model.num_q_heads // inputs.model.num_kv_heads
    return rows if inputs.case.q_len == 1 else rows.repeat_interleave(group, 1)


def _contiguous_sdpa(inputs: Inputs) -> Callable[[int], torch.Tensor]:
    key, value = (_expand(inputs, inputs.gather(cache)) for cache in inputs.plain)
    copies = [(copy_of(key), copy_of(value)) for _ in inputs.caches]
    return lambda i: _attend(inputs, *copies[i % len(copies)])


def _gathered_sdpa(inputs: Inputs) -> Callable[[int], torch.Tensor]:
    copies = [tuple(copy_of(cache) for cache in inputs.plain) for _ in inputs.caches]

    def run(i: int) -> torch.Tensor:
        key, value = (_expand(inputs, inputs.gather(cache)) for cache in copies[i % len(copies)])
        return _attend(inputs, key, value)

    return run


def _flex_attention(inputs: Inputs) -> Callable[[int], torch.Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, model = inputs.case, inputs.model
    offset = case.kv_len - case.q_len

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        return key <= row + offset

    key, value = (inputs.gather(cache) for cache in inputs.plain)
    copies = [(copy_of(key), copy_of(value)) for _ in inputs.caches]
    query = inputs.query.view(case.num_seqs, case.q_len, model.num_q_heads, model.head_dim).transpose(1, 2)
    try:
        mask = create_block_mask(sees, None, None, case.q_len, case.kv_len, device=query.device)
        compiled = torch.compile(flex_attention, dynamic=False)

        def run(i: int) -> torch.Tensor:
            out = compiled(query, *copies[i % len(copies)], block_mask=mask, enable_gqa=True)
            assert isinstance(out, torch.Tensor)
            return out.transpose(1, 2).reshape(-1, model.num_q_heads, model.head_dim)

        run(0)
    except (RuntimeError, NotImplementedError) as error:  # what its compiler raises where it cannot run
        raise Unavailable(str(error).strip().partition("\n")[0]) from error
    return run


def _flashinfer(inputs: Inputs) -> Callable[[int], torch.Tensor]:
    if importlib.util.find_spec("flashinfer") is None:
        raise Unavailable("not installed")
    flashinfer = importlib.import_module("flashinfer")
    case, model, device = inputs.case, inputs.model, inputs.query.device
    num_blocks = inputs.tables.shape[1]
    starts = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=device)
    last = torch.full((case.num_seqs,), (case.kv_len - 1) % model.block_size + 1, dtype=torch.int32, device=device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    blocks = (starts * num_blocks, inputs.tables.flatten().int(), last)
    heads = (model.num_q_heads, model.num_kv_heads, model.head_dim, model.block_size)
    types = {"q_data_type": model.dtype, "kv_data_type": model.dtype}
    if case.q_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*blocks, *heads, **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(starts * case.q_len, *blocks, *heads, causal=True, **types)
    copies = [tuple(copy_of(cache) for cache in inputs.plain) for _ in inputs.caches]

    def run(i: int) -> torch.Tensor:
        out = wrapper.run(inputs.query, copies[i % len(copies)])
        assert isinstance(out, torch.Tensor)
        return out

    return run
