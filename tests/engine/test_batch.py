"""A step is flattened without mixing up whose token is whose."""

from array import array

import numpy as np
import pytest
import torch

from chatpage.engine.batch import Batch, BatchRow, build_batch

CPU = torch.device("cpu")


def _example() -> Batch:
    rows = [
        BatchRow([10, 11, 12], 4, array("i", [3, 5]), np.array([20, 21, 22]), wants_logits=False),
        BatchRow([99], 9, array("i", [8, 6, 2]), [9], wants_logits=True),
        BatchRow([7, 8], 0, array("i", [1]), [4, 5], wants_logits=True),
    ]
    return build_batch(rows, CPU)


def test_rows_follow_each_other_with_their_positions_and_slots() -> None:
    batch = _example()
    assert batch.input_ids.tolist() == [10, 11, 12, 99, 7, 8]
    assert batch.positions.tolist() == [4, 5, 6, 9, 0, 1]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 9, 4, 5]
    assert batch.num_tokens == 6


def test_sequences_know_their_rows_lengths_and_padded_tables() -> None:
    batch = _example()
    assert batch.query_start_loc.tolist() == [0, 3, 4, 6]
    assert batch.seq_lens.tolist() == [7, 10, 2]
    assert batch.block_tables.tolist() == [[3, 5, -1], [8, 6, 2], [1, -1, -1]]


def test_logits_are_wanted_after_the_last_token_of_those_who_ask() -> None:
    assert _example().logit_rows.tolist() == [3, 5]


@pytest.mark.parametrize("name", ["input_ids", "positions", "slot_mapping", "logit_rows"])
def test_tensors_are_int64_and_arrays_int32(name: str) -> None:
    batch = _example()
    assert getattr(batch, name).dtype == torch.int64
    assert {batch.query_start_loc.dtype, batch.seq_lens.dtype, batch.block_tables.dtype} == {np.dtype(np.int32)}


def test_a_step_that_only_fills_the_cache_wants_no_logits() -> None:
    assert build_batch([BatchRow([1, 2], 0, [0], [0, 1], wants_logits=False)], CPU).logit_rows.shape == (0,)


def test_the_batch_does_not_change_with_the_table_it_was_made_from() -> None:
    """A table grows and copies on write while the step still runs."""
    table = array("i", [3, 5])
    batch = build_batch([BatchRow([1], 7, table, [27], wants_logits=True)], CPU)
    table[1] = 9
    assert batch.block_tables.tolist() == [[3, 5]]
