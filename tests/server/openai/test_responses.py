"""Responses over HTTP: a chain is a conversation on shared blocks, streams resume exactly, and ids outlive the server."""

import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from chatpage.store import LOCAL_USER, Node, Role, RunId
from tests.server.openai.clients import EXACT, kv, model_of, official, wait_until_idle
from tests.server.serving import Served, serving

SEED: dict[str, Any] = {"extra_body": EXACT | {"seed": 7}}


def _ask(client: OpenAI, model: str, text: Any = "Hello", **fields: Any) -> Any:
    """Ask, and return the response; its items are of so many types that types are of no help here."""
    return client.responses.create(model=model, input=text, **{"max_output_tokens": 8, **SEED, **fields})


def _usage(response: Response) -> tuple[int, int, int]:
    assert response.usage is not None
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    return usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens


def _path(served: Served, response_id: str) -> tuple[Node, ...]:
    """Return the conversation of a response up to its reply, as the page would show it."""
    run = served.desk.store.get_run(LOCAL_USER, RunId(response_id.removeprefix("resp_")))
    return served.desk.store.get_path(LOCAL_USER, run.conversation_id, leaf_id=run.samples[0].node_id)


def test_a_response_has_what_the_client_expects(client: OpenAI, model: str) -> None:
    made = _ask(client, model, instructions="Be brief.", metadata={"topic": "greetings"}, temperature=0.5, user="me")
    assert (made.object, made.model, made.instructions) == ("response", model, "Be brief.")
    assert made.metadata == {"topic": "greetings"}
    assert (made.temperature, made.top_p, made.max_output_tokens, made.user) == (0.5, 1.0, 8, "me")
    assert (made.status, made.error, made.previous_response_id) == ("incomplete", None, None)
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    [message] = made.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert made.output_text
    assert _usage(made)[2] == 8


def test_the_end_of_the_model_completes_a_response(client: OpenAI, model: str, server: Served) -> None:
    [end] = server.desk.running.info.eos_token_ids
    made = _ask(client, model, extra_body={"logit_bias": {str(end): 100}})
    assert (made.status, made.incomplete_details) == ("completed", None)
    assert made.completed_at is not None
    assert made.output[0].status == "completed"


def test_a_chain_is_a_conversation_that_computes_only_what_is_new(client: OpenAI, model: str, server: Served) -> None:
    first = _ask(client, model, "One", instructions="Count.")
    second = _ask(client, model, "Two", instructions="Count.", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert _usage(second)[1] == _usage(first)[0] + _usage(first)[2] - 1, "the last token was never computed"
    nodes = _path(server, second.id)
    texts = [first.output_text, second.output_text]
    assert [node.text for node in nodes] == ["Count.", "One", texts[0], "Two", texts[1]]
    conversations = server.desk.store.list_conversations(LOCAL_USER)
    assert conversations[0].title == "One"


def test_a_response_forks_as_often_as_it_is_gone_on_from(client: OpenAI, model: str, server: Served) -> None:
    first = _ask(client, model, "Root of two branches")
    left, right = (_ask(client, model, text, previous_response_id=first.id) for text in ("Left", "Right"))
    assert _path(server, left.id)[:2] == _path(server, right.id)[:2], "the same messages, not copies"
    assert _usage(right)[1] >= _usage(first)[0] + _usage(first)[2] - 1


def test_instructions_are_not_inherited_and_equal_ones_share_all(client: OpenAI, model: str, server: Served) -> None:
    first = _ask(client, model, "One", instructions="Speak in rhymes.")
    other = _ask(client, model, "Two", instructions="Speak in prose.", previous_response_id=first.id)
    none = _ask(client, model, "Two", previous_response_id=first.id)
    assert [node.text for node in _path(server, other.id)][:3] == ["Speak in prose.", "One", first.output_text]
    assert [node.role for node in _path(server, none.id)] == [Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert _path(server, other.id)[2].token_ids == _path(server, first.id)[2].token_ids, "history keeps its tokens"
    third = _ask(client, model, "Three", instructions="Speak in prose.", previous_response_id=other.id)
    assert _usage(third)[1] == _usage(other)[0] + _usage(other)[2] - 1


def test_messages_of_every_role_can_start_a_chain(client: OpenAI, model: str, server: Served) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello!", "annotations": []}]},
        {"role": "user", "content": "Bye"},
    ]
    made = _ask(client, model, items)
    assert [(node.role, node.text) for node in _path(server, made.id)[:-1]] == [
        (Role.SYSTEM, "Be kind."),
        (Role.USER, "Hi"),
        (Role.ASSISTANT, "Hello!"),
        (Role.USER, "Bye"),
    ]
    again: list[Any] = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in made.output), items[-1]]
    assert _ask(client, model, again).output_text, "output items can be sent back as they were received"
    listed: Any = client.responses.input_items.list(made.id, order="asc").data
    assert [(item.type, item.role) for item in listed] == [
        ("message", "system"),
        ("message", "user"),
        ("message", "assistant"),
        ("message", "user"),
    ]
    pages = client.responses.input_items.list(made.id, limit=3)
    assert [item.id for item in pages] == [item.id for item in reversed(listed)], "page by page, the last first"


