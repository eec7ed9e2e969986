"""Completions through the official client: every kind of prompt, echo, n, log probabilities, streams."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.server.openai.clients import EXACT, wait_until_idle
from tests.server.serving import Served
from tests.tiny_models import tiny_tokenizer


def test_a_text_and_its_tokens_are_the_same_prompt(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "max_tokens": 8, "temperature": 0, "extra_body": EXACT}
    ids = tiny_tokenizer().encode("Once upon")
    by_text = client.completions.create(prompt="Once upon", **options)
    by_ids = client.completions.create(prompt=ids, **options)
    assert by_text.choices[0].text == by_ids.choices[0].text != ""
    assert by_text.usage is not None
    assert (by_text.usage.prompt_tokens, by_text.usage.completion_tokens) == (len(ids), 8)
    assert (by_text.object, by_text.choices[0].finish_reason) == ("text_completion", "length")


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "max_tokens": 6, "seed": 2, "n": 2, "extra_body": EXACT}
    both = client.completions.create(prompt=["ab", "cde"], **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(prompt=prompt, **options) for prompt in ("ab", "cde")]
    assert [choice.text for choice in both.choices] == [choice.text for answer in alone for choice in answer.choices]
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (5, 24)
    assert len(client.completions.create(prompt=[[40, 41], [42]], **options).choices) == 4


def test_without_a_limit_sixteen_tokens_come(client: OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="ab", extra_body=EXACT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_each_choice(client: OpenAI, model: str, stream: bool) -> None:
    options: dict[str, Any] = {"model": model, "max_tokens": 5, "seed": 2, "n": 2, "extra_body": EXACT}
    plain = client.completions.create(prompt="Once", **options)
    if stream:
        texts = ["", ""]
        with client.completions.create(prompt="Once", echo=True, stream=True, **options) as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
    else:
        texts = [choice.text for choice in client.completions.create(prompt="Once", echo=True, **options).choices]
    assert texts == ["Once" + choice.text for choice in plain.choices]


def test_a_stream_over_several_prompts_is_the_whole_in_pieces(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "prompt": ["ab", "cde"], "max_tokens": 9, "seed": 4, "logprobs": 2}
    whole = client.completions.create(**options, extra_body=EXACT)
    texts, offsets = ["", ""], [list[int](), list[int]()]
    with client.completions.create(**options, extra_body=EXACT, stream=True, stream_options={"include_usage": True}) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                offsets[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
            usage = chunk.usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage == whole.usage
    for choice, streamed in zip(whole.choices, offsets, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset == streamed
        assert choice.logprobs.tokens is not None
        assert len(choice.logprobs.tokens) == 9
        assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [999_999]}, None),
        ({"prompt": ""}, None),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, None),
        ({"prompt": ["a"] * 65}, None),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(
    client: OpenAI, model: str, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model=model, **fields)
    assert caught.value.param == param


def test_everything_was_given_back(server: Served) -> None:
    wait_until_idle(server)
