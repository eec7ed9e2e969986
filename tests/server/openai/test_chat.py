"""Chat completions through the official client: shapes, sampling, log probabilities, stop, usage, and the cache."""

import math
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.server.openai.clients import EXACT, HELLO, wait_until_idle
from tests.server.serving import Served


def _tokens_of(text: str) -> int:
    return len(text.encode())


def _prompt_size(*messages: dict[str, str]) -> int:
    """Count the tokens of ChatML under the tiny tokenizer: a token per byte, and per control token."""
    turns = sum(3 + _tokens_of(message["role"]) + _tokens_of(message["content"]) + 1 for message in messages)
    return turns + 1 + _tokens_of("assistant\n")


def test_a_whole_answer_has_what_the_client_expects(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=6, temperature=0, extra_body=EXACT)
    assert (answer.object, answer.model, len(answer.choices)) == ("chat.completion", model, 1)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == _prompt_size(HELLO[0])
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (6, answer.usage.prompt_tokens + 6)


def test_a_stream_is_the_whole_answer_in_pieces(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 12, "seed": 5, "extra_body": EXACT}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_without_include_usage_a_stream_has_no_chunk_without_choices(client: OpenAI, model: str) -> None:
    with client.chat.completions.create(model=model, messages=HELLO, max_tokens=3, stream=True) as stream:
        assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in stream)


def test_four_samples_differ_repeat_by_seed_and_count_their_prompt_once(client: OpenAI, model: str) -> None:
    """Elsewhere usage of n > 1 counted the prompt once per sample."""
    options: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 10, "n": 4, "seed": 1, "extra_body": EXACT}
    first, second = (client.chat.completions.create(**options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 4
    assert texts == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (_prompt_size(HELLO[0]), 40)
    alone = client.chat.completions.create(**options | {"n": 1})
    assert alone.choices[0].message.content == texts[0], "sample 0 of 4 is sample 0 of 1"


def test_samples_stream_side_by_side(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 10, "n": 4, "seed": 1, "extra_body": EXACT}
    whole = client.chat.completions.create(**options)
    texts = [""] * 4
    with client.chat.completions.create(**options, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_log_probabilities_have_bytes_and_alternatives_that_add_up(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3, extra_body=EXACT
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob, "greedy takes the most likely token"
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0
    data = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert data.decode(errors="replace") == answer.choices[0].message.content


def test_streamed_log_probabilities_are_those_of_the_whole(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 8, "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**options, extra_body=EXACT)
    with client.chat.completions.create(**options, extra_body=EXACT, stream=True) as stream:
        logprobs = [chunk.choices[0].logprobs for chunk in stream]
    streamed = [token.bytes for part in logprobs if part is not None for token in part.content or ()]
    assert whole.choices[0].logprobs is not None
    assert streamed == [token.bytes for token in whole.choices[0].logprobs.content or ()]


def test_a_stop_string_ends_the_answer_and_is_no_part_of_it(client: OpenAI, model: str) -> None:
    options: dict[str, Any] = {"model": model, "messages": HELLO, "max_tokens": 200, "seed": 3, "extra_body": EXACT}
    text = client.chat.completions.create(**options).choices[0].message.content or ""
    stop = next(text[i : i + 2] for i in range(4, len(text) - 1) if "\ufffd" not in text[i : i + 2])
    stopped = client.chat.completions.create(**options, stop=[stop, "never found"])
    [choice] = stopped.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == text[: text.index(stop)]
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop


def test_the_next_turn_computes_nothing_but_what_is_new(client: OpenAI, model: str) -> None:
    """A client sends the reply back as text. Tokenised again it can be other tokens than the model chose, and from the first
    that differs nothing would be found: this random model writes bytes that no text keeps."""
    messages: list[Any] = [{"role": "system", "content": "Tell apart: turn."}, {"role": "user", "content": "One"}]
    options: dict[str, Any] = {"model": model, "max_tokens": 9, "seed": 11, "extra_body": EXACT}
    first = client.chat.completions.create(messages=messages, **options)
    assert first.usage is not None
    reply = first.choices[0].message.content or ""
    assert not reply.endswith("\ufffd"), "choose a seed whose reply is not cut within a character"
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Two"}]
    second = client.chat.completions.create(messages=messages, **options)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + 9 - 1, "the last was never computed"


def test_the_same_prompt_again_is_cached_whole(client: OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "Said twice, word for word."}]
    answers = [client.chat.completions.create(model=model, messages=messages, max_tokens=2) for _ in range(2)]
    usage = answers[1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens


def test_text_parts_are_lines_of_one_message(client: OpenAI, model: str) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]}]
    lines: list[Any] = [{"role": "user", "content": "One\nTwo"}]
    options: dict[str, Any] = {"model": model, "max_tokens": 6, "temperature": 0, "extra_body": EXACT}
    answers = [client.chat.completions.create(messages=messages, **options) for messages in (parts, lines)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_the_last_message_is_continued_where_that_is_asked_for(client: OpenAI, model: str) -> None:
    messages: list[Any] = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    extra = EXACT | {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=4, extra_body=extra)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == _prompt_size(HELLO[0]) + len("Once upon"), "nothing stands after the open reply"
    assert not (answer.choices[0].message.content or "").startswith("Once upon")
    with pytest.raises(BadRequestError, match="add_generation_prompt"):
        client.chat.completions.create(model=model, messages=messages, extra_body={"continue_final_message": True})


def test_an_answer_can_be_sent_back_as_it_was_received(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=3)
    messages: list[Any] = [*HELLO, answer.choices[0].message.model_dump(), {"role": "user", "content": "More"}]
    assert client.chat.completions.create(model=model, messages=messages, max_tokens=3).choices


def test_what_asks_for_nothing_is_taken(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=HELLO,
        max_completion_tokens=2,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        store=False,
        logit_bias={"40": -100},
        presence_penalty=0.5,
        extra_body={"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [7], "chat_template_kwargs": {}},
    )
    assert answer.choices


def test_everything_was_given_back(server: Served) -> None:
    wait_until_idle(server)
