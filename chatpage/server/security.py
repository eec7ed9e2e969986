"""Who comes in: `Host` and `Origin` are checked before anything else is read, then the key or the login.

Invariants: a page of a foreign origin, or one that reached a loopback server by a name it made up (DNS rebinding), is refused
before a socket is accepted or an endpoint runs. A server that other machines can reach serves nobody but its users, whatever is
mounted into it; on loopback, who gives no key is the local user, and a wrong key is refused even there. A cookie alone changes
nothing: the browser must also say that the page was ours.
"""

import asyncio
import contextlib
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatpage.errors import StoreError
from chatpage.server.problems import ForbiddenError, TooLargeError, TooSlowError, UnauthorizedError, error_response
from chatpage.server.settings import ServeSettings, is_loopback_name
from chatpage.store import LOCAL_USER, Store, User, UserId

KEY_SUBPROTOCOL = "chatpage.key."  # a browser cannot set headers on a socket, but it can offer "chatpage.key.<API key>"
LOGIN_PATH, LOGOUT_PATH, SOCKET_PATH = "/login", "/logout", "/ws"
OPEN_TO_ALL = frozenset(  # a method that is not listed could fall through to what is mounted
    (method, path)
    for path, methods in {
        LOGIN_PATH: ("GET", "HEAD", "POST"),
        LOGOUT_PATH: ("POST",),
        "/health": ("GET", "HEAD"),
        "/ready": ("GET", "HEAD"),
    }.items()
    for method in methods
)
BODY_S = 30.0  # that any body may take,
BODY_RATE = 8 * 1024  # and a second more for so many bytes
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_KNOWN_USER = "chatpage.user"  # in the scope of a request whose user was found


class OriginGuard:
    """Refuse foreign pages and made-up host names, for HTTP and sockets alike."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                check_source(Headers(scope=scope), self._settings)
            except ForbiddenError as error:
                if scope["type"] == "websocket":
                    await send({"type": "websocket.close", "code": 1008})  # before accept: the handshake fails with 403
                else:
                    await error_response(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuse bodies that would fill the memory, and those that come so slowly that they only hold a connection.

    Paths that read theirs piece by piece check the size for themselves.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, unlimited: frozenset[str]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._unlimited = unlimited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        receive = _Timed(receive)
        if scope["path"] in self._unlimited:
            await self._app(scope, receive, send)
            return
        error = TooLargeError(f"The body of a request may have {self._max_bytes} bytes.")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:  # sent in chunks, or more than was announced
                raise error
            return message

        await self._app(scope, counted, send)


class _Timed:
    """The `receive` of a request whose body must come at a bounded pace, measured over all of it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._began = asyncio.get_running_loop().time()
        self._size = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()  # waits for the end of the connection, as long as it takes
        try:
            async with asyncio.timeout_at(self._began + BODY_S + self._size / BODY_RATE):
                message = await self._receive()
        except TimeoutError:
            raise TooSlowError(
                f"{self._size} bytes of the body came within {BODY_S + self._size / BODY_RATE:.0f} s; send it faster."
            ) from None
        self._size += len(message.get("body", b""))
        self._is_whole = not message.get("more_body", False)
        return message


