"""Finds out, at load and on the loaded weights, whether paged attention computes what the model's own attention computes.

Models ignore an attention hook silently, call it from some layers only, or keep part of their meaning in a mask or a state that
the hook never sees; each would answer fluently and wrongly. Invariant: a model passes only if every layer called the hook
exactly once, and its logits over the KV cache equal those of its own eager attention:

    sequence 0   [ chunk 1 | chunk 2 .... )        two sequences in one batch: neighbours must not matter
    sequence 1   [ chunk 1 ....... | chunk 2 )     two chunks: nothing but keys and values may carry over
    sequence 2   [ longer than the window )        if the model has a small sliding window
    blocks in no order, and every row that nobody wrote is NaN

Both run on the same weights: the implementation is switched on the module, never loaded twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from chatpage.engine.attention import IMPLEMENTATION, RecordingStep, UnsupportedAttentionError, attention_step
from chatpage.engine.batch import Batch, BatchRow, build_batch
from chatpage.engine.kv_cache import KvCache, LayerSpec
from chatpage.engine.models.architecture import refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Forward = Callable[[Batch, KvCache], torch.Tensor]

_LENGTHS = ((5, 8), (9, 13))  # first and second chunk of the sequences
_MAX_PROBED_WINDOW = 512
_BLOCK_SIZE = 16
_TRACE_LEN = 4


def trace_layers(model: "PreTrainedModel", *, max_len: int) -> tuple[LayerSpec, ...]:
    """Run a few tokens through the model to learn what every attention layer asks for.

    Args:
        model: Loaded with our attention.
        max_len: Longest sequence of the model; a window of this size changes nothing.

    Raises:
        UnsupportedModelError: A layer did not call the hook, called it twice, or asks for what the kernels do not do.
    """
    config, step = model.config, RecordingStep()
    ids = _tokens(_TRACE_LEN, 0, model)[None]
    try:
        with torch.inference_mode(), attention_step(step):
            model(input_ids=ids, position_ids=torch.arange(_TRACE_LEN, device=model.device)[None], use_cache=False)
    except UnsupportedAttentionError as error:
        raise refusal(config, str(error)) from error
    except Exception as error:
        raise refusal(config, f"it fails under another attention ({type(error).__name__}: {error})") from error
    specs = dict(step.layers)
    num_layers = max(int(config.get_text_config().num_hidden_layers), len(specs))
    if not step.layers:
        raise refusal(config, "it computes its attention itself and ignores the hook for another one")
    if len(step.layers) != len(specs):
        raise refusal(config, f"its {len(specs)} layers call their attention {len(step.layers)} times for one pass")
    if sorted(specs) != list(range(num_layers)):
        raise refusal(
            config, f"only {len(specs)} of its {num_layers} layers have attention; the others keep a state of their own"
        )
    _check_windows(model, specs, max_len)
    return tuple(specs[layer] for layer in range(num_layers))


def compare_with_eager(
    model: "PreTrainedModel", forward: Forward, specs: Sequence[LayerSpec], *, dtype: torch.dtype, max_len: int
) -> int:
    """Compare paged with eager logits and return the width of the logits.

    Args:
        model: Loaded with our attention; it has it again afterwards.
        forward: The pass over the KV cache that will serve requests.
        specs: From `trace_layers`.
        dtype: Of weights and KV cache; the comparison is as strict as its rounding allows.
        max_len: Longest sequence of the model; the probe stays below it.

    Raises:
        UnsupportedModelError: They differ.
    """
    lengths = [(min(first, max_len // 2), min(second, max_len - max_len // 2)) for first, second in _LENGTHS]
    small = max((spec.window for spec in specs if spec.window <= _MAX_PROBED_WINDOW), default=0)
    if sum(_LENGTHS[-1]) - 4 < small < max_len - 8:
        lengths.append((small // 2, small - small // 2 + 8))
    sequences = [_tokens(sum(chunks), seed, model) for seed, chunks in enumerate(lengths)]
    with torch.inference_mode():
        expected = torch.cat(_eager_logits(model, sequences))
        cuts = [first for first, _ in lengths]
        actual = torch.cat(paged_logits(forward, specs, sequences, cuts=cuts, dtype=dtype, device=model.device))
    error = (actual - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-30)
    if not _is_close(error, dtype):
        worst = f"{error.max():.1e} ({torch.finfo(dtype).eps:.0e} is the rounding of {dtype})"
        raise refusal(
            model.config,
            f"its logits differ from those of its own attention by {worst}: part of what it does lives in a mask or a state "
            "that paged attention never sees",
        )
    return expected.shape[-1]


def _is_close(error: torch.Tensor, dtype: torch.dtype) -> bool:
    """Judge relative errors of logit rows.

    In float32 both agree to rounding, over all layers. In half types rounding grows with depth, and a router may send a token
    to another expert, so single rows may be far off while most must agree; wrong attention moves them all.
    """
    if torch.isnan(error).any():
        return False
    if dtype == torch.float32:
        return bool(error.max() < 1e-3)
    return bool(error.median() < 0.1)


def _check_windows(model: "PreTrainedModel", specs: dict[int, LayerSpec], max_len: int) -> None:
    """Refuse a sliding window that only the mask knows; it may be far too long for a probe to reach."""
    text = model.config.get_text_config()
    stated = getattr(text, "sliding_window", None)
    if not stated or stated >= max_len:
        return
    reason = f"its sliding window of {stated} tokens is only in its mask (up to --max-model-len {stated} it is exact)"
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind == "sliding_attention" and not specs[layer].window:
            raise refusal(model.config, reason)
    if not any(spec.window for spec in specs.values()):
        ids = [_tokens(sum(_LENGTHS[-1]), 0, model)]
        with torch.inference_mode():
            (plain,) = _eager_logits(model, ids)
            try:
                text.sliding_window = 2
                (narrow,) = _eager_logits(model, ids)
            finally:
                text.sliding_window = stated
        if not torch.equal(plain, narrow):
            raise refusal(model.config, reason)


def _tokens(count: int, seed: int, model: "PreTrainedModel") -> torch.Tensor:
    """Ordinary tokens: the first thousand after the usual special ones."""
    high = min(int(model.config.get_text_config().vocab_size), 1000)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(min(3, high - 1), high, (count,), generator=generator).to(model.device)


def _eager_logits(model: "PreTrainedModel", sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with _implementation(model, "eager"):
        return [model(input_ids=ids[None], use_cache=False).logits[0].float() for ids in sequences]


@contextmanager
def _implementation(model: "PreTrainedModel", name: str) -> Iterator[None]:
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def paged_logits(
    forward: Forward,
    specs: Sequence[LayerSpec],
    sequences: Sequence[torch.Tensor],
    *,
    cuts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Compute all sequences together in two steps; return the logits of every token, per sequence.

    Args:
        forward: A pass over a KV cache.
        specs: Of the layers.
        sequences: int64 token ids of each sequence.
        cuts: Of each sequence, how many tokens belong to the first step.
        dtype: Of the KV cache.
        device: Where the model computes.
    """
    num_blocks = [-(-len(ids) // _BLOCK_SIZE) for ids in sequences]
    cache = KvCache(specs, num_blocks=sum(num_blocks), block_size=_BLOCK_SIZE, dtype=dtype, device=device)
    cache.poison()
    free = list(range(1, sum(num_blocks), 2)) + list(range(0, sum(num_blocks), 2))
    tables = [[free.pop() for _ in range(count)] for count in num_blocks]
    steps = [[(0, cut) for cut in cuts], [(cut, len(ids)) for cut, ids in zip(cuts, sequences, strict=True)]]
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for spans in steps:
        rows = [_row(ids, table, *span) for ids, table, span in zip(sequences, tables, spans, strict=True)]
        batch = build_batch(rows, device)
        batch = replace(batch, logit_rows=torch.arange(batch.num_tokens, device=device))
        logits = forward(batch, cache).split([stop - start for start, stop in spans])
        for part, of_sequence in zip(parts, logits, strict=True):
            part.append(of_sequence)
    return [torch.cat(part) for part in parts]


def _row(ids: torch.Tensor, table: list[int], start: int, stop: int) -> BatchRow:
    slots = [table[pos // _BLOCK_SIZE] * _BLOCK_SIZE + pos % _BLOCK_SIZE for pos in range(start, stop)]
    return BatchRow(ids[start:stop].tolist(), start, table, slots, wants_logits=True)
