"""Drives a model runner without a scheduler: blocks in no order, prompts in chunks, several sequences side by side."""

from collections.abc import Sequence
from typing import Any

import torch

from chatpage.engine.batch import BatchRow, build_batch
from chatpage.engine.kv_cache import KvCache
from chatpage.engine.model_runner import ModelRunner
from chatpage_kernels import reference
from chatpage_kernels.backend import Backend

CPU = torch.device("cpu")


def reference_backend(*_: Any, **__: Any) -> Backend:
    """Return the kernels in plain torch, whatever is asked for."""
    return Backend(
        name="reference",
        reason="tests",
        tile=reference.TILE,
        prefill_tile=reference.TILE,
        paged_attention=reference.paged_attention,
        write_kv=reference.write_kv,
        copy_blocks=reference.copy_blocks,
    )


class Driver:
    """A runner with a poisoned KV cache that is handed out block by block, in no order."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 48,
        block_size: int = 4,
        backend: Backend | None = None,
    ) -> None:
        self.runner = runner
        self.cache = KvCache(
            runner.layer_specs,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=CPU,
            backend=backend or reference_backend(),
        )
        self.cache.poison()
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))
        self._free: list[int] = order.tolist()

    def table(self, num_tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_tokens // self.cache.block_size))]

    def step(self, work: Sequence[tuple[Sequence[int], int, Sequence[int]]]) -> torch.Tensor:
        """Run (tokens, start, block table) of each sequence; return the logits after the last token of each."""
        size = self.cache.block_size
        rows = []
        for tokens, start, table in work:
            slots = [table[pos // size] * size + pos % size for pos in range(start, start + len(tokens))]
            rows.append(BatchRow(tokens, start, table, slots, wants_logits=True))
        return self.runner.forward(build_batch(rows, CPU), self.cache)

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int, *, chunk: int) -> list[list[int]]:
        """Generate for all prompts at once, each prompt in chunks of at most `chunk` tokens."""
        sequences = [list(prompt) for prompt in prompts]
        tables = [self.table(len(prompt) + num_tokens) for prompt in prompts]
        computed = [0] * len(prompts)
        while any(len(seq) < len(prompt) + num_tokens for seq, prompt in zip(sequences, prompts, strict=True)):
            live = [i for i, prompt in enumerate(prompts) if len(sequences[i]) < len(prompt) + num_tokens]
            work = [(sequences[i][computed[i] : computed[i] + chunk], computed[i], tables[i]) for i in live]
            logits = self.step(work)
            for i, (tokens, _, _), row in zip(live, work, logits, strict=True):
                computed[i] += len(tokens)
                if computed[i] == len(sequences[i]):
                    sequences[i].append(int(row.argmax()))
        return [seq[len(prompt) :] for seq, prompt in zip(sequences, prompts, strict=True)]
