"""Tokens as clients read them: bytes that join to the text, names that tell tokens apart."""

from typing import Any

import pytest

from chatpage.events import TokenLogprob
from chatpage.server.openai.token_texts import TokenTexts
from tests.tiny_models import tiny_tokenizer
from tests.tokenizer_zoo import byte_level, sentencepiece_like

TEXT = "Grüße, 世界! 🦉 (naïve) <|im_end|>"


def test_the_bytes_of_byte_tokens_join_to_the_text() -> None:
    tokenizer = tiny_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert b"".join(map(texts.bytes_of, ids)).decode() == TEXT
    assert texts.text_of(tokenizer.encode("é")[0]) == "\ufffd", "half a character has no text"
    assert texts.name_of(tokenizer.encode("é")[0]) == "bytes:\\xc3"


@pytest.mark.parametrize("make", [byte_level, sentencepiece_like])
def test_whatever_the_tokenizer_bytes_join_to_the_text(make: Any) -> None:
    tokenizer = make()
    texts = TokenTexts(tokenizer)
    text = "Hello, how are you today? 🇩🇪 naïve Ж"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(texts.bytes_of, ids)).decode().strip() == text


def test_a_token_beyond_the_vocabulary_is_nothing() -> None:
    """Models have rows for tokens that their tokenizer does not know."""
    assert TokenTexts(tiny_tokenizer()).bytes_of(5_000) == b""


def test_offsets_of_a_completion_count_characters() -> None:
    tokenizer = tiny_tokenizer()
    tokens = [TokenLogprob(token_id, -1.0, ((token_id, -1.0), (7, -2.0))) for token_id in tokenizer.encode("ab")]
    view = TokenTexts(tokenizer).completion_view(tokens, 10)
    assert (view["tokens"], view["text_offset"], view["token_logprobs"]) == (["a", "b"], [10, 11], [-1.0, -1.0])


def test_what_is_impossible_is_a_number_all_the_same() -> None:
    """JSON has no infinity; an answer with one could not be read."""
    token = TokenLogprob(40, -float("inf"), ((40, -float("inf")),))
    texts = TokenTexts(tiny_tokenizer())
    [entry] = texts.chat_view([token])
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    assert texts.completion_view([token], 0)["token_logprobs"] == [-9999.0]