def test_a_stream_is_typed_and_numbered_and_ends_with_the_response(client: OpenAI, model: str) -> None:
    with client.responses.create(model=model, input="Hi", max_output_tokens=12, stream=True, **SEED) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(set(numbers))
    final = events[-1].response
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    assert client.responses.retrieve(final.id) == final


def test_the_helper_of_the_client_gathers_a_stream(client: OpenAI, model: str, server: Served) -> None:
    [end] = server.desk.running.info.eos_token_ids
    ending = {"logit_bias": {str(end): 100}, "min_tokens": 6}
    with client.responses.stream(model=model, input="Hi", extra_body=ending) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "from the store"])
def test_a_stream_resumes_exactly_once_from_every_number(tmp_path: Path, is_live: bool) -> None:
    """Elsewhere a client that came back got some text twice, or never."""
    with serving(tmp_path) as served, official(served) as client:
        with client.responses.create(model=model_of(served), input="Hi", max_output_tokens=20, stream=True, **SEED) as stream:
            events: list[Any] = [event.to_dict() for event in stream]
        response_id = events[0]["response"]["id"]
        if not is_live:
            _forget_logs(served)
        text = events[-1]["response"]["output"][0]["content"][0]["text"]
        for seen in events:
            after: Any = seen["sequence_number"]
            with client.responses.retrieve(response_id, stream=True, starting_after=after) as rest:
                later = [event.to_dict() for event in rest]
            had = "".join(str(event["delta"]) for event in events if "delta" in event and event["sequence_number"] <= after)
            got = "".join(str(event["delta"]) for event in later if "delta" in event)
            assert had + got == text
            others = [event for event in events if event["sequence_number"] > after and "delta" not in event]
            assert [event for event in later if "delta" not in event] == others


def test_a_response_goes_on_without_its_client_and_is_read_to_its_end(client: OpenAI, model: str) -> None:
    stream = client.responses.create(model=model, input="Hi", max_output_tokens=300, stream=True, **SEED)
    text, number, response_id = "", 0, ""
    for event in stream:
        number = event.sequence_number
        if event.type == "response.created":
            response_id = event.response.id
        if event.type == "response.output_text.delta":
            text += event.delta
            break
    stream.close()
    with client.responses.retrieve(response_id, stream=True, starting_after=number) as rest:
        for event in rest:
            if event.type == "response.output_text.delta":
                text += event.delta
    assert text == client.responses.retrieve(response_id).output_text
    assert _usage(client.responses.retrieve(response_id))[2] == 300


def test_ids_mean_the_same_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path) as served, official(served) as client:
        first = _ask(client, model_of(served), "One", instructions="Count.", metadata={"a": "b"})
        warm = client.responses.create(model=model_of(served), input="Warm", extra_body={"generate": False})
    with serving(tmp_path) as served, official(served) as client:
        assert client.responses.retrieve(first.id) == first
        assert client.responses.retrieve(warm.id).status == "completed"
        second = _ask(client, model_of(served), "Two", instructions="Count.", previous_response_id=first.id)
        assert [node.text for node in _path(served, second.id)][1::2] == ["One", "Two"]
        assert _ask(client, model_of(served), "On", previous_response_id=warm.id).output_text


