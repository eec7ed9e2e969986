"""One HTTP request to a chatpage server, and its answer as a model.

Invariant: what the server refuses is a `ServerError` with the server's own code, and a server that cannot be reached is a
`ConnectionError`; nothing of httpx comes through.
"""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from chatpage.errors import ChatpageError

M = TypeVar("M", bound=BaseModel)
TIMEOUT = httpx.Timeout(60.0, connect=10.0)


class ServerError(ChatpageError):
    """The server refused.

    `server_code` is its code, such as not_found; `retryable`: the same may succeed, after `retry_after_s` if that is known.
    """

    code = "server_error"

    def __init__(self, server_code: str, message: str, *, retryable: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.server_code = server_code
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class Http:
    """Sends requests to one server. A connection lives as long as its request, so any event loop may be used at any time.

    Args:
        url: Of the server.
        key: API key, where the server needs one.
        transport: How requests travel; None: over the network.
    """

    def __init__(self, url: str, key: str | None, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._url = url.rstrip("/")
        self._transport = transport
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._tls = ssl.create_default_context() if url.startswith("https") else False  # made once: it reads many files

    async def call(
        self, returns: type[M], method: str, path: str, *, body: object = None, content: Any = None, **query: Any
    ) -> M:
        """Send a request and read its answer.

        Args:
            returns: Model of the answer.
            method: HTTP method.
            path: Below the address of the server.
            body: Sent as JSON.
            content: Sent as it is; bytes, or an iterator of them.
            query: Parameters; those that are None are left out.

        Raises:
            ServerError: The server refused.
            ConnectionError: It cannot be reached, or stopped answering.
        """
        async with self.stream(method, path, body=body, content=content, **query) as answer:
            text = await answer.aread()
        try:
            return returns.model_validate_json(text)
        except ValidationError as error:
            raise ServerError("invalid_answer", f"{self._url}{path} did not answer as chatpage does: {error}") from error

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, body: object = None, content: Any = None, **query: Any
    ) -> AsyncIterator[httpx.Response]:
        """As `call`, but hand out the answer before its body is read."""
        params = {name: value for name, value in query.items() if value is not None}
        try:
            async with (
                httpx.AsyncClient(
                    headers=self._headers, verify=self._tls, timeout=TIMEOUT, transport=self._transport
                ) as client,
                client.stream(method, self._url + path, params=params, json=body, content=content) as answer,
            ):
                if not answer.is_success:
                    await answer.aread()
                    raise _refusal(answer)
                yield answer
        except httpx.TransportError as error:
            raise ConnectionError(f"{self._url} cannot be reached: {error or type(error).__name__}.") from error


def as_body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are set, as JSON can hold them."""
    return {
        name: value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else value
        for name, value in fields.items()
        if value is not None
    }


def _refusal(answer: httpx.Response) -> ServerError:
    try:
        error = answer.json()["error"]
        after = answer.headers.get("Retry-After", "")
        wait_s = float(after) if after.isdecimal() else None  # a proxy may name a date instead
        return ServerError(
            str(error["code"]), str(error["message"]), retryable=bool(error.get("retryable")), retry_after_s=wait_s
        )
    except (ValueError, LookupError, TypeError):
        return ServerError("http_error", f"{answer.request.url} answered with status {answer.status_code}.")
