"""Runs any decoder model of transformers over the KV cache, through its attention hook.

The model sees one long row of tokens with explicit positions, and has no cache of its own; where one sequence ends and the next
begins is known to the attention alone. Everything else in a decoder works token by token, mixtures of experts included.
Invariant: a runner that exists passed the guards.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from chatpage.engine.attention import PagedStep, attention_step
from chatpage.engine.batch import Batch
from chatpage.engine.kv_cache import KvCache, LayerSpec
from chatpage.engine.models.guards import compare_with_eager, trace_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersRunner:
    """A `ModelRunner` around a transformers model.

    Args:
        model: In evaluation mode, on its device, loaded with the attention of `attention.register`.
        model_id: See `ModelRunner.model_id`.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: Tokens with which the model ends an answer.
        dtype: Of the activations and of the KV cache.

    Raises:
        UnsupportedModelError: The model does something that paged attention cannot do; found by trying.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        model_id: str,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._can_choose_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._model_id = model_id
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._layer_specs = trace_layers(model, max_len=max_model_len)
        self._vocab_size = compare_with_eager(model, self.forward, self._layer_specs, dtype=dtype, max_len=max_model_len)

    @property
    def layer_specs(self) -> Sequence[LayerSpec]:
        return self._layer_specs

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def model_id(self) -> str:
        return self._model_id

    def forward(self, batch: Batch, kv_cache: KvCache) -> torch.Tensor:
        """Compute a step: write the KV of its tokens, return the logits `[num_logit_rows, vocab_size]` float32."""
        kv_cache.begin_step(batch)
        rows = {"logits_to_keep": batch.logit_rows} if self._can_choose_rows else {}
        with torch.inference_mode(), attention_step(PagedStep(batch, kv_cache)):
            output = self._model(input_ids=batch.input_ids[None], position_ids=batch.positions[None], use_cache=False, **rows)
            logits: torch.Tensor = output.logits[0]
            if not self._can_choose_rows:
                logits = logits[batch.logit_rows]
            return logits.float()
