"""Logits to tokens, for all rows of a step at once, whatever mix of parameters they have.

Invariant: the token of a row is a pure function of its logits, its `SamplingState` and nothing else; batch mates, the order
of rows and repeated calls change nothing, and nothing is changed but what is returned.

Per row:   raw logits -> logit_bias -> penalties -> min_tokens mask -> / temperature -> top_k -> top_p -> min_p -> draw
           `-> log probabilities reported: the model's own, before anything was done to them

Tokens are drawn by inverting the cumulative distribution with one uniform number (`random_numbers`). The order of that
distribution is fixed: by token id where all tokens may be drawn, else from the most to the least likely, equal ones by
token id. top_k, top_p and min_p each keep a head of this second order, so one length says which tokens are left. Heads are
short, so the row is sorted in full only if a head of 4,096 tokens did not settle it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from chatpage.engine import fast_sampling
from chatpage.engine.sampling_state import MIN_TEMPERATURE, Int64Array, SamplingState
from chatpage.errors import EngineStepError
from chatpage.events import TokenLogprob

__all__ = ["InvalidLogitsError", "SampledToken", "SamplingState", "sample"]

_BLOCK = 256  # tokens whose mass is summed before the cumulative sum, which is the slow part
_GROUP = 16  # tokens whose largest logit is taken before looking for the head
_HEADS = (128, 1024, 4096)
_ALTERNATIVES_HEAD = 64  # over the 20 that may be asked, so that ties at its end rarely matter


class InvalidLogitsError(EngineStepError):
    """A row of logits from which no token can be chosen: it holds NaN or +inf, or no finite number at all.

    `is_of_model`: the model gave it so; else the parameters of the request left nothing of it.
    """

    code = "invalid_logits"

    def __init__(self, message: str, row: int, *, is_of_model: bool = True) -> None:
        super().__init__(message)
        self.row = row
        self.is_of_model = is_of_model


SampledToken = TokenLogprob | InvalidLogitsError
_Choice = tuple[list[int], list[float], list[tuple[tuple[int, float], ...]]]  # token or -1, its log probability, alternatives


@torch.inference_mode()
def sample(
    logits: Tensor, states: Sequence[SamplingState], eos_token_ids: frozenset[int], *, rows: Sequence[int] | None = None
) -> list[SampledToken]:
    """Choose the next token of every sequence. The states are read only; `append` the tokens to them afterwards.

    Args:
        logits: float32 `[num_rows, vocab_size]`. -inf rules a token out; NaN and +inf are errors.
        states: One per sequence.
        eos_token_ids: The end tokens of the model, held off until `min_tokens` tokens exist.
        rows: Row of `logits` of each state; several states may share one. Default: state i reads row i.

    Returns:
        Per state the token, its log probability under the model, and `params.logprobs` alternatives, likeliest first; or,
        in its place, the error of a row that holds no distribution, so that one bad sequence does not end its batch mates.
    """
    if not states:
        return []
    rows = _check_rows(logits, len(states), rows)
    choose = _choose_in_cpp if fast_sampling.is_ready(logits) else _choose_in_torch
    tokens, logprobs, alternatives = choose(logits, rows, states, eos_token_ids)
    return [
        _invalid(row, len(states)) if token_id < 0 else TokenLogprob(token_id, logprob, others)
        for row, (token_id, logprob, others) in enumerate(zip(tokens, logprobs, alternatives, strict=True))
    ]


def _choose_in_cpp(
    logits: Tensor, rows: Sequence[int], states: Sequence[SamplingState], eos_token_ids: frozenset[int]
) -> _Choice:
    has_edits = any(state.has_edits for state in states)
    edited = _edit(_state_rows(logits, rows), states, eos_token_ids) if has_edits else None
    tokens, logprobs = fast_sampling.choose(logits, edited, rows, states)
    if not any(state.params.logprobs for state in states):
        return tokens, logprobs, [()] * len(states)
    raw, _, _ = _without_bad_rows(_state_rows(logits, rows))
    exact = raw.log_softmax(-1)
    for row, (state, token) in enumerate(zip(states, tokens, strict=True)):
        if state.params.logprobs and token >= 0:
            logprobs[row] = float(exact[row, token])  # to the last bit what it is among the alternatives
    return tokens, logprobs, _alternatives(exact, states)


def _choose_in_torch(
    logits: Tensor, rows: Sequence[int], states: Sequence[SamplingState], eos_token_ids: frozenset[int]
) -> _Choice:
    raw, raw_max, is_bad = _without_bad_rows(_state_rows(logits, rows))
    work = _edit(raw, states, eos_token_ids)
    if work is raw:
        work_max = raw_max
    else:
        work, work_max, is_bad_work = _without_bad_rows(work)
        is_bad |= is_bad_work
    tokens = _choose(work, work_max, states)
    logprobs = raw.log_softmax(-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.masked_fill(is_bad, -1).tolist(), chosen.tolist(), _alternatives(logprobs, states)


def _invalid(row: int, num_rows: int) -> InvalidLogitsError:
    return InvalidLogitsError(
        f"No token can be chosen from row {row} of {num_rows}: its logits hold NaN or infinity, or rule out every token.", row
    )


def _check_rows(logits: Tensor, num_states: int, rows: Sequence[int] | None) -> Sequence[int]:
    if logits.ndim != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32 [num_rows, vocab_size], got {logits.dtype} {tuple(logits.shape)}.")
    if rows is None:
        rows = range(num_states)
    if len(rows) != num_states:
        raise ValueError(f"rows names {len(rows)} rows for {num_states} states; give one per state.")
    return rows


def _state_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    if list(rows) == list(range(logits.shape[0])):
        return logits.contiguous()
    return logits[torch.tensor(list(rows), device=logits.device)]


def _without_bad_rows(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits with bad rows replaced by zeros, the largest logit per row, and which rows are bad."""
    largest = logits.amax(-1)  # hands on a NaN, so this one number tells about the whole row
    is_bad = ~largest.isfinite()
    if is_bad.any():
        logits = logits.masked_fill(is_bad[:, None], 0.0)
        largest = largest.masked_fill(is_bad, 0.0)
    return logits, largest, is_bad


