"""Paged attention over work items, for any tree of forks: plan once a step, attend in every layer.

    backend = select_backend("cpu", torch.float32, head_dim=64)
    plan = plan_attention(query_start_loc, seq_lens, block_tables, block_size=16, num_q_heads=9, num_kv_heads=3,
                          tile=backend.tile)
    backend.write_kv(key, value, key_cache, value_cache, slot_mapping)
    output = backend.paged_attention(query, key_cache, value_cache, plan, scale=64**-0.5)

Importing the package imports numpy and torch, but neither triton nor a compiler, and starts nothing.
"""

from chatpage_kernels.backend import Backend, select_backend
from chatpage_kernels.plan import AttentionPlan, Tile, plan_attention

__all__ = ["AttentionPlan", "Backend", "Tile", "plan_attention", "select_backend"]