def test_a_response_that_the_server_interrupted_has_failed_and_keeps_its_text(tmp_path: Path) -> None:
    with serving(tmp_path) as served, official(served) as client:
        stream = client.responses.create(model=model_of(served), input="Hi", max_output_tokens=1500, stream=True, **SEED)
        begun = next(event.response.id for event in stream if event.type == "response.created")
        next(event for event in stream if event.type == "response.output_text.delta")
        stream.close()
    with serving(tmp_path) as served, official(served) as client:
        found = client.responses.retrieve(begun)
        assert found.status == "failed"
        assert found.error is not None
        assert "stopped" in found.error.message
        assert found.output_text
        assert _ask(client, model_of(served), "Go on", previous_response_id=begun).output_text


def test_in_the_background_a_response_is_polled_and_cancelled(client: OpenAI, model: str) -> None:
    made = _ask(client, model, background=True, max_output_tokens=1500)
    assert (made.status, made.background, made.output) == ("in_progress", True, [])
    assert client.responses.retrieve(made.id).status == "in_progress"
    cancelled = client.responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert cancelled.usage is not None
    assert cancelled.usage.output_tokens < 1500
    assert client.responses.cancel(made.id) == cancelled, "to cancel twice changes nothing"
    short = _ask(client, model, background=True)
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(short.id)).status == "in_progress":
        assert time.monotonic() < deadline
    assert found.output_text


def test_a_prompt_without_a_reply_warms_what_follows(client: OpenAI, model: str, server: Served) -> None:
    before = kv(server)["generated_tokens"]
    warm = client.responses.create(model=model, input="A long story", instructions="Warm.", extra_body={"generate": False})
    assert (warm.status, warm.output) == ("completed", [])
    assert kv(server)["generated_tokens"] == before
    assert client.responses.retrieve(warm.id).output == []
    reply = _ask(client, model, "And?", instructions="Warm.", previous_response_id=warm.id)
    assert _usage(reply)[1] == _usage(warm)[0], "all that was warmed is found"
    only = client.responses.create(model=model, instructions="Only this.", extra_body={"generate": False})
    assert _ask(client, model, "Hi", instructions="Only this.", previous_response_id=only.id).output_text