def check_source(headers: Headers, settings: ServeSettings) -> None:
    """Check the headers that say where a request comes from.

    Raises:
        ForbiddenError: Not from a page of this server, or not by a name of this server.
    """
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or len(origins) > 1:
        raise ForbiddenError("A request needs one Host header, and at most one Origin header.")
    name = _host_name(hosts[0])
    is_known = is_loopback_name(name) if settings.is_loopback else not settings.allowed_hosts
    if not is_known and name.lower() not in {host.lower() for host in settings.allowed_hosts}:
        raise ForbiddenError(f"This server does not answer to the name {name[:100]!r}; allow it with --allowed-host.")
    if origins and origins[0] not in settings.allowed_origins and not _is_same(origins[0], hosts[0]):
        raise ForbiddenError(f"Pages of {origins[0][:100]!r} may not call this server; allow them with --allowed-origin.")


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_same(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


class LoginGate:
    """Lets nothing but `OPEN_TO_ALL` be reached without a user, where users are needed; pages are redirected to the login.

    The socket of `chatpage.v1` passes: its client may still say who it is in its first message.
    """

    def __init__(self, app: ASGIApp, auth: "Auth") -> None:
        self._app = app
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._auth.needs_key or _is_open(scope):
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        try:
            await self._auth.require_user(connection)
        except (UnauthorizedError, ForbiddenError, StoreError) as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            elif isinstance(error, UnauthorizedError) and wants_page(connection) and scope["method"] in ("GET", "HEAD"):
                path = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
                await RedirectResponse(f"{LOGIN_PATH}?next={quote(path, safe='')}", 303)(scope, receive, send)
            else:
                await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    if scope["type"] == "websocket":
        return bool(scope["path"] == SOCKET_PATH)
    return scope["type"] != "http" or (scope["method"], scope["path"]) in OPEN_TO_ALL


def wants_page(connection: HTTPConnection) -> bool:
    """Whether a person looks at the answer, in a browser."""
    return "text/html" in connection.headers.get("accept", "")


class Auth:
    """Finds out whose request it is.

    Args:
        store: Knows keys and logins.
        needs_key: Whether everybody must show a key or a login.
        secure_cookies: Whether browsers reach the server by https only, though it does not see that itself.
    """

    def __init__(self, store: Store, *, needs_key: bool, secure_cookies: bool = False) -> None:
        self.store = store
        self.needs_key = needs_key
        self.secure_cookies = secure_cookies

    async def require_user(self, connection: HTTPConnection) -> User:
        """Return the user of a request.

        Raises:
            UnauthorizedError: It needs a key or a login and has none, or has a wrong key.
            ForbiddenError: It has a login, but nothing says that it comes from a page of this server.
        """
        user = await self.find_user(connection)
        if user is None:
            raise UnauthorizedError("This server needs a login, or an API key as 'Authorization: Bearer <key>'.")
        return user

    async def find_user(self, connection: HTTPConnection) -> User | None:
        """As `require_user`, but None where a key is needed and none was given; a socket may still send it."""
        known: User | None = connection.scope.get(_KNOWN_USER)
        if known is None:
            known = await self._find_user(connection)
            connection.scope[_KNOWN_USER] = known
        return known

    async def _find_user(self, connection: HTTPConnection) -> User | None:
        if (key := key_of(connection)) is not None:
            return await self.user_of_key(key)
        token = connection.cookies.get(self.cookie_name(connection))
        if token and (user := await self.store.find_user_by_login.aio(token)) is not None:
            check_not_forged(connection)
            return user
        return None if self.needs_key else await self.store.get_user.aio(LOCAL_USER)

    def is_secure(self, connection: HTTPConnection) -> bool:
        """Whether the browser came by https, so that a cookie can be kept off plain http."""
        return self.secure_cookies or connection.scope["scheme"] in ("https", "wss")

    def cookie_name(self, connection: HTTPConnection) -> str:
        """Return the name of the login cookie; browsers take `__Host-` only from this very host, by https."""
        return "__Host-chatpage" if self.is_secure(connection) else "chatpage"

    async def user_of_key(self, key: str) -> User:
        """Return whose key it is.

        Raises:
            UnauthorizedError: Nobody's.
        """
        user = await self.store.find_user_by_api_key.aio(key)
        if user is None:
            raise UnauthorizedError("The API key is not known: it is mistyped, or was revoked.")
        with contextlib.suppress(StoreError):  # a disk that is full keeps nobody from reading
            await self.store.mark_api_key_used.aio(key)
        return user


def check_not_forged(connection: HTTPConnection) -> None:
    """Refuse a request that a foreign page may have made a browser send, with the browser's cookie.

    An `Origin` header was compared with the server's by `check_source`. Browsers leave it out of requests that read, and old
    ones out of forms too.

    Raises:
        ForbiddenError: It changes something, or is a socket, and neither header says that the page was ours.
    """
    if connection.scope["type"] == "http" and connection.scope["method"] in _SAFE_METHODS:
        return
    if "origin" not in connection.headers and connection.headers.get("sec-fetch-site") != "same-origin":
        raise ForbiddenError("A login by cookie needs an Origin header; a program should send an API key instead.")


def key_of(connection: HTTPConnection) -> str | None:
    """Return the API key that a request carries, in its `Authorization` header or as an offered subprotocol.

    Raises:
        UnauthorizedError: The header has another form.
    """
    header = connection.headers.get("authorization")
    if header is not None:
        scheme, _, key = header.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("The Authorization header must be 'Bearer <API key>'.")
        return key.strip()
    offered: list[str] = connection.scope.get("subprotocols") or []
    return next((name.removeprefix(KEY_SUBPROTOCOL) for name in offered if name.startswith(KEY_SUBPROTOCOL)), None)


def user_seen(scope: Scope) -> UserId | None:
    """Return whose request it was, if that was found out while it was served."""
    user: User | None = scope.get(_KNOWN_USER)
    return None if user is None else user.id


def has_users(store: Store) -> bool:
    """Whether anybody could come in where a key or a login is needed."""
    return any(user.password_hash is not None or store.list_api_keys(user.id) for user in store.list_users())