def _edit(raw: Tensor, states: Sequence[SamplingState], eos_token_ids: frozenset[int]) -> Tensor:
    """Return the logits after bias, penalties and the min_tokens mask: `raw` itself if no state asks for any."""
    edited = [row for row, state in enumerate(states) if state.has_edits]
    if not edited:
        return raw
    work = raw.clone()
    flat = work.view(-1)
    vocab_size = work.shape[1]
    _add_bias(flat, vocab_size, [(row, states[row]) for row in edited if len(states[row].bias_ids)])
    _penalise(flat, vocab_size, [(row, states[row]) for row in edited if states[row].token_counts is not None])
    masks = [
        row * vocab_size + np.array(sorted(eos_token_ids.union(states[row].params.stop_token_ids)), dtype=np.int64)
        for row in edited
        if states[row].holds_off_end
    ]
    if masks:
        flat[_index(masks, flat)] = -torch.inf
    return work


def _add_bias(flat: Tensor, vocab_size: int, edits: Sequence[tuple[int, SamplingState]]) -> None:
    if edits:
        index = _index([row * vocab_size + state.bias_ids for row, state in edits], flat)
        flat[index] += torch.from_numpy(np.concatenate([state.bias_values for _, state in edits])).to(flat.device)


def _penalise(flat: Tensor, vocab_size: int, edits: Sequence[tuple[int, SamplingState]]) -> None:
    """Apply the repetition penalty (Keskar et al. 2019, eq. 2; sign-aware as in transformers), then presence and frequency."""
    counted = [(row, state.params, state.token_counts) for row, state in edits if state.token_counts is not None]
    if not counted:
        return
    index = _index([row * vocab_size + counts.token_ids for row, _, counts in counted], flat)
    sizes = [len(counts.token_ids) for _, _, counts in counted]

    def per_token(values: Iterable[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.fromiter(values, np.float32, len(sizes)), sizes)).to(flat.device)

    times = torch.from_numpy(np.concatenate([counts.counts for _, _, counts in counted])).to(flat.device)
    repetition = per_token(params.repetition_penalty for _, params, _ in counted)
    score = flat[index]
    score = torch.where(score < 0, score * repetition, score / repetition)
    score -= per_token(params.presence_penalty for _, params, _ in counted) * (times > 0)
    score -= per_token(params.frequency_penalty for _, params, _ in counted) * times
    flat[index] = score


