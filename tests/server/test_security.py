"""Foreign pages and made-up names are refused before anything is accepted; keys tell users apart."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers
from websockets.exceptions import InvalidStatus

from chatpage.chaos.disks import Disk
from chatpage.errors import ConfigError, StoreFullError
from chatpage.server.problems import ForbiddenError
from chatpage.server.security import Auth, check_source
from chatpage.server.serve import check_access
from chatpage.server.settings import ServeSettings, is_loopback_name
from chatpage.store import LOCAL_USER, Store
from tests.server.serving import Served, dial, serving

LOOPBACK = ServeSettings()
OPEN = ServeSettings(host="0.0.0.0", allowed_origins=("https://chat.example",))


@pytest.mark.parametrize(
    ("settings", "host", "origin"),
    [
        (LOOPBACK, "localhost:8642", None),
        (LOOPBACK, "127.0.0.1:8642", "http://127.0.0.1:8642"),
        (LOOPBACK, "[::1]:8642", "http://[::1]:8642"),
        (LOOPBACK, "LOCALHOST", "http://localhost"),
        (ServeSettings(allowed_hosts=("chat.lan",)), "chat.lan:1", "http://chat.lan:1"),
        (OPEN, "chat.lan", "https://chat.example"),
        (OPEN, "chat.lan", "https://chat.lan"),
        (ServeSettings(host="0.0.0.0", allowed_hosts=("chat.lan",)), "chat.lan", None),
    ],
)
def test_own_pages_and_own_names_are_let_in(settings: ServeSettings, host: str, origin: str | None) -> None:
    check_source(Headers({"host": host} | ({} if origin is None else {"origin": origin})), settings)


@pytest.mark.parametrize(
    ("settings", "host", "origin"),
    [
        (LOOPBACK, "evil.example:8642", None),
        (LOOPBACK, "127.0.0.1.evil.example", None),
        (LOOPBACK, "localhost.evil.example", None),
        (LOOPBACK, "[broken", None),
        (LOOPBACK, "", None),
        (LOOPBACK, "localhost:8642", "http://evil.example"),
        (LOOPBACK, "localhost:8642", "http://localhost:9999"),
        (LOOPBACK, "localhost:8642", "null"),
        (LOOPBACK, "localhost:8642", "file://localhost:8642"),
        (LOOPBACK, "localhost:8642", "http://user@localhost:8642"),
        (LOOPBACK, "localhost:8642", "http://[broken"),
        (OPEN, "chat.lan", "http://chat.example"),
        (ServeSettings(host="0.0.0.0", allowed_hosts=("chat.lan",)), "localhost", None),
    ],
)
def test_foreign_pages_and_made_up_names_are_refused(settings: ServeSettings, host: str, origin: str | None) -> None:
    with pytest.raises(ForbiddenError):
        check_source(Headers({"host": host} | ({} if origin is None else {"origin": origin})), settings)


def test_a_request_without_host_or_with_two_is_refused() -> None:
    for raw in ([], [(b"host", b"localhost"), (b"host", b"evil.example")]):
        with pytest.raises(ForbiddenError):
            check_source(Headers(raw=raw), LOOPBACK)


def test_a_foreign_page_gets_no_socket_and_no_answer(server: Served) -> None:
    async def test() -> None:
        foreign: list[dict[str, Any]] = [
            {"origin": "http://evil.example"},
            {"additional_headers": {"Origin": "null"}},
        ]
        for options in foreign:
            with pytest.raises(InvalidStatus) as caught:
                async with dial(server, **options):
                    pass
            assert caught.value.response.status_code == 403

    asyncio.run(test())
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        answer = httpx.get(f"{server.url}/api/conversations", headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "forbidden"
        assert httpx.get(f"{server.url}/health", headers=headers).status_code == 403


def test_a_server_for_other_machines_knows_its_users_by_their_keys(tmp_path: Path) -> None:
    with serving(tmp_path, settings=OPEN) as served:
        store = served.desk.store
        ann, bob = store.create_user("ann"), store.create_user("bob")
        keys = [store.create_api_key(user.id, "test")[1] for user in (ann, bob)]
        url = f"{served.url}/api/conversations"
        for headers in (
            {},
            {"Authorization": "Bearer cp-wrong"},
            {"Authorization": "Basic eDp5"},
            {"Authorization": "Bearer"},
        ):
            answer = httpx.get(url, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
        first, second = ({"Authorization": f"Bearer {key}"} for key in keys)
        made = httpx.post(url, headers=first, json={"title": "Ann's"}).json()
        assert [chat["id"] for chat in httpx.get(url, headers=first).json()["conversations"]] == [made["id"]]
        assert httpx.get(url, headers=second).json() == {"conversations": []}
        assert httpx.get(f"{url}/{made['id']}", headers=second).status_code == 404
        store.revoke_api_key(ann.id, store.list_api_keys(ann.id)[0].id)
        assert httpx.get(url, headers=first).status_code == 401
        page = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        assert httpx.options(url, headers=page).headers["access-control-allow-origin"] == "https://chat.example"


def test_a_server_that_needs_users_and_has_none_refuses_to_start(tmp_path: Path) -> None:
    with Store(tmp_path / "chatpage.db") as store:
        check_access(store, LOOPBACK)
        for settings in (OPEN, ServeSettings(require_login=True), ServeSettings(allowed_hosts=("chat.example",))):
            with pytest.raises(ConfigError, match="nobody has a password or an API key"):
                check_access(store, settings)
        key, _ = store.create_api_key(LOCAL_USER, "mine")
        check_access(store, OPEN)
        store.revoke_api_key(LOCAL_USER, key.id)
        store.set_password_hash(LOCAL_USER, "$argon2id$v=19$m=8,t=1,p=1$c2FsdA$aGFzaA")
        check_access(store, OPEN)


@pytest.mark.parametrize(
    ("name", "is_loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
    ],
)
def test_only_addresses_that_stay_on_this_machine_are_loopback(name: str, is_loopback: bool) -> None:
    assert is_loopback_name(name) is is_loopback


def test_a_full_disk_keeps_nobody_from_reading(disk: Disk) -> None:
    """The time a key was used last could not be written, and every request with a key ended as an internal error."""
    with Store(disk.path / "chatpage.db") as store:
        user = store.create_user("ann")
        _, key = store.create_api_key(user.id, "test")
        auth = Auth(store, needs_key=True)
        with disk.full():
            with pytest.raises(StoreFullError):
                store.mark_api_key_used(key)
            assert asyncio.run(auth.user_of_key(key)) == user
