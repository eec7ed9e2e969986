"""Logging in: a cookie that scripts cannot read and pages of others cannot use, and nothing served before."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from argon2 import PasswordHasher
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from websockets.exceptions import InvalidStatus

from chatpage.server import login, passwords
from chatpage.server.app import create_app
from chatpage.server.passwords import MAX_PER_NAME, hash_password
from chatpage.server.settings import ServeSettings
from tests.server.serving import Served, dial, serving
from tests.sessions import Desk

OPEN = ServeSettings(host="0.0.0.0")
PASSWORD = "correct horse"
PATHS = ("/", "/x", "/login", "/login/", "//login", "/LOGIN", "/login/../x", "/health", "/health/x", "/ws", "/config")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")
PAGE = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(autouse=True, scope="module")
def cheap_hashes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passwords, "_hasher", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
        yield


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cheap_hashes: None) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("login"), settings=OPEN) as found:
        for name in ("ann", "bob", "cat", "dan"):
            found.desk.store.create_user(name, hash_password(PASSWORD))
        yield found


@pytest.fixture
def browser(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, headers=PAGE, timeout=60) as client:
        yield client


def _log_in(browser: httpx.Client, name: str = "ann", password: str = PASSWORD, **fields: str) -> httpx.Response:
    form = {"name": name, "password": password, **fields}
    return browser.post("/login", data=form, headers={"Origin": str(browser.base_url).rstrip("/")})


def test_a_page_leads_to_the_login_and_the_login_back_to_the_page(browser: httpx.Client) -> None:
    away = browser.get("/some/page?tab=2")
    assert (away.status_code, away.headers["location"]) == (303, "/login?next=%2Fsome%2Fpage%3Ftab%3D2")
    form = browser.get(away.headers["location"])
    assert form.status_code == 200
    assert 'value="/some/page?tab=2"' in form.text
    answer = _log_in(browser, next="/some/page?tab=2")
    assert (answer.status_code, answer.headers["location"]) == (303, "/some/page?tab=2")
    assert browser.get("/api/conversations").status_code == 200
    assert browser.get("/login").status_code == 303, "who is logged in goes on"


def test_the_cookie_is_for_this_server_alone_and_out_of_reach_for_scripts(browser: httpx.Client) -> None:
    cookie = _log_in(browser).headers["set-cookie"].lower()
    assert cookie.startswith("chatpage=")
    for part in ("httponly", "samesite=lax", "path=/", "max-age=2592000"):
        assert part in cookie
    assert "secure" not in cookie, "a browser would never send it back by http"


def test_behind_https_the_cookie_is_secure(tmp_path: Path) -> None:
    settings = ServeSettings(secure_cookies=True, require_login=True)
    with serving(tmp_path, settings=settings) as served, httpx.Client(base_url=served.url, timeout=60) as http:
        served.desk.store.create_user("ann", hash_password(PASSWORD))
        cookie = http.post("/login", json={"name": "ann", "password": PASSWORD}).headers["set-cookie"]
        assert cookie.startswith("__Host-chatpage=")
        assert "; Secure" in cookie
        pair = cookie.partition(";")[0]
        assert http.get("/api/conversations", headers={"Cookie": pair}).status_code == 200
        assert http.get("/api/conversations", headers={"Cookie": pair.removeprefix("__Host-")}).status_code == 401


def test_logging_out_ends_the_login_for_good(browser: httpx.Client, served: Served) -> None:
    _log_in(browser)
    token = browser.cookies["chatpage"]
    assert browser.post("/logout").status_code == 403, "a page of somebody else could have sent it"
    answer = browser.post("/logout", headers={"Origin": served.url})
    assert answer.status_code == 204
    assert "chatpage" not in browser.cookies
    browser.cookies.set("chatpage", token)
    assert browser.get("/api/conversations", headers={"Accept": "*/*"}).status_code == 401


def test_a_program_logs_in_with_json(served: Served) -> None:
    with httpx.Client(base_url=served.url, timeout=60) as http:
        answer = http.post("/login", json={"name": "ann", "password": PASSWORD})
        assert answer.json()["name"] == "ann"
        assert http.get("/api/conversations").status_code == 200
        wrong = http.post("/login", json={"name": "ann", "password": "wrong horse"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "unauthorized")


def test_a_wrong_password_shows_the_form_again_with_the_name_and_not_the_password(browser: httpx.Client) -> None:
    answer = _log_in(browser, name='<b>"bob', password="secret-but-wrong", next="/x")
    assert answer.status_code == 401
    assert "Name or password is wrong." in answer.text
    assert "&lt;b&gt;&quot;bob" in answer.text
    assert "<b>" not in answer.text
    assert "secret-but-wrong" not in answer.text
    assert 'value="/x"' in answer.text
    assert "set-cookie" not in answer.headers


def test_the_form_runs_nothing_and_is_shown_in_no_frame(browser: httpx.Client) -> None:
    """The policy allows one style sheet by its hash; were the hash wrong, the page would be bare."""
    import base64
    import hashlib
    import re

    page = browser.get("/login")
    policy = page.headers["content-security-policy"]
    style = re.search(r"<style>(.*?)</style>", page.text, re.DOTALL)
    assert style
    assert base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode() in policy
    for part in ("default-src 'none'", "form-action 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert part in policy
    assert "script" not in policy
    assert "<script" not in page.text


@pytest.mark.parametrize(
    "next", ["//evil.example", "/\\evil.example", "https://evil.example", "javascript:alert(1)", "", "/a\nb"]
)
def test_nobody_is_led_to_another_server(browser: httpx.Client, next: str) -> None:
    assert _log_in(browser, next=next).headers["location"] == "/"


def test_a_form_of_another_page_logs_nobody_in(browser: httpx.Client) -> None:
    """Else it could log a browser into the account of whoever wrote that page, and read along."""
    form = {"name": "ann", "password": PASSWORD}
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {}, {"Sec-Fetch-Site": "cross-site"}):
        assert browser.post("/login", data=form, headers=headers).status_code == 403
    assert browser.post("/login", data=form, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 303


def test_a_cookie_without_a_sign_of_our_page_changes_nothing(browser: httpx.Client, served: Served) -> None:
    _log_in(browser)
    assert browser.post("/api/conversations", json={}).status_code == 403
    assert browser.post("/api/conversations", json={}, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert browser.post("/api/conversations", json={}, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 201
    assert browser.post("/api/conversations", json={}, headers={"Origin": served.url}).status_code == 201


def test_a_socket_opens_with_a_cookie_of_our_page_only(browser: httpx.Client, served: Served) -> None:
    _log_in(browser, "bob")
    cookie = {"Cookie": f"chatpage={browser.cookies['chatpage']}"}

    async def test() -> None:
        async with dial(served, additional_headers=cookie, origin=served.url, hello=False) as wire:
            assert (await wire.hello()).user_id == served.desk.store.find_user("bob").id  # type: ignore[union-attr]
        with pytest.raises(InvalidStatus):
            async with dial(served, additional_headers=cookie):
                pass

    asyncio.run(test())


def test_guessing_is_slowed_down_whatever_is_sent(browser: httpx.Client) -> None:
    for i in range(MAX_PER_NAME):
        assert _log_in(browser, "dan", f"wrong {i}").status_code == 401
    answer = _log_in(browser, "dan")
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
    assert "too many wrong passwords" in answer.text
    as_json = browser.post("/login", json={"name": "dan", "password": PASSWORD})
    assert (as_json.status_code, as_json.json()["error"]["code"]) == (429, "too_many_guesses")
    assert _log_in(browser, "cat").status_code == 303


def test_a_form_that_too_many_others_keep_from_being_read_is_told_when_to_come_again(
    browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passwords, "MAX_WAITING", 0)
    answer = _log_in(browser)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "Too many people" in answer.text


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"name": 1, "password": "x"}', b'{"name": "x"}', b"[" * 5000, b'{"name": "\\ud800", "password": "x"}'],
)
def test_what_is_no_login_is_refused(served: Served, body: bytes) -> None:
    answer = httpx.post(f"{served.url}/login", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 401)
    form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": served.url}
    assert httpx.post(f"{served.url}/login", content=body, headers=form).status_code == 400
    large = b"x" * (login.MAX_LOGIN_BYTES + 1)
    assert httpx.post(f"{served.url}/login", content=large, headers=form).status_code == 413


def test_on_loopback_nobody_needs_to_log_in_but_may(server: Served) -> None:
    ann = server.desk.store.create_user("ann", hash_password(PASSWORD))
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/api/conversations").status_code == 200
        assert http.get("/login").status_code == 200
        http.post("/login", json={"name": "ann", "password": PASSWORD})
        headers = {"Origin": server.url}
        made = http.post("/api/conversations", json={}, headers=headers).json()
        assert server.desk.store.get_conversation(ann.id, made["id"]).owner_id == ann.id
        http.cookies.set("chatpage", "stale")
        assert http.get("/api/conversations").status_code == 200, "an old cookie is none"


class _Mounted:
    """Stands for a page mounted at the root: answers everything that no route of the server takes."""

    def __init__(self, desk: Desk) -> None:
        app = create_app(desk.session, OPEN)

        async def secret(request: object) -> PlainTextResponse:
            return PlainTextResponse("secret")

        inner = Starlette(routes=[Route("/{path:path}", secret, methods=list(METHODS))])
        app.router.routes.append(Mount("/", inner))
        self.app = app


def test_nothing_that_is_mounted_is_served_without_a_user(tmp_path: Path) -> None:
    """A method that the login page does not take used to fall through to the page mounted behind it."""
    from tests.sessions import with_desk

    async def test(desk: Desk) -> None:
        app = _Mounted(desk).app
        user = desk.store.create_user("ann")
        _, key = desk.store.create_api_key(user.id, "test")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://chat.example") as http:
            for path in (
                "/",
                "/x",
                "/login",
                "/login/",
                "//login",
                "/LOGIN",
                "/login/../x",
                "/health",
                "/health/x",
                "/ws",
                "/config",
            ):
                for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                    answer = await http.request(method, path)
                    assert "secret" not in answer.text, (method, path)
                    assert answer.status_code in (200, 303, 400, 401), (method, path, answer.status_code)
                    if answer.status_code == 200:
                        assert path in ("/login", "/health")
            assert (await http.get("/x", headers={"Authorization": f"Bearer {key}"})).text == "secret"

    with_desk(tmp_path, test)
