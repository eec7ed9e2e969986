"""`/asyncapi.yaml`: the websocket protocol described for machines, made from the models that check every message.

Invariant: nothing about a message is stated here; a model that changes changes the document.
"""

import functools
from typing import Annotated, Any, get_args

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from chatpage import __version__
from chatpage.server.protocol import PROTOCOL, ClientMessage, ServerMessage


def message_models(union: object) -> tuple[type[BaseModel], ...]:
    """Return the models of a union of messages."""
    inner = get_args(union)[0] if type(union) is type(Annotated[int, 0]) else union
    return get_args(inner)


def asyncapi_document() -> dict[str, Any]:
    """Return the protocol as an AsyncAPI 3.0 document."""
    client, server = message_models(ClientMessage), message_models(ServerMessage)
    _, schemas = models_json_schema(
        [(model, "validation") for model in (*client, *server)], ref_template="#/components/schemas/{model}"
    )
    messages = {_type_of(model): _message(model) for model in (*client, *server)}
    channel = {name: {"$ref": f"#/components/messages/{name}"} for name in messages}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": PROTOCOL,
            "version": __version__,
            "description": "Conversations as trees: runs, their text as it is written, and every change, over one websocket.",
        },
        "defaultContentType": "application/json",
        "channels": {"ws": {"address": "/ws", "messages": channel, "bindings": {"ws": {"method": "GET"}}}},
        "operations": {
            "receive": _operation("receive", client),
            "send": _operation("send", server),
        },
        "components": {"messages": messages, "schemas": schemas["$defs"]},
    }


@functools.cache
def asyncapi_yaml() -> str:
    """Return the document as YAML."""
    text: str = yaml.safe_dump(asyncapi_document(), sort_keys=False, allow_unicode=True, width=120)
    return text


def _type_of(model: type[BaseModel]) -> str:
    name: str = model.model_fields["type"].default
    return name


def _message(model: type[BaseModel]) -> dict[str, Any]:
    return {
        "name": _type_of(model),
        "summary": (model.__doc__ or "").strip().splitlines()[0],
        "payload": {"$ref": f"#/components/schemas/{model.__name__}"},
    }


def _operation(action: str, models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    messages = [{"$ref": f"#/channels/ws/messages/{_type_of(model)}"} for model in models]
    return {"action": action, "channel": {"$ref": "#/channels/ws"}, "messages": messages}
