"""Who comes in: `Host` and `Origin` are checked before anything else is read, then the key.

Invariants: a page of a foreign origin, or one that reached a loopback server by a name it made up (DNS rebinding), is refused
before a socket is accepted or an endpoint runs. A server that other machines can reach serves nobody without a key; on
loopback, who gives no key is the local user, and a wrong key is refused even there.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chatpage.server.problems import ForbiddenError, TooLargeError, UnauthorizedError, error_response
from chatpage.server.settings import ServeSettings, is_loopback_name
from chatpage.store import LOCAL_USER, Store, User

KEY_SUBPROTOCOL = "chatpage.key."  # a browser cannot set headers on a socket, but it can offer "chatpage.key.<API key>"


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
                    await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuse bodies that would fill the memory; paths that read theirs piece by piece check for themselves."""

    def __init__(self, app: ASGIApp, max_bytes: int, unlimited: frozenset[str]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._unlimited = unlimited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._unlimited:
            await self._app(scope, receive, send)
            return
        error = TooLargeError(f"The body of a request may have {self._max_bytes} bytes.")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes:
            await error_response(error)(scope, receive, send)
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


class Auth:
    """Finds out whose request it is.

    Args:
        store: Knows the keys.
        needs_key: Whether everybody must show one.
    """

    def __init__(self, store: Store, *, needs_key: bool) -> None:
        self.store = store
        self.needs_key = needs_key

    async def require_user(self, connection: HTTPConnection) -> User:
        """Return the user of a request.

        Raises:
            UnauthorizedError: It needs a key and has none, or has a wrong one.
        """
        user = await self.find_user(connection)
        if user is None:
            raise UnauthorizedError("This server needs an API key: send it as 'Authorization: Bearer <key>'.")
        return user

    async def find_user(self, connection: HTTPConnection) -> User | None:
        """As `require_user`, but None where a key is needed and none was given; a socket may still send it."""
        if (key := key_of(connection)) is not None:
            return await self.user_of_key(key)
        return None if self.needs_key else await self.store.get_user.aio(LOCAL_USER)

    async def user_of_key(self, key: str) -> User:
        """Return whose key it is.

        Raises:
            UnauthorizedError: Nobody's.
        """
        user = await self.store.find_user_by_api_key.aio(key)
        if user is None:
            raise UnauthorizedError("The API key is not known: it is mistyped, or was revoked.")
        await self.store.mark_api_key_used.aio(key)
        return user


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


def has_keys(store: Store) -> bool:
    """Whether anybody could come in where keys are needed."""
    return any(store.list_api_keys(user.id) for user in store.list_users())
