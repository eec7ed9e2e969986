"""Tokens and templates over HTTP, in the shapes of vLLM and llama.cpp."""

from typing import Any

import httpx
import pytest

from tests.tiny_models import tiny_tokenizer

HELLO = [{"role": "user", "content": "Hé"}]
RENDERED = "<|im_start|>user\nHé<|im_end|>\n<|im_start|>assistant\n"


def _post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_prompt_comes_as_vllm_has_it(http: httpx.Client) -> None:
    found = _post(http, "/tokenize", prompt="Hé", return_token_strs=True)
    ids = tiny_tokenizer().encode("Hé")
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 2048)
    assert found["token_strs"] == ["H", "\ufffd", "\ufffd"]


def test_a_content_comes_as_llama_cpp_has_it(http: httpx.Client) -> None:
    assert _post(http, "/tokenize", content="Hi")["tokens"] == tiny_tokenizer().encode("Hi", add_special_tokens=False)
    pieces = _post(http, "/tokenize", content="Hé", with_pieces=True)["tokens"]
    assert [piece["piece"] for piece in pieces] == ["H", [0xC3], [0xA9]], "what is no text of its own is bytes"
    whole, split = (_post(http, "/tokenize", content="<|im_end|>", parse_special=parse)["count"] for parse in (True, False))
    assert (whole, split) == (1, len("<|im_end|>"))


def test_messages_are_tokenised_as_a_chat_would_send_them(http: httpx.Client) -> None:
    found = _post(http, "/tokenize", messages=HELLO)
    assert found["tokens"] == tiny_tokenizer().encode(RENDERED)
    closed = _post(http, "/tokenize", messages=HELLO, add_generation_prompt=False)["count"]
    assert closed < found["count"]


def test_tokens_become_text_again_under_both_names(http: httpx.Client) -> None:
    ids = _post(http, "/tokenize", content="Ünïcödé 🦉")["tokens"]
    assert _post(http, "/detokenize", tokens=ids) == {"prompt": "Ünïcödé 🦉", "content": "Ünïcödé 🦉"}
    assert _post(http, "/detokenize", tokens=[])["content"] == ""


def test_a_template_is_applied(http: httpx.Client) -> None:
    assert _post(http, "/apply-template", messages=HELLO) == {"prompt": RENDERED}
    assert (
        _post(http, "/apply-template", messages=HELLO, add_generation_prompt=False)["prompt"]
        == RENDERED[: -len("<|im_start|>assistant\n")]
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["1"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [259]}, None),
        ("/detokenize", {"token": [1]}, "token"),
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "content": "a"}, None),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, None),
        ("/tokenize", {"content": "a", "return_token_strs": True}, None),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/apply-template", {"messages": []}, "messages"),
        ("/apply-template", {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, None),
    ],
)
def test_what_is_no_token_or_text_is_an_error(http: httpx.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
