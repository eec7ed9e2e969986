"""Errors on their way to a client: one table from the exception tree to HTTP statuses, one shape of body.

Invariant: a `ChatpageError` is told to the client as it stands; of any other exception only that it happened.
"""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from chatpage.errors import (
    ChatpageError,
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    StoreBusyError,
    StoreFullError,
    UnknownRequestError,
)
from chatpage.server.protocol import ErrorMessage

INTERNAL_CODE = "internal_error"
INTERNAL_TEXT = "Something went wrong in the server; its log says what."
logger = logging.getLogger(__name__)


class UnauthorizedError(ChatpageError):
    """No key was given where one is needed, or one that is not known."""

    code = "unauthorized"


class ForbiddenError(ChatpageError):
    """The request comes from a page, or by a name, that this server does not serve."""

    code = "forbidden"


class TooLargeError(InvalidRequestError):
    """The body of a request is too large."""

    code = "too_large"


# The first class that fits counts.
_STATUSES: tuple[tuple[type[ChatpageError], int], ...] = (
    (UnauthorizedError, 401),
    (ForbiddenError, 403),
    (NotFoundError, 404),
    (UnknownRequestError, 404),
    (ConflictError, 409),
    (TooLargeError, 413),
    (OverloadedError, 429),
    (InvalidRequestError, 400),
    (EngineDeadError, 503),
    (StoreBusyError, 503),
    (StoreFullError, 507),
)
_RETRYABLE = (OverloadedError, EngineDeadError, StoreBusyError)


def status_of(error: ChatpageError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def error_message(error: ChatpageError, ref: str | None = None) -> ErrorMessage:
    """Return an error as a message of `chatpage.v1`."""
    return ErrorMessage(code=error.code, message=str(error), ref=ref, retryable=isinstance(error, _RETRYABLE))


def error_response(error: ChatpageError) -> JSONResponse:
    """Return an error as an HTTP response: `{"error": {"code", "message", "retryable", "version"?}}`."""
    version = error.version if isinstance(error, ConflictError) else None
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, UnauthorizedError) else None
    return _response(status_of(error), error.code, str(error), isinstance(error, _RETRYABLE), version, headers=headers)


def handle_errors(app: FastAPI) -> None:
    """Answer every exception of an endpoint in the one shape."""

    async def own(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ChatpageError)
        return error_response(error)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:3]]
        return _response(422, "invalid_request", "; ".join(lines)[:1000] + ".", False)

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(cause := error.__cause__, ChatpageError):  # FastAPI wraps whatever ends the reading of a body
            return error_response(cause)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        return _response(error.status_code, code, str(error.detail), False, headers=error.headers)

    async def internal(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _response(500, INTERNAL_CODE, INTERNAL_TEXT, False)

    app.add_exception_handler(ChatpageError, own)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, internal)


def _response(
    status: int, code: str, message: str, retryable: bool, version: int | None = None, *, headers: object = None
) -> JSONResponse:
    body: dict[str, object] = {"code": code, "message": message, "retryable": retryable}
    if version is not None:
        body["version"] = version
    return JSONResponse({"error": body}, status, headers=dict(headers) if isinstance(headers, dict) else None)
