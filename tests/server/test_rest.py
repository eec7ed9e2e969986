"""The tree over HTTP: every action, versions, search, presets, files, and errors of one shape."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from chatpage.store import LOCAL_USER, NewNode, Role
from tests.server.serving import Served

SHORT = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def _made(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post("/api/conversations", json=fields)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def _tree(http: httpx.Client, conversation_id: str) -> dict[str, Any]:
    [op] = http.get(f"/api/conversations/{conversation_id}").json()["ops"]
    assert op["op"] == "reset"
    tree: dict[str, Any] = op
    return tree


def _error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_conversation_is_made_changed_deleted_and_restored(http: httpx.Client) -> None:
    made = _made(http, title="Trees", system_prompt="Be brief.", tags=["a", "b"], params={"temperature": 0.5, "stop": ["x"]})
    url = f"/api/conversations/{made['id']}"
    assert (made["title"], made["tags"], made["params"]["stop"]) == ("Trees", ["a", "b"], ["x"])
    assert [node["text"] for node in _tree(http, made["id"])["nodes"]] == ["Be brief."]
    changed = http.patch(url, json={"title": "Oaks", "is_pinned": True, "tags": ["c"]}).json()
    assert (changed["title"], changed["is_pinned"], changed["tags"]) == ("Oaks", True, ["c"])
    assert changed["params"] == made["params"], "what is left out stays"
    assert made["id"] in [chat["id"] for chat in http.get("/api/conversations", params={"tag": "c"}).json()["conversations"]]
    assert {"name": "c", "num_conversations": 1} in http.get("/api/tags").json()["tags"]
    assert http.delete(url).json()["is_deleted"] is True
    assert _error(http.get(url)) == (404, "not_found")
    gone = http.get("/api/conversations", params={"deleted": True}).json()["conversations"]
    assert made["id"] in [chat["id"] for chat in gone]
    assert http.post(f"{url}/restore").json()["is_deleted"] is False
    assert _tree(http, made["id"])["conversation"]["title"] == "Oaks"


def test_a_stale_version_is_a_conflict_that_names_the_version_now(http: httpx.Client) -> None:
    made = _made(http)
    url = f"/api/conversations/{made['id']}"
    now = http.patch(url, json={"title": "1"}, params={"expected_version": made["version"]}).json()["version"]
    for method, path, body in (
        ("PATCH", url, {"title": "2"}),
        ("POST", f"{url}/nodes", {"role": "user", "text": "Hi"}),
        ("DELETE", url, None),
    ):
        answer = http.request(method, path, json=body, params={"expected_version": made["version"]})
        assert _error(answer) == (409, "conflict")
        assert answer.json()["error"]["version"] == now
    assert _tree(http, made["id"])["conversation"]["title"] == "1"


def test_messages_are_edited_selected_deleted_and_restored(http: httpx.Client) -> None:
    made = _made(http)
    nodes = f"/api/conversations/{made['id']}/nodes"
    first = http.post(nodes, json={"role": "user", "text": "One"}).json()
    below = http.post(nodes, json={"role": "assistant", "text": "Below", "parent_id": first["id"]}).json()
    second = http.post(f"{nodes}/{first['id']}/edit", json={"text": "Two"}).json()
    assert (second["role"], second["text"]) == ("user", "Two")
    assert {"child_id": second["id"]} in _tree(http, made["id"])["choices"]
    patch = http.post(f"{nodes}/{below['id']}/select").json()
    assert {"op": "choose", "child_id": first["id"]} in patch["ops"]
    assert {"child_id": first["id"]} in _tree(http, made["id"])["choices"], "and it is still so on the next reading"
    [op] = [op for op in http.delete(f"{nodes}/{first['id']}").json()["ops"] if op["op"] == "remove"]
    assert set(op["node_ids"]) == {first["id"], below["id"]}
    assert [node["text"] for node in _tree(http, made["id"])["nodes"]] == ["Two"]
    http.post(f"{nodes}/{first['id']}/restore").raise_for_status()
    assert len(_tree(http, made["id"])["nodes"]) == 3


def test_a_fork_points_at_the_same_messages(http: httpx.Client) -> None:
    made = _made(http)
    url = f"/api/conversations/{made['id']}"
    node = http.post(f"{url}/nodes", json={"role": "user", "text": "One"}).json()
    http.post(f"{url}/nodes", json={"role": "assistant", "text": "Two", "parent_id": node["id"]})
    fork = http.post(f"{url}/fork", json={"node_id": node["id"], "title": "Fork"}).json()
    assert (fork["title"], fork["forked_from"]) == ("Fork", made["id"])
    assert [found["id"] for found in _tree(http, fork["id"])["nodes"]] == [node["id"]]


def test_runs_are_started_answered_and_stopped(http: httpx.Client) -> None:
    made = _made(http)
    body = {"conversation_id": made["id"], "kind": "reply", "input": "Hello", "n": 2, "params": SHORT, "client_msg_id": "r1"}
    run = http.post("/api/runs", json=body).json()
    assert http.post("/api/runs", json=body).json()["run_id"] == run["run_id"], "sent twice, started once"
    answered = f"/api/conversations/{made['id']}/nodes/{run['input_node_id']}/answer"
    other = http.post(answered, json={"text": "Hello again", "params": SHORT | {"stop": ["\n\n"]}})
    assert other.status_code == 201, other.text
    assert http.post(f"/api/runs/{run['run_id']}/cancel", json={"sample": 1}).status_code == 204
    assert _error(http.post(f"/api/runs/{run['run_id']}/cancel", json={"sample": 2})) == (400, "invalid_parameter")
    assert _error(http.post("/api/runs/none/cancel", json={})) == (404, "not_found")
    deadline = time.monotonic() + 60
    while any(node["status"] == "streaming" for node in _tree(http, made["id"])["nodes"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(_tree(http, made["id"])["nodes"]) == 5


def test_search_finds_the_message_and_a_branch_that_shows_it(http: httpx.Client, server: Served) -> None:
    made = _made(http, title="Owls")
    nodes = f"/api/conversations/{made['id']}/nodes"
    node = http.post(nodes, json={"role": "user", "text": "A parliament of owlets"}).json()
    [hit] = http.get("/api/search", params={"q": "owlets"}).json()["hits"]
    assert (hit["conversation_id"], hit["node_id"], hit["title"]) == (made["id"], node["id"], "Owls")
    [[start, end]] = hit["highlights"]
    assert hit["snippet"][start:end] == "owlets"
    for odd in ('"', "* OR", "NEAR(", "a" * 1000, "\x00"):
        assert http.get("/api/search", params={"q": odd}).status_code == 200


def test_presets_are_made_used_changed_and_removed(http: httpx.Client) -> None:
    preset = http.post("/api/presets", json={"name": "Pirate", "system_prompt": "Arr.", "params": {"top_k": 3}}).json()
    assert _error(http.post("/api/presets", json={"name": "Pirate"})) == (409, "conflict")
    made = _made(http, preset_id=preset["id"])
    assert [node["text"] for node in _tree(http, made["id"])["nodes"]] == ["Arr."]
    changed = http.patch(f"/api/presets/{preset['id']}", json={"system_prompt": "Yarr."}).json()
    assert (changed["name"], changed["system_prompt"], changed["params"]) == ("Pirate", "Yarr.", {"top_k": 3})
    assert http.get("/api/presets").json()["presets"] == [changed]
    http.delete(f"/api/presets/{preset['id']}").raise_for_status()
    assert http.get("/api/presets").json() == {"presets": []}


def test_an_export_is_imported_once(http: httpx.Client) -> None:
    made = _made(http, title="Out and in")
    nodes = f"/api/conversations/{made['id']}/nodes"
    http.post(nodes, json={"role": "user", "text": "Ünïcödé 🦉"})
    answer = http.get("/api/export", params={"id": made["id"]})
    assert answer.headers["content-disposition"] == 'attachment; filename="conversations.json"'
    assert "Ünïcödé 🦉" in json.dumps(json.loads(answer.text), ensure_ascii=False)
    report = http.post("/api/import", content=answer.content).json()
    assert (report["num_added"], report["num_unchanged"], report["num_skipped"]) == (0, 1, 0)
    assert http.get("/api/export", params={"id": made["id"], "format": "markdown"}).text.count("🦉") == 1
    assert _error(http.get("/api/export", params={"id": "none"})) == (404, "not_found")
    assert _error(http.get("/api/export", params={"format": "docx"})) == (400, "invalid_request")
    assert _error(http.post("/api/import", content=b"\x00\xff not a file")) == (400, "import_file")


def test_the_block_map_names_the_totals_and_every_block(http: httpx.Client) -> None:
    kv = http.get("/api/kv").json()
    assert len(kv["blocks"]) == kv["stats"]["num_blocks"]
    assert {"id", "state", "ref_count", "num_rows", "holders"} == set(kv["blocks"][0])


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/api/conversations", {"titel": "x"}, 422),
        ("POST", "/api/conversations", {"title": 1}, 422),
        ("POST", "/api/conversations", {"title": "x" * 501}, 422),
        ("POST", "/api/conversations", {"title": "\U0001f642" * 501}, 422),
        ("POST", "/api/conversations", {"params": {"temperature": -1}}, 422),
        ("POST", "/api/conversations", {"params": {"seed": "1"}}, 422),
        ("POST", "/api/conversations", {"preset_id": "none"}, 404),
        ("POST", "/api/conversations", [], 422),
        ("POST", "/api/runs", {"conversation_id": "none", "kind": "reply", "input": "Hi"}, 404),
        ("POST", "/api/runs", {"conversation_id": "none", "kind": "sing", "input": "Hi"}, 422),
        ("GET", "/api/conversations?limit=0", None, 422),
        ("GET", "/api/conversations?offset=99999999999999999999", None, 422),
        ("GET", "/api/conversations/%00", None, 404),
        ("GET", "/api/nothing", None, 404),
        ("PUT", "/api/conversations", {}, 405),
    ],
)
def test_a_wrong_request_gets_an_error_of_the_one_shape(
    http: httpx.Client, method: str, path: str, body: object, status: int
) -> None:
    answer = http.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"code", "message", "retryable"}


def test_broken_json_is_the_clients_mistake(http: httpx.Client) -> None:
    for content in (b"{", b"\xff\xfe", b'{"title": "\\ud800"}', b"[" * 100_000, b'{"params": {"temperature": NaN}}'):
        answer = http.post("/api/conversations", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code in (201, 400, 422), answer.text


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(http: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(12):
            yield b" " * 2**20

    for content in (b" " * (8 * 2**20 + 1), chunks()):
        answer = http.post("/api/conversations", content=content, headers={"Content-Type": "application/json"})
        assert _error(answer) == (413, "too_large")


def test_health_and_readiness_and_both_descriptions_are_served(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "engine": "ready", "saving": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}
    assert "/api/runs" in http.get("/openapi.json").json()["paths"]
    assert http.get("/asyncapi.yaml").text.startswith("asyncapi: 3.0.0")


def test_reading_a_long_conversation_sends_it_whole(http: httpx.Client, server: Served) -> None:
    made = _made(http)
    news = [NewNode(role=Role.USER, text=f"{i}") for i in range(500)]
    for start in range(0, 500, 100):
        server.desk.store.add_siblings(LOCAL_USER, made["id"], None, news[start : start + 100])
    assert len(_tree(http, made["id"])["nodes"]) == 500
