"""Messages of `chatpage.v1`: what is read, what is refused, and how it is said."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatpage.sampling_params import SamplingParams
from chatpage.server.protocol import (
    ClientMessage,
    InvalidMessageError,
    MalformedJsonError,
    Plan,
    ResetOp,
    RunCreate,
    RunDelta,
    ServerMessage,
    Subscribe,
    TreePatch,
    UnknownTypeError,
    parse_client_message,
    parse_server_message,
)
from chatpage.server.views import ConversationView, Model, NodeView, RunParams, RunRequest
from chatpage.store.records import NodeStatus, Role, RunKind

CREATE = {"type": "run.create", "client_msg_id": "m", "conversation_id": "c", "kind": "reply", "input": "Hello"}


def read(**fields: Any) -> Any:
    return parse_client_message(json.dumps(fields))


def members(union: Any) -> list[type[Model]]:
    return list(get_args(get_args(union)[0]))


def test_every_message_has_a_type_of_its_own_a_docstring_and_refuses_unknown_keys() -> None:
    models = [*members(ClientMessage), *members(ServerMessage)]
    types = [model.model_fields["type"].default for model in models]
    assert len(set(types)) == len(types)
    assert {"hello", "subscribe", "run.create", "run.cancel", "prefix.warm", "plan", "ping", "unsubscribe"} <= set(types)
    assert {"welcome", "run.created", "run.delta", "run.snapshot", "sample.done", "run.done", "tree.patch"} <= set(types)
    assert {"kv.stats", "error", "pong", "plan.result"} <= set(types)
    for model in models:
        assert model.__doc__
        assert model.model_config["extra"] == "forbid"
        assert model.model_config["strict"] is True


def test_a_run_is_read_with_its_parameters() -> None:
    message = read(**CREATE, n=4, params={"temperature": 1, "stop": ["\n"], "logit_bias": {"7": -1.5}, "seed": 3})
    assert isinstance(message, RunCreate)
    assert isinstance(message, RunRequest)
    assert (message.kind, message.n, message.parent_id) == (RunKind.REPLY, 4, None)
    assert message.params == RunParams(temperature=1.0, stop=("\n",), logit_bias={7: -1.5}, seed=3)


def test_parameters_of_the_wire_are_those_of_the_engine() -> None:
    """A parameter that one side knows and the other does not would be dropped without a word."""
    wire = set(RunParams.model_fields) - {"template_variables"}
    assert wire == set(SamplingParams.__dataclass_fields__) - {"n"}


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("", MalformedJsonError, "not a JSON object"),
        ("{", MalformedJsonError, "not a JSON object"),
        ("[]", MalformedJsonError, "not a JSON object"),
        ("3", MalformedJsonError, "not a JSON object"),
        ('"hello"', MalformedJsonError, "not a JSON object"),
        ("null", MalformedJsonError, "not a JSON object"),
        ("[" * 100_000, MalformedJsonError, "not a JSON object"),
        ('{"a":' * 100_000, MalformedJsonError, "not a JSON object"),
        ('{"type":"ping","t":"\\ud800"}', MalformedJsonError, "not a JSON object"),
        (b"\xff\xfe{}", MalformedJsonError, "not a JSON object"),
        ('{"type":"ping","t":1' + "0" * 5000 + "}", MalformedJsonError, "not a JSON object"),
        ("{}", UnknownTypeError, "missing or unknown"),
        ('{"type":"run.delta"}', UnknownTypeError, "missing or unknown"),
        ('{"type":3}', UnknownTypeError, "missing or unknown"),
        ('{"type":"ping"}', InvalidMessageError, "ping: t: Field required"),
        ('{"type":"ping","t":"1"}', InvalidMessageError, "ping: t: "),
        ('{"type":"ping","t":NaN}', InvalidMessageError, "finite"),
        ('{"type":"ping","t":1,"u":2}', InvalidMessageError, "u: Extra inputs"),
        ('{"type":"hello","client_id":""}', InvalidMessageError, "client_id"),
        ('{"type":"hello","client_id":"a\\nb"}', InvalidMessageError, "client_id"),
        ('{"type":"subscribe"}', InvalidMessageError, "name one of"),
        ('{"type":"subscribe","run_id":"r","kv":true}', InvalidMessageError, "name one of"),
        ('{"type":"subscribe","run_id":"r","after_seq":-1}', InvalidMessageError, "after_seq"),
        ('{"type":"run.cancel","run_id":"r","sample":64}', InvalidMessageError, "sample"),
    ],
)
def test_what_is_no_message_is_refused_with_a_reason(text: str | bytes, error: type[InvalidMessageError], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        parse_client_message(text)
    assert type(raised.value) is error
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 0}, "n:"),
        ({"n": 65}, "n:"),
        ({"n": 1.0}, "n:"),
        ({"n": True}, "n:"),
        ({"kind": "shout"}, "kind"),
        ({"input": "x" * 400_001}, "input"),
        ({"input": None}, "without parent_id"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"n": 2}}, "params.n: Extra"),
        ({"params": {"stop": "x"}}, "stop"),
        ({"params": {"seed": 2**63}}, "seed"),
        ({"client_msg_id": None}, "client_msg_id"),
        ({"kind": "regenerate", "parent_id": "p"}, "input belongs to reply"),
        ({"kind": "regenerate", "input": None}, "without parent_id"),
        ({"kind": "continue", "parent_id": "p", "input": None, "prefill": "x"}, "prefill belongs to"),
        ({"kind": "fork", "parent_id": "p", "input": None}, "fork needs it"),
        ({"branch_at_token": 3}, "belongs to fork"),
        ({"branch_token_id": 3}, "belongs to fork"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused_and_the_error_names_the_message(change: dict[str, Any], says: str) -> None:
    fields = {name: value for name, value in (CREATE | change).items() if value is not None}
    with pytest.raises(InvalidMessageError, match=says) as raised:
        read(**fields)
    assert raised.value.ref == fields.get("client_msg_id")


def test_an_error_names_the_reference_even_of_an_unknown_message() -> None:
    with pytest.raises(UnknownTypeError) as raised:
        read(type="dance", ref="r1")
    assert raised.value.ref == "r1"
    with pytest.raises(UnknownTypeError) as raised:
        read(type="dance", ref="r" * 5000)
    assert raised.value.ref is None


def test_messages_survive_the_wire_without_what_is_not_set() -> None:
    node = NodeView(
        id="n", parent_id=None, role=Role.USER, text="\u20ac\n", status=NodeStatus.COMPLETE, created_at=1, num_tokens=0
    )
    conversation = ConversationView(id="c", title="", version=1, created_at=1, updated_at=1, is_pinned=False, tags=("a",))
    reset = ResetOp(conversation=conversation, nodes=(node,), choices=())
    for message in (
        TreePatch(conversation_id="c", version=1, ops=(reset,)),
        RunDelta(run_id="r", seq=1, d=((0, "a", 1), (1, "b", 2, -0.5))),
    ):
        text = message.to_json()
        assert "\n" not in text
        assert "null" not in text
        assert parse_server_message(text) == message
    for sent in (
        Subscribe(kv=True),
        Plan(conversation_id="c", kind=RunKind.FORK, parent_id="p", branch_at_token=0, ref="r"),
        RunCreate(client_msg_id="m", conversation_id="c", kind=RunKind.REPLY, input="", params=RunParams(top_k=2)),
    ):
        assert parse_client_message(sent.to_json()) == sent


def test_a_message_of_the_wrong_side_is_refused() -> None:
    with pytest.raises(UnknownTypeError):
        parse_server_message('{"type":"ping","t":1}')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = sorted({name for model in members(ClientMessage) for name in model.model_fields})
TYPES = [model.model_fields["type"].default for model in members(ClientMessage)]


@given(
    fields=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6),
    kind=st.sampled_from(TYPES) | JSON,
    cut=st.integers(0, 40),
    noise=st.binary(max_size=4),
)
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise_anything_but_our_errors(fields: dict[str, Any], kind: Any, cut: int, noise: bytes) -> None:
    whole = json.dumps(fields | {"type": kind}).encode()
    for text in (whole, whole[: len(whole) - cut], whole[:cut] + noise + whole[cut:]):
        try:
            message = parse_client_message(text)
        except InvalidMessageError:
            continue
        assert parse_client_message(message.to_json()) == message
