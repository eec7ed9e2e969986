"""Files that are no conversations: whatever is uploaded to be imported, the answer is typed and nothing of it is believed."""

import gzip
import io
import json
import zipfile
from collections.abc import Iterator

import httpx
import pytest

from chatpage.store import LOCAL_USER
from tests.server.serving import Served

INJECTION = "'); DROP TABLE nodes; --"
MARKUP = "<script>alert(1)</script><img src=x onerror=alert(1)>${alert(1)}"


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def zip_bomb() -> bytes:
    """Return some kilobytes that unpack to sixteen megabytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr("conversations.json", b"[" + b" " * (16 * 2**20) + b"]")
    return packed.getvalue()


HOSTILE = {
    "a zip bomb": zip_bomb(),
    "a gzip bomb": gzip.compress(b"[" * (16 * 2**20)),
    "deep arrays": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b"[" * 20_000 + b"]" * 20_000,
    "a huge number": b'[{"id": ' + b"9" * 100_000 + b"}]",
    "a lone surrogate": b'[{"title": "\\ud800", "mapping": {}}]',
    "bytes": bytes(range(256)) * 100,
    "a page": f"<html>{MARKUP}</html>".encode(),
    "sql": INJECTION.encode(),
    "nothing": b"",
    "a mapping that contains itself": b'[{"title": "x", "mapping": {"a": {"id": "a", "parent": "a", "children": ["a"]}}}]',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gets_a_typed_answer_and_the_server_goes_on(server: Served, http: httpx.Client, name: str) -> None:
    answer = http.post("/api/import", content=HOSTILE[name])
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["code"] in ("import_file", "invalid_request", "too_large")
    else:
        assert answer.json()["num_nodes_added"] == 0
    assert http.get("/health").json()["status"] == "ok"


def test_archives_are_refused_and_never_unpacked(http: httpx.Client) -> None:
    """What is never unpacked cannot fill the memory, however small it was packed."""
    answer = http.post("/api/import", content=HOSTILE["a zip bomb"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "import_file")
    assert "unpack it" in answer.json()["error"]["message"]


def test_names_and_texts_that_are_code_elsewhere_are_texts_here(server: Served, http: httpx.Client) -> None:
    """Titles, ids, roles and texts go into SQL, full-text search and pages; each must come back as it was."""
    text = f"{INJECTION} {MARKUP}"
    nodes = {
        "r": {"id": "r", "parent": None, "children": ["u"], "message": None},
        "u": {
            "id": "u",
            "parent": "r",
            "children": [],
            "message": {"id": "u", "author": {"role": "user"}, "content": {"content_type": "text", "parts": [text]}},
        },
    }
    file = [{"title": f"{INJECTION}{MARKUP}", "id": INJECTION, "conversation_id": INJECTION, "mapping": nodes}]
    before = len(server.desk.store.list_conversations(LOCAL_USER, limit=1000))
    done = http.post("/api/import", content=json.dumps(file))
    assert done.status_code == 200, done.text
    [chat_id] = done.json()["conversation_ids"]
    assert len(server.desk.store.list_conversations(LOCAL_USER, limit=1000)) == before + 1
    assert http.get(f"/api/conversations/{chat_id}").json()["ops"][0]["conversation"]["title"] == f"{INJECTION}{MARKUP}"
    [node] = [node for node in server.desk.store.get_tree(LOCAL_USER, chat_id).tree.nodes.values() if node.text]
    assert node.text == text
    for query in ("DROP TABLE", INJECTION, '"', "NEAR(", "*", "a OR b AND", "title:x"):
        assert http.get("/api/search", params={"q": query}).status_code in (200, 400, 422)
    for format in ("json", "markdown"):
        page = http.get(f"/api/conversations/{chat_id}/export", params={"format": format})
        assert not page.headers.get("content-type", "").startswith("text/html")