def _index(parts: Sequence[Int64Array], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(like.device)


def _choose(work: Tensor, work_max: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Choose one token per row, int64 `[num_states]`: greedy, drawn from all tokens, or drawn from a head."""
    tokens = torch.empty(len(states), dtype=torch.int64, device=work.device)
    kinds: dict[bool | None, list[int]] = {}
    for row, state in enumerate(states):
        params = state.params
        kinds.setdefault(None if params.is_greedy else params.top_k > 0 or params.top_p < 1.0, []).append(row)
    for is_head, members in kinds.items():
        everyone = len(members) == len(states)
        index = torch.tensor(members, device=work.device)
        part = work if everyone else work[index]
        if is_head is None:
            tokens[index] = part.argmax(-1)  # the first of equal ones
            continue
        chosen = [states[row] for row in members]
        temperature = _column([max(state.params.temperature, MIN_TEMPERATURE) for state in chosen], part)
        # Largest first made 0, so that no temperature can overflow.
        scaled = (part - work_max[index, None]).div_(temperature.float())
        draws = _column([state.uniform() for state in chosen], part)
        tokens[index] = (_draw_from_head if is_head else _draw_from_all)(scaled, chosen, draws)
    return tokens


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _draw_from_all(scaled: Tensor, states: Sequence[SamplingState], draws: Tensor) -> Tensor:
    """Draw in the order of token ids from scaled logits `[num_rows, vocab_size]`; min_p is a threshold and needs no order."""
    probs = scaled.softmax(-1)
    if any(state.params.min_p > 0 for state in states):
        min_p = _column([state.params.min_p for state in states], probs).float()
        probs.masked_fill_(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
    blocks = _blocks(probs)  # [num_rows, num_blocks, _BLOCK]
    # A block's sum is as exact as the float32 probabilities it adds; what grows with the vocabulary is added in float64.
    ends = blocks.sum(2).double().cumsum(-1)
    target = _below(draws * ends[:, -1:], ends[:, -1:])
    block = torch.searchsorted(ends, target, right=True)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    inner = blocks[torch.arange(len(blocks), device=block.device), block[:, 0]].double().cumsum(-1)
    # The block's own sum was added up in another order: its last bits must not point past the last token.
    offset = torch.searchsorted(inner, _below(target - start, inner[:, -1:]), right=True)
    return (block * _BLOCK + offset)[:, 0]


def _blocks(values: Tensor) -> Tensor:
    return _padded(values, _BLOCK, 0.0).view(len(values), -1, _BLOCK)


def _padded(values: Tensor, multiple: int, value: float) -> Tensor:
    missing = -values.shape[1] % multiple
    return torch.nn.functional.pad(values, (0, missing), value=value) if missing else values


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Keep the target under the total, so that the first end beyond it belongs to a token with some mass."""
    return torch.minimum(target, total.nextafter(torch.zeros_like(total)))


@dataclass(frozen=True, slots=True)
class _Filters:
    """top_k, top_p and min_p of some rows, each `[num_rows, 1]`, and the sum of all weights of a row."""

    top_k: Tensor  # the size of the vocabulary where it is off
    top_p: Tensor
    min_p: Tensor
    mass: Tensor
    vocab_size: int

    @classmethod
    def of(cls, scaled: Tensor, states: Sequence[SamplingState]) -> Self:
        params = [state.params for state in states]
        num_rows, vocab_size = scaled.shape
        top_k = torch.tensor([p.top_k or vocab_size for p in params], device=scaled.device)[:, None]
        if all(0 < p.top_k < vocab_size for p in params):
            mass = torch.zeros(num_rows, 1, dtype=torch.float64, device=scaled.device)  # never looked at
        else:
            mass = _blocks(scaled.exp()).sum(2).double().cumsum(-1)[:, -1:]
        return cls(
            top_k=top_k.clamp_max(vocab_size),
            top_p=_column([p.top_p for p in params], scaled),
            min_p=_column([p.min_p for p in params], scaled),
            mass=mass,
            vocab_size=vocab_size,
        )

    def of_rows(self, index: Tensor) -> "_Filters":
        return _Filters(self.top_k[index], self.top_p[index], self.min_p[index], self.mass[index], self.vocab_size)

    def num_kept(self, weights: Tensor, ends: Tensor) -> Tensor:
        """Return how many tokens of a sorted row are left, `[num_rows, 1]`; `size + 1` if the head given cannot tell.

        Args:
            weights: float64 `[num_rows, size]`: the head of the row in falling order, unnormalised.
            ends: Their cumulative sum.
        """
        size = weights.shape[1]
        beyond = size + (size < self.vocab_size)
        has_top_k = self.top_k < self.vocab_size
        whole = torch.where(has_top_k, ends.gather(1, self.top_k.clamp_max(size) - 1), self.mass)
        in_nucleus = (ends - weights < self.top_p * whole) | (self.top_p >= 1.0)
        alive = (in_nucleus & (weights >= self.min_p * weights[:, :1])).sum(-1, keepdim=True).clamp_min(1)
        kept = torch.where(alive == size, beyond, alive).minimum(self.top_k)
        # Before its k-th token is seen, a row's top_k mass is unknown, and top_p with it.
        return torch.where(has_top_k & (self.top_k > size), beyond, kept)


def _draw_from_head(scaled: Tensor, states: Sequence[SamplingState], draws: Tensor) -> Tensor:
    """Draw from the tokens that top_k, top_p and min_p leave, the likeliest first; scaled logits have maximum 0."""
    vocab_size = scaled.shape[1]
    filters = _Filters.of(scaled, states)
    tokens = torch.empty(len(states), dtype=torch.int64, device=scaled.device)
    pending = torch.arange(len(states), device=scaled.device)
    for size in (*(size for size in _HEADS if size < vocab_size), vocab_size):
        values, ids, num_sure = _sorted_head(scaled, size)
        weights = values.double().exp()
        ends = weights.cumsum(-1)
        kept = filters.num_kept(weights, ends)
        total = ends.gather(1, kept.clamp_max(size) - 1)
        drawn = torch.searchsorted(ends, _below(draws * total, total), right=True)
        settled = (kept <= num_sure)[:, 0]
        tokens[pending[settled]] = ids.gather(1, drawn)[settled, 0]
        unsettled = (~settled).nonzero()[:, 0]
        if not len(unsettled):
            break
        scaled, draws, filters, pending = scaled[unsettled], draws[unsettled], filters.of_rows(unsettled), pending[unsettled]
    return tokens


def _sorted_head(values: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `size` largest values per row in falling order, equal ones by index, with their indices.

    The third result, `[num_rows, 1]`, is how many leading ranks are certain: values equal to the smallest one returned may
    have equals that were left out. The whole row (`size` = all) is certain to the end.

    A value among the `size` largest lies in one of the `size` groups with the largest maxima, so only those are searched.
    """
    num_rows, width = values.shape
    if size >= width:
        ordered = values.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices, torch.full((num_rows, 1), width, device=values.device)
    grouped = _padded(values, _GROUP, -torch.inf).view(
        num_rows, _GROUP, -1
    )  # group j: indices j, j + num_groups, j + 2 * num_groups, ...
    num_groups = grouped.shape[2]
    if size < num_groups:
        groups = grouped.amax(1).topk(size, dim=-1, sorted=False).indices
        found = grouped.gather(2, groups[:, None, :].expand(-1, _GROUP, -1)).flatten(1)
        offsets = torch.arange(_GROUP, device=values.device)[:, None] * num_groups
        indices = (groups[:, None, :] + offsets).flatten(1)
    else:
        found, indices = values, torch.arange(width, device=values.device).expand(num_rows, -1)
    top = found.topk(size, dim=-1, sorted=False)
    ids, order = indices.gather(1, top.indices).sort(dim=-1)
    head = top.values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    num_sure = (head.values > head.values[:, -1:]).sum(-1, keepdim=True)
    return head.values, ids.gather(1, head.indices), num_sure


def _alternatives(logprobs: Tensor, states: Sequence[SamplingState]) -> list[tuple[tuple[int, float], ...]]:
    """Return per state the likeliest tokens with their log probabilities, as many as it asked for."""
    found: list[tuple[tuple[int, float], ...]] = [()] * len(states)
    pending = [row for row, state in enumerate(states) if state.params.logprobs]
    for size in (min(_ALTERNATIVES_HEAD, logprobs.shape[1]), logprobs.shape[1]):
        if not pending:
            break
        values, ids, num_sure = _sorted_head(logprobs[torch.tensor(pending, device=logprobs.device)], size)
        unsure = []
        for row, row_ids, row_values, [sure] in zip(pending, ids.tolist(), values.tolist(), num_sure.tolist(), strict=True):
            wanted = min(states[row].params.logprobs or 0, logprobs.shape[1])
            if wanted > sure:
                unsure.append(row)
            found[row] = tuple(zip(row_ids[:wanted], row_values[:wanted], strict=True))
        pending = unsure
    return found
