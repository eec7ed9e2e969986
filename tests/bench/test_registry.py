"""Which engines can be run against."""

import pytest

from chatpage.bench.peers.interface import Peer
from chatpage.bench.peers.registry import ENTRIES, OURS, Entry, parse_peers
from chatpage.errors import InvalidParameterError


def test_engines_are_read_in_the_order_given_and_once_each() -> None:
    assert parse_peers(" vllm,OpenVINO, vllm,llama.cpp") == ("vllm", "openvino", "llama.cpp")


@pytest.mark.parametrize("wrong", ["ollama", "", ",", "chatpage"])
def test_an_unknown_engine_is_refused_with_the_known_ones(wrong: str) -> None:
    with pytest.raises(InvalidParameterError, match="known are chatpage-no-cascade, transformers, openvino, onnxruntime"):
        parse_peers(wrong)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_engine_has_an_adapter_of_its_name_that_can_be_imported_without_the_engine(name: str) -> None:
    peer = ENTRIES[name].load()
    assert issubclass(peer, Peer)
    assert peer.name == name


def test_what_is_installed_is_known_without_importing_it() -> None:
    assert ENTRIES[OURS].is_installed
    assert ENTRIES["transformers"].is_installed
    assert not Entry("x", "X", "no_such_module_anywhere", "pip install x").is_installed
    assert not Entry("llama_cpp", "X", "no-such-program-anywhere", "pip install x").is_installed
