"""What the sampler must know about one sequence: parameters, the place in the random stream, and token counts.

Invariant: a state describes the tokens given to it so far, and costs O(1) per token appended. Counts exist only while a
penalty is on; without one a state is a few integers, however long the history.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from chatpage.engine.random_numbers import uniform
from chatpage.sampling_params import SamplingParams

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

MIN_TEMPERATURE = 1e-30  # smaller ones would be 0 in float32; by far all mass is on the largest logits already


class TokenCounts:
    """The distinct tokens of a sequence, and how often each was generated (0: it is in the prompt only).

    Kept as two growing arrays, so that a step reads them without walking the history:

        prompt 7 7 9, output 9 4 9   ->   token_ids 7 9 4,  counts 0 2 1
    """

    __slots__ = ("_counts", "_size", "_slots", "_token_ids")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        generated = Counter(output_token_ids)
        distinct = dict.fromkeys([*dict.fromkeys(prompt_token_ids), *generated])
        self._size = len(distinct)
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._token_ids = np.array(list(distinct), dtype=np.int64)
        self._counts = np.array([generated[token_id] for token_id in distinct], dtype=np.float32)

    @property
    def token_ids(self) -> Int64Array:
        return self._token_ids[: self._size]

    @property
    def counts(self) -> Float32Array:
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._new_slot(token_id)
        self._counts[slot] += 1

    def copy(self) -> "TokenCounts":
        other = TokenCounts((), ())
        other._size = self._size
        other._slots = dict(self._slots)
        other._token_ids = self._token_ids.copy()
        other._counts = self._counts.copy()
        return other

    def _new_slot(self, token_id: int) -> int:
        slot = self._size
        if slot == len(self._token_ids):
            grown = np.zeros(max(16, slot), dtype=np.int64)  # doubles: amortised O(1)
            self._token_ids = np.concatenate([self._token_ids, grown])
            self._counts = np.concatenate([self._counts, grown.astype(np.float32)])
        self._slots[token_id] = slot
        self._token_ids[slot] = token_id
        self._size += 1
        return slot


class SamplingState:
    """The sampler's view of one sequence.

    Args:
        params: The parameters of the request.
        seed: The seed of the request: `params.seed`, or the one drawn for it.
        sample: Index of the sample in the request.
        prompt_token_ids: Tokens that were given.
        output_token_ids: Tokens that were generated already (a preempted or restored sequence).
    """

    __slots__ = (
        "bias_ids",
        "bias_values",
        "num_output_tokens",
        "num_prompt_tokens",
        "params",
        "sample",
        "seed",
        "token_counts",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        sample: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.seed = seed
        self.sample = sample
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_output_tokens = len(output_token_ids)
        self.token_counts: TokenCounts | None = None
        if params.has_penalties:
            # Only the repetition penalty looks at the prompt.
            self.token_counts = TokenCounts(prompt_token_ids if params.repetition_penalty != 1.0 else (), output_token_ids)
        self.bias_ids: Int64Array = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.bias_values: Float32Array = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))

    @property
    def holds_off_end(self) -> bool:
        """Whether too few tokens exist for the sequence to end."""
        return self.num_output_tokens < self.params.min_tokens

    @property
    def has_edits(self) -> bool:
        """Whether the next token is chosen from logits other than the model's own."""
        return self.token_counts is not None or len(self.bias_ids) > 0 or self.holds_off_end

    def uniform(self) -> float:
        """Return the random number of the next token. Positions count from the start of the prompt, so a reply that was
        stopped and is continued with the same seed goes on as if it had never stopped."""
        return uniform(self.seed, self.sample, self.num_prompt_tokens + self.num_output_tokens)

    def append(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self.num_output_tokens += 1
        if self.token_counts is not None:
            self.token_counts.add(token_id)

    def fork(self, *, sample: int) -> Self:
        """Return a state with the same history that draws as another sample from here on."""
        other = type(self).__new__(type(self))
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.sample = sample
        other.token_counts = None if self.token_counts is None else self.token_counts.copy()
        return other
