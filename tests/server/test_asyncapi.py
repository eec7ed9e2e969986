"""The served description of the protocol says what the models say."""

from typing import Any, cast

import yaml  # type: ignore[import-untyped]
from pydantic import TypeAdapter

from chatpage.server import protocol
from chatpage.server.asyncapi import asyncapi_document, asyncapi_yaml, message_models
from chatpage.server.protocol import ClientMessage, ServerMessage
from chatpage.server.views import Model


def test_every_message_stands_in_the_document_with_the_schema_that_checks_it() -> None:
    document = yaml.safe_load(asyncapi_yaml())
    schemas = document["components"]["schemas"]
    for union, operation in ((ClientMessage, "receive"), (ServerMessage, "send")):
        models = message_models(union)
        adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, union))
        checked = adapter.json_schema(ref_template="#/components/schemas/{model}")
        names = set(checked["discriminator"]["mapping"])
        assert {model.model_fields["type"].default for model in models} == names
        for model in models:
            name = model.model_fields["type"].default
            assert document["components"]["messages"][name]["payload"]["$ref"] == checked["discriminator"]["mapping"][name]
            assert schemas[model.__name__] == checked["$defs"][model.__name__]
        refs = [ref["$ref"].rpartition("/")[2] for ref in document["operations"][operation]["messages"]]
        assert set(refs) == names


def test_every_message_class_of_the_protocol_is_sent_or_received() -> None:
    found = {
        thing
        for thing in vars(protocol).values()
        if isinstance(thing, type) and issubclass(thing, Model) and "type" in thing.model_fields
    }
    assert found == {*message_models(ClientMessage), *message_models(ServerMessage)}


def test_every_reference_leads_somewhere() -> None:
    document = asyncapi_document()

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(ref := value.get("$ref"), str):
                target: Any = document
                for part in ref.removeprefix("#/").split("/"):
                    target = target[part]
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(document)
