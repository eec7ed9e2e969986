"""Small tokenizers of the kinds that real models have, trained on the spot on a fixed text."""

import json
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "The quick brown fox jumps over the lazy dog. Hello, how are you today? I am fine, thank you! user assistant system\n\n"
    "def main():\n    return 'ok'  # 1234567890\n"
    "naïve café Ελληνικά Привет мир שלום 你好,世界。今日は良い天気ですね 안녕하세요 😀 👍🏽 👨‍👩‍👧 🇩🇪 €100"
)
CORPUS = [TEXT] * 3 + ["one\n\n", "two \n\n\n"] * 5  # so that line breaks merge, as in real vocabularies


@cache
def byte_level(
    control_tokens: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), plain_tokens: tuple[str, ...] = ()
) -> Any:
    """Make a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen): any text is possible, and characters span tokens.

    `plain_tokens` are added tokens that count as text, as `<think>` does in Qwen 3.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(control_tokens))
    tokenizer.add_tokens(list(plain_tokens))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=control_tokens[-1], clean_up_tokenization_spaces=False)


@cache
def sentencepiece_like(control_tokens: tuple[str, ...] = ("<unk>", "<s>", "</s>")) -> Any:
    """Make a tokenizer like Llama 2's or Mistral's: words start with a visible space, unknown characters become byte tokens."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=[*control_tokens, *byte_tokens], limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(list(control_tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def rewriting(pattern: str, replacement: str) -> Any:
    """Make a byte-level tokenizer whose decoder replaces a regular expression in the whole text, as tidying decoders do."""
    fast = byte_level()
    tokenizer = Tokenizer.from_str(fast.backend_tokenizer.to_str())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(pattern), replacement)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=fast.eos_token)
