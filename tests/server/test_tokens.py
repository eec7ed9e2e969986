"""Tokens, alternatives, blocks and marks over HTTP."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.serving import Served

SHORT = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def chat(http: httpx.Client) -> tuple[str, str, str]:
    """Return the address of a conversation, the id of its question, and of its reply, which begins with "abc"."""
    made = http.post("/api/conversations", json={}).json()
    body = {"conversation_id": made["id"], "kind": "reply", "input": "Hello", "params": SHORT, "prefill": "abc"}
    run = http.post("/api/runs", json=body).json()
    _wait(http, f"/api/conversations/{made['id']}")
    return f"/api/conversations/{made['id']}", run["input_node_id"], run["node_ids"][0]


def test_the_tokens_of_a_reply_are_read(http: httpx.Client, chat: tuple[str, str, str]) -> None:
    url, question, reply = chat
    view = http.get(f"{url}/nodes/{reply}/tokens").json()
    assert [(token["text"], token["start"], token["end"]) for token in view["tokens"][:3]] == [
        ("a", 0, 1),
        ("b", 1, 2),
        ("c", 2, 3),
    ]
    assert all(isinstance(token["id"], int) for token in view["tokens"])
    assert view["ends"][:3] == [1, 2, 3]
    assert _error(http.get(f"{url}/nodes/{question}/tokens")) == (400, "invalid_request")
    assert _error(http.get(f"{url}/nodes/none/tokens")) == (404, "not_found")


def test_alternatives_to_a_token_are_read(http: httpx.Client, chat: tuple[str, str, str]) -> None:
    url, _, reply = chat
    path = f"{url}/nodes/{reply}/tokens"
    tokens = http.get(path).json()["tokens"]
    found = http.get(f"{path}/4/alternatives", params={"k": 3}).json()
    assert found["token_index"] == 4
    assert found["chosen"]["token_id"] == tokens[4]["id"]
    assert found["alternatives"][0] == found["chosen"], "it was chosen greedily"
    assert len(found["alternatives"]) == 3
    values = [choice["logprob"] for choice in found["alternatives"]]
    assert values == sorted(values, reverse=True)
    assert found["usage"]["prompt_tokens"] - found["usage"]["cached_tokens"] <= 1
    assert len(http.get(f"{path}/0/alternatives").json()["alternatives"]) == 10
    assert _error(http.get(f"{path}/100/alternatives")) == (400, "invalid_parameter")
    assert http.get(f"{path}/0/alternatives", params={"k": 21}).status_code == 422


def test_a_fork_takes_an_alternative(http: httpx.Client, chat: tuple[str, str, str]) -> None:
    url, _, reply = chat
    other = http.get(f"{url}/nodes/{reply}/tokens/4/alternatives").json()["alternatives"][1]
    body = {"conversation_id": url.rpartition("/")[2], "kind": "fork", "parent_id": reply, "params": SHORT}
    run = http.post("/api/runs", json={**body, "branch_at_token": 4, "branch_token_id": other["token_id"]}).json()
    _wait(http, url)
    ids = [[token["id"] for token in http.get(f"{url}/nodes/{n}/tokens").json()["tokens"]] for n in (reply, run["node_ids"][0])]
    assert ids[1][:5] == [*ids[0][:4], other["token_id"]]
    refused = http.post("/api/runs", json={**body, "branch_at_token": 4, "branch_token_id": 10**6})
    assert _error(refused) == (400, "invalid_parameter")


def test_the_blocks_of_paths_are_found(http: httpx.Client, chat: tuple[str, str, str]) -> None:
    url, question, reply = chat
    view = http.post(f"{url}/kv", json={"leaf_ids": [reply, question]}).json()
    whole, first = view["paths"]
    assert [span["node_id"] for span in whole["nodes"]] == [question, reply]
    assert whole["num_cached"] >= whole["num_tokens"] - 1
    num_shared = first["num_tokens"] // view["block_size"] - 1  # what follows the question is not the same everywhere
    assert num_shared > 0
    assert whole["block_ids"][:num_shared] == first["block_ids"][:num_shared]
    used = {block["id"]: block for block in http.get("/api/kv").json()["blocks"]}
    assert all(used[block_id]["num_rows"] > 0 for block_id in whole["block_ids"])
    assert _error(http.post(f"{url}/kv", json={"leaf_ids": ["none"]})) == (404, "not_found")
    assert http.post(f"{url}/kv", json={"leaf_ids": [reply] * 65}).status_code == 422
    assert http.post(f"{url}/kv", json={"leaf_ids": []}).status_code == 422


def test_a_message_is_marked_and_the_mark_is_seen(http: httpx.Client, chat: tuple[str, str, str]) -> None:
    url, _, reply = chat
    patch = http.post(f"{url}/nodes/{reply}/keep", json={"keep": True}).json()
    assert [op["node"]["is_kept"] for op in patch["ops"]] == [True]
    assert _marks(http, url)[reply] is True
    again = http.post(f"{url}/nodes/{reply}/keep", json={"keep": True}).json()
    assert again["version"] == patch["version"], "nothing changed"
    http.post(f"{url}/nodes/{reply}/keep", json={"keep": False}).raise_for_status()
    assert not any(_marks(http, url).values())
    assert _error(http.post(f"{url}/nodes/none/keep", json={"keep": True})) == (404, "not_found")


def _marks(http: httpx.Client, url: str) -> dict[str, bool]:
    [op] = http.get(url).json()["ops"]
    return {node["id"]: node["is_kept"] for node in op["nodes"]}


def _wait(http: httpx.Client, url: str) -> None:
    deadline = time.monotonic() + 60
    while any(node["status"] == "streaming" for node in http.get(url).json()["ops"][0]["nodes"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _error(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]
