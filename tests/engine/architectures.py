"""Tiny random models of many architectures: one table of settings, and a maker."""

from pathlib import Path
from typing import Any

import torch

from tests.tiny_models import tiny_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Small values of settings that only some architectures have; what an architecture does not know is left out.
SMALL: dict[str, Any] = {
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 6,
    "first_k_dense_replace": 1,
    "n_positions": 128,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "query_pre_attn_scalar": 8,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
}
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4}

SERVED: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "apertus": {},
    "arcee": {},
    "aria_text": {},
    "axk1": MLA,
    "biogpt": {},
    "bitnet": {},
    "codegen": {**GPT, "rotary_dim": 4},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "cwm": {},
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "dots1": {"n_shared_experts": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": MLA,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {**GPT, "rotary_dim": 4},
    "granite": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jais2": {},
    "jetmoe": {},
    "llama": {},
    "llama4_text": {"intermediate_size_mlp": 48, "attention_chunk_size": 64},
    "longcat_flash": {**MLA, "num_layers": 1, "zero_expert_num": 1, "moe_topk": 2, "expert_ffn_hidden_size": 16},
    "minicpm3": MLA,
    "minimax_m2": {},
    "mimo_v2_flash": {"v_head_dim": 6},
    "ministral": {},
    "ministral3": {},
    "mistral": {},
    "mixtral": {},
    "modernbert-decoder": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {"sliding_window": 128},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "solar_open": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {},
    "youtu": MLA,
}


def tiny_config(model_type: str, **settings: Any) -> Any:
    from transformers import AutoConfig

    known = AutoConfig.for_model(model_type)
    keys = {*known.to_dict(), *getattr(known, "attribute_map", {})}
    small = {key: value for key, value in SMALL.items() if key in keys}
    return AutoConfig.for_model(model_type, **(BASE | small | settings))


def tiny_model(config: Any, *, seed: int = 0) -> Any:
    """Make a random model whose every weight matters: norms and biases are not left at one and zero."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.dim() == 1 else 0.1))
    return model


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
