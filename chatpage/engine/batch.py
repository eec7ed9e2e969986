"""The tokens of one step, of all its sequences, flattened into one row of the model.

Invariant: row t of every token array belongs to the same token; sequence i owns the rows
`[query_start_loc[i], query_start_loc[i + 1])`, and they are the last of its `seq_lens[i]` tokens.

A prompt in its second chunk, positions [4, 7), beside a sequence that decodes its token at position 9; block size 4:

    input_ids       a4 a5 a6 | b9      query_start_loc  0 3 4
    positions        4  5  6 |  9      seq_lens         7 10
    slot_mapping    20 21 22 |  9      block_tables     [3 5 -1] [8 6 2]     slot = block * block_size + offset
    logit_rows                  3      only b9 is followed by a new token in this step
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class BatchRow:
    """What one sequence brings to a step.

    Args:
        token_ids: Tokens to compute, at least one.
        start: Position of the first of them; everything before is already in the KV cache.
        block_ids: The block table, an int32 buffer such as `array("i")`; covers `start + len(token_ids)` tokens.
        slots: Slot of each token, `block * block_size + offset`.
        wants_logits: Compute the logits after the last token.
    """

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    slots: Sequence[int] | npt.NDArray[np.int64]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The arrays of one step, T tokens of S sequences.

    Args:
        input_ids: int64 [T], on the device of the model like the other tensors.
        positions: int64 [T].
        slot_mapping: int64 [T].
        query_start_loc: int32 [S + 1], in host memory like the other arrays: the attention is planned there.
        seq_lens: int32 [S], tokens of each sequence after this step.
        block_tables: int32 [S, max_blocks], padded with -1.
        logit_rows: int64 [R], rows whose logits are wanted, one at most per sequence, in the order of the sequences.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logit_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def build_batch(rows: Sequence[BatchRow], device: torch.device) -> Batch:
    """Flatten the rows of a step; one transfer to `device` carries all tensors."""
    counts = np.fromiter((len(row.token_ids) for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    wanted = np.fromiter((row.wants_logits for row in rows), np.bool_, len(rows))
    logit_rows = query_start_loc[1:][wanted] - 1

    packed = np.empty(3 * num_tokens + len(logit_rows), np.int64)
    input_ids, positions, slots = packed[: 3 * num_tokens].reshape(3, num_tokens)
    positions[:] = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], counts)
    packed[3 * num_tokens :] = logit_rows
    block_tables = np.full((len(rows), max((len(row.block_ids) for row in rows), default=0)), -1, np.int32)
    for i, row in enumerate(rows):
        lo, hi = query_start_loc[i], query_start_loc[i + 1]
        input_ids[lo:hi] = row.token_ids
        slots[lo:hi] = row.slots
        block_tables[i, : len(row.block_ids)] = row.block_ids

    tensors = _to_device(packed, device).split([num_tokens, num_tokens, num_tokens, len(logit_rows)])
    return Batch(tensors[0], tensors[1], tensors[2], query_start_loc, starts + counts, block_tables, tensors[3])


def _to_device(packed: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(packed)
    if device.type == "cpu":
        return tensor
    # Pinned memory lets the copy run behind the work that is queued on the device.
    return tensor.pin_memory().to(device, non_blocking=True)
