"""Writes a tiny llama (or qwen) as a GGUF file, as llama.cpp's converter would."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.tiny_models import save_tiny_llama

NUM_TOKENS = 260  # of the tiny tokenizer, and one more
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EMBEDDINGS = frozenset({"token_embd.weight", "output.weight"})


def save_gguf_llama(folder: Path, *, seed: int = 0) -> Path:
    """Save a tiny llama with room in its vocabulary for the token that `write_llama_gguf` adds."""
    return save_tiny_llama(folder, seed=seed, vocab_size=NUM_TOKENS)


def write_llama_gguf(
    folder: Path,
    file: Path,
    *,
    quantization: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write the model and the tokenizer of `folder` (from `save_gguf_llama`, or a qwen of as many tokens) to `file`.

    Args:
        folder: The model.
        file: To be written.
        quantization: Of the matrices; embedding and head have 8 bits if it is not F32.
        extra: More tensors, by their names in the file.
    """
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    writer = GGUFWriter(file, config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
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
        num_heads = next((count for part, count in heads.items() if part in name and config.model_type == "llama"), None)
        rows = weight if num_heads is None else _interleave(weight, num_heads)
        _add_tensor(writer, _gguf_name(name), np.ascontiguousarray(rows), quantization)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tensor(writer: GGUFWriter, name: str, weight: NDArray[np.float32], quantization: GGMLQuantizationType) -> None:
    if weight.ndim == 1 or quantization == GGMLQuantizationType.F32:
        writer.add_tensor(name, weight)
        return
    kind = GGMLQuantizationType.Q8_0 if name in _EMBEDDINGS else quantization
    writer.add_tensor(name, quants.quantize(weight, kind), raw_dtype=kind)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def _interleave(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a projection to the rotary layout of GGUF, pairs side by side."""
    half = len(weight) // num_heads // 2
    return weight.reshape(num_heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)
