"""Tokens as clients read them: a text and the bytes behind it.

Invariant: the bytes of the tokens of a text, joined, are its UTF-8, for byte-level and for byte-fallback tokenizers, even where
a token is part of a character and has no text of its own.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from chatpage.engine.detokenizer import byte_fallback_tokens
from chatpage.events import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_LOGPROB = -9999.0


class TokenTexts:
    """The texts of the tokens of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._fallback = byte_fallback_tokens(tokenizer)
        self._added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}

    def bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        if token_id in self._fallback:
            return bytes([self._fallback[token_id]])
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""  # the model has rows beyond the vocabulary of its tokenizer
        if self._byte_of and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        return token.replace("▁", " ").encode()

    def text_of(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode(errors="replace")

    def name_of(self, token_id: int) -> str:
        """Return the text, or where a token is part of a character its bytes, so that no two tokens look alike."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat_view(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return log probabilities as chat completions and responses have them."""
        return [
            self._entry(token.token_id, token.logprob)
            | {"top_logprobs": [self._entry(other, logprob) for other, logprob in token.alternatives]}
            for token in tokens
        ]

    def completion_view(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
        """Return log probabilities as completions have them; `offset`: characters before the first token."""
        texts = [self.text_of(token.token_id) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [self.name_of(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self.name_of(other): _finite(logprob) for other, logprob in reversed(token.alternatives)} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, object]:
        data = self.bytes_of(token_id)
        return {"token": data.decode(errors="replace"), "bytes": list(data), "logprob": _finite(logprob)}

    @cached_property
    def _byte_of(self) -> Mapping[str, int]:
        """Byte-level tokenizers write each byte as one character; this is their table, empty for the others."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or "ByteLevel" not in str(backend.decoder):
            return {}
        printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        table = {chr(byte): byte for byte in printable}
        return table | {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in printable)}


def _finite(logprob: float) -> float:
    """Return a log probability as JSON can write it; of what is impossible OpenAI says -9999."""
    return max(logprob, LEAST_LOGPROB)


@lru_cache(maxsize=4)
def token_texts(tokenizer: "PreTrainedTokenizerBase") -> TokenTexts:
    """Return the texts of a tokenizer, made once."""
    return TokenTexts(tokenizer)
