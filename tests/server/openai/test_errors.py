"""Everything that fails on this surface has the shape of OpenAI; nothing that was asked for is passed over."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from chatpage.server.openai.errors import describe, is_openai_path
from chatpage.server.settings import ServeSettings
from chatpage.store import LOCAL_USER, User, UserId
from tests.server.openai.clients import HELLO, model_of, official, plain
from tests.server.serving import Served, serving

CHAT = "/v1/chat/completions"
OBFUSCATION = "stream_options.include_obfuscation"
Expected = tuple[int, str | None, str | None]


def _parts(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


def _error(answer: httpx.Response) -> Expected:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return answer.status_code, error["code"], error["param"]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"temprature": 1}, "unknown_parameter", "temprature"),
        ({"messages": [{"role": "user", "content": "a", "mood": "b"}]}, "unknown_parameter", "messages[0].mood"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "unsupported_parameter", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter", "functions"),
        ({"response_format": {"type": "json_object"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "unknown_parameter", "response_format.json_schema"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"reasoning_effort": "low"}, "unsupported_parameter", "reasoning_effort"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"user": "me"}, "unsupported_parameter", "user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "unsupported_value",
            "messages[0].content",
        ),
        ({"messages": [_parts({"type": "input_audio"})]}, "unsupported_value", "messages[0].content"),
        ({"messages": [_parts("text")]}, "unsupported_value", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": "Bob"}]}, "unsupported_parameter", "messages[0].name"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": None}]}, "invalid_type", "messages[0].content"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "Hi"}, "invalid_type", "messages"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": "2"}, "invalid_type", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"top_logprobs": 2}, "invalid_parameter", None),
        ({"top_logprobs": 21, "logprobs": True}, "invalid_value", "top_logprobs"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "invalid_parameter", None),
        ({"stop": ["a"] * 17}, "invalid_parameter", None),
        ({"stop": [""]}, "invalid_value", "stop[0]"),
        ({"logit_bias": {"999999": 1}}, "invalid_parameter", None),
        ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias.a"),
        ({"stream_options": {"include_usage": True}}, "invalid_parameter", None),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "unsupported_parameter",
            "stream_options.include_obfuscation",
        ),
        ({"chat_template_kwargs": {"tokenize": False}}, "invalid_parameter", None),
        ({"messages": [{"role": "user", "content": "x" * 2100}]}, "context_length_exceeded", None),
        ({"n": 40}, "invalid_parameter", None),
    ],
)
@pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=["whole", "stream"])
def test_what_a_chat_cannot_have_is_named_and_refused(
    http: httpx.Client, fields: dict[str, Any], code: str, param: str | None, stream: dict[str, Any]
) -> None:
    """A stream that cannot begin is an error with a status, not a stream with an error in it."""
    if fields == {"stream_options": {"include_usage": True}} and stream:
        fields = {"stream_options": {"include_usage": 1}}
        code, param = "invalid_type", "stream_options.include_usage"
    [model] = http.get("/v1/models").json()["data"]
    body = {"model": model["id"], "messages": HELLO, "max_tokens": 2} | stream | fields
    answer = http.post(CHAT, json=body)
    assert _error(answer) == (400, code, param), answer.text


def test_the_official_client_raises_its_own_exceptions(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=HELLO, extra_body={"temprature": 1})
    assert (wrong.value.code, wrong.value.param) == ("unknown_parameter", "temprature")


def test_the_model_is_listed_and_found(client: OpenAI, model: str) -> None:
    [card] = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (model, "model", "chatpage")
    assert client.models.retrieve(model).id == model


@pytest.mark.parametrize(
    ("method", "path", "content", "expected"),
    [
        ("POST", CHAT, b"{", (400, "invalid_json", None)),
        ("POST", CHAT, b"[]", (400, "invalid_type", None)),
        ("POST", CHAT, b"[" * 900 + b"]" * 900, (400, "invalid_json", None)),
        ("POST", CHAT, b'{"model": "\\ud800", "messages": []}', (400, "invalid_json", None)),
        ("POST", CHAT, b"", (400, "missing_required_parameter", None)),
        ("POST", CHAT, b" " * (8 * 2**20 + 1), (413, "too_large", None)),
        ("GET", CHAT, None, (405, "method_not_allowed", None)),
        ("GET", "/v1/nothing", None, (404, "not_found", None)),
        ("POST", "/v1/embeddings", b"{}", (404, "not_found", None)),
    ],
)
def test_broken_and_lost_requests_have_the_shape_too(
    http: httpx.Client, method: str, path: str, content: bytes | None, expected: Expected
) -> None:
    answer = http.request(method, path, content=content, headers={"Content-Type": "application/json"})
    assert _error(answer) == expected, answer.text


def test_the_other_api_keeps_its_own_shape(http: httpx.Client) -> None:
    assert set(http.get("/api/nothing").json()["error"]) == {"code", "message", "retryable"}
    assert is_openai_path("/v1/models")
    assert not is_openai_path("/api/runs")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str]]:
    """A server that other machines could reach, and the key of a user."""
    settings = ServeSettings(host="0.0.0.0")
    with serving(tmp_path_factory.mktemp("guarded"), settings=settings) as served:
        user: User = served.desk.store.create_user("ann")
        _, secret = served.desk.store.create_api_key(user.id, name="test")
        yield served, secret


def test_where_keys_are_needed_a_made_up_one_is_refused(guarded: tuple[Served, str]) -> None:
    served, secret = guarded
    for key in ("none", "cp-wrong"):
        with official(served, key) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    with plain(served) as http:
        answer = http.get("/v1/models", headers={"Accept": "application/json"})
        assert _error(answer) == (401, "invalid_api_key", None)
        assert answer.headers["www-authenticate"] == "Bearer"
    with official(served, secret) as client:
        assert client.models.list().data[0].id == model_of(served)


def test_on_loopback_a_made_up_key_is_the_local_user_and_a_mistyped_one_is_refused(server: Served) -> None:
    """Client libraries insist on some key; a key of ours that is wrong is a mistake all the same."""
    with official(server, "anything") as client:
        made = client.responses.create(model=model_of(server), input="Hi", max_output_tokens=1)
    run = server.desk.store.get_run(LOCAL_USER, made.id.removeprefix("resp_"))  # type: ignore[arg-type]
    assert run.user_id == UserId("local")
    with official(server, "cp-mistyped") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_foreign_pages_are_refused_in_the_shape(http: httpx.Client) -> None:
    assert _error(http.get("/v1/models", headers={"Origin": "http://evil.example"})) == (403, "forbidden", None)


def test_of_several_problems_the_most_telling_one_is_named() -> None:
    problems: list[dict[str, Any]] = [
        {"type": "string_type", "loc": ("body", "input", "constrained-str"), "msg": "Input should be a valid string"},
        {"type": "unsupported_value", "loc": ("body", "input", "tuple[Message, ...]", 0, "content"), "msg": "No images"},
    ]
    assert describe(problems) == ("unsupported_value", "No images.", "input[0].content")


def test_the_documentation_names_every_endpoint_and_its_errors(http: httpx.Client, tmp_path: Path) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v1/models", CHAT, "/v1/completions", "/v1/responses", "/tokenize", "/detokenize", "/apply-template"):
        [operation] = paths[path].values()
        assert {"400", "401", "429", "503"} <= operation["responses"].keys()
