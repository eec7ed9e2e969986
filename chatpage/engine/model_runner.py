"""What the engine asks of a model: its limits, and logits for a batch.

Invariant: logits of a sequence depend on its own tokens alone, never on its batch mates, on how its prompt was cut into chunks,
or on which blocks hold it (up to the rounding of the dtype).
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from chatpage.engine.batch import Batch
from chatpage.engine.kv_cache import KvCache, LayerSpec


class ModelRunner(Protocol):
    """A model that is ready to compute."""

    @property
    def layer_specs(self) -> Sequence[LayerSpec]:
        """What each attention layer keeps per token."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output together."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens with which the model ends an answer."""

    @property
    def model_id(self) -> str:
        """Digest of weights, dtype and settings: equal only if their KV is interchangeable."""

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """Compute a step: write the KV of its tokens, return the logits `[num_logit_rows, vocab_size]` float32."""
