"""Writes a tiny llama as a GGUF file, as llama.cpp's converter would."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.tiny_models import save_tiny_llama

NUM_TOKENS = 260  # of the tiny tokenizer, and one more
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def save_gguf_llama(folder: Path, *, seed: int = 0) -> Path:
    """Save a tiny llama with room in its vocabulary for the token that `write_llama_gguf` adds."""
    return save_tiny_llama(folder, seed=seed, vocab_size=NUM_TOKENS)


def write_llama_gguf(folder: Path, file: Path) -> Path:
    """Write the model and the tokenizer of `folder` (from `save_gguf_llama`) to `file`, weights in float32."""
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    writer = GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    # A byte-level tokenizer of this format has merges, so one more token exists than in the folder's.
    merge = (tokens[3], tokens[4])
    tokens.append("".join(merge))
    special = set(tokenizer.all_special_tokens) | {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge)])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in load_file(folder / "model.safetensors").items():
        num_heads = next((count for part, count in heads.items() if part in name), None)
        rows = weight if num_heads is None else _interleave(weight, num_heads)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}"


def _interleave(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a projection to the rotary layout of GGUF, pairs side by side."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