def test_what_is_not_stored_leaves_no_trace_and_has_log_probabilities(client: OpenAI, model: str, server: Served) -> None:
    num = len(server.desk.store.list_conversations(LOCAL_USER, limit=1000))
    made = _ask(client, model, store=False, include=["message.output_text.logprobs"], top_logprobs=2)
    part: Any = made.output[0].content[0]
    assert len(part.logprobs) == 8
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)
    assert made.store is False
    assert len(server.desk.store.list_conversations(LOCAL_USER, limit=1000)) == num
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        _ask(client, model, previous_response_id=made.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_client_that_keeps_the_items_itself_finds_all_of_the_turn_before(client: OpenAI, model: str) -> None:
    items: list[Any] = [{"role": "user", "content": "Kept by the client"}]
    first = _ask(client, model, items, store=False, max_output_tokens=3)
    assert not first.output_text.endswith("\ufffd"), "choose a seed whose reply is not cut within a character"
    items += [item.model_dump() for item in first.output]
    second = _ask(client, model, [*items, {"role": "user", "content": "More"}], store=False)
    assert _usage(second)[1] == _usage(first)[0] + _usage(first)[2] - 1


def test_a_stored_response_can_be_gone_on_from_without_storing(client: OpenAI, model: str, server: Served) -> None:
    first = _ask(client, model, "One")
    num_nodes = len(_path(server, first.id))
    second = _ask(client, model, "Two", previous_response_id=first.id, store=False)
    assert _usage(second)[1] == _usage(first)[0] + _usage(first)[2] - 1
    run = server.desk.store.get_run(LOCAL_USER, RunId(first.id.removeprefix("resp_")))
    assert len(server.desk.store.get_tree(LOCAL_USER, run.conversation_id).tree.nodes) == num_nodes


def test_a_deleted_response_is_gone_with_what_follows_it(client: OpenAI, model: str, server: Served) -> None:
    first = _ask(client, model, "One", instructions="Count.")
    second = _ask(client, model, "Two", instructions="Count.", previous_response_id=first.id)
    third = _ask(client, model, "Three", instructions="Count.", previous_response_id=second.id)
    conversation_id = server.desk.store.get_run(LOCAL_USER, RunId(first.id.removeprefix("resp_"))).conversation_id
    client.responses.delete(second.id)
    assert client.responses.retrieve(first.id) == first
    for gone in (second.id, third.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError):
            _ask(client, model, "On", previous_response_id=gone)
    client.responses.delete(first.id)
    left = {chat.id for chat in server.desk.store.list_conversations(LOCAL_USER, limit=1000)}
    assert conversation_id not in left, "nothing but the instructions was left of it"


def test_responses_of_others_are_not_there(http: httpx.Client, client: OpenAI, model: str, server: Served) -> None:
    made = _ask(client, model)
    ann = server.desk.store.create_user("ann")
    _, key = server.desk.store.create_api_key(ann.id, name="test")
    with official(server, key) as other:
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError):
            _ask(other, model, previous_response_id=made.id)
        mine = _ask(other, model)
    assert _usage(mine)[1] == 0, "and a probe sees nothing of their cache"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "unsupported_parameter", "prompt"),
        ({"max_tool_calls": 1}, "unsupported_parameter", "max_tool_calls"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "unknown_parameter", "text.format.name"),
        ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_value",
            "input[0].content",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "unknown_parameter", "input[0].call_id"),
        ({"input": []}, "invalid_parameter", None),
        ({"input": ""}, "invalid_parameter", None),
        ({"input": [{"role": "assistant", "content": "x"}]}, "invalid_request", None),
        ({"input": "x" * 2100}, "context_length_exceeded", None),
        ({"include": ["reasoning.encrypted_content"], "store": False}, "invalid_value", "include[0]"),
        ({"top_logprobs": 2}, "invalid_parameter", None),
        ({"background": True, "store": False}, "invalid_parameter", None),
        ({"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"max_tokens": 5}, "unknown_parameter", "max_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_not_found", "previous_response_id"),
        ({"stream": True, "previous_response_id": "resp_1"}, "previous_response_not_found", "previous_response_id"),
        ({"stream": True, "generate": False}, "invalid_parameter", None),
        ({"model": "gpt-9"}, "model_not_found", "model"),
    ],
)
def test_what_a_response_cannot_have_is_named_and_refused(
    http: httpx.Client, server: Served, fields: dict[str, Any], code: str, param: str | None
) -> None:
    num = len(server.desk.store.list_conversations(LOCAL_USER, limit=1000))
    answer = http.post("/v1/responses", json={"model": model_of(server), "input": "Hi"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404 if code == "model_not_found" else 400, code, param)
    for deleted in (False, True):
        found = server.desk.store.list_conversations(LOCAL_USER, limit=1000, deleted=deleted)
        assert deleted or len(found) == num, "what is refused leaves no conversation"


@pytest.mark.parametrize("path", ["resp_x", "x", "resp_", "resp_a_b", "resp_%00", "resp_" + "a" * 500])
def test_an_id_that_is_none_is_not_found(http: httpx.Client, path: str) -> None:
    for method, url in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
        answer = http.request(method, f"/v1/responses/{path}{url}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found"), (method, url)


def test_queries_that_would_be_passed_over_are_refused(http: httpx.Client, client: OpenAI, model: str) -> None:
    made = _ask(client, model)
    url = f"/v1/responses/{made.id}"
    for query in ("include=message.output_text.logprobs", "starting_after=3", "stream=true&starting_after=-1", "stream=maybe"):
        assert http.get(f"{url}?{query}").status_code == 400, query
    for query in ("limit=0", "order=up", "after=msg_x", "before=msg_x"):
        assert http.get(f"{url}/input_items?{query}").status_code == 400, query


def test_a_run_of_the_page_is_no_response(http: httpx.Client, server: Served) -> None:
    chat = server.conversation()
    body = {"conversation_id": chat.id, "kind": "reply", "input": "Hi", "params": {"max_tokens": 2}}
    run = http.post("/api/runs", json=body).json()
    assert http.get(f"/v1/responses/resp_{run['run_id']}").status_code == 404
    assert http.get(f"/v1/responses/resp_{chat.id}_{run['input_node_id']}").status_code == 404


def test_everything_was_given_back(server: Served) -> None:
    wait_until_idle(server)


def _forget_logs(served: Served) -> None:
    """Let every ended run be read from the store."""
    logs = served.desk.session.logs
    logs._kept_s = -1.0
    logs._forget_old()
    assert not len(logs)
