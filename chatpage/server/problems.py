"""Errors on their way to a client: one table from the exception tree to HTTP statuses, one shape of body.

Invariant: a `ChatpageError` is told to the client as it stands; of any other exception only that it happened.
"""

import errno
import logging
import math
from collections.abc import Mapping

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
    RestartingError,
    StoreBusyError,
    StoreFullError,
    UnknownRequestError,
)
from chatpage.server.openai.errors import describe, is_openai_path, openai_response
from chatpage.server.protocol import ErrorMessage

RETRY_AFTER_S = 1
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


class TooSlowError(InvalidRequestError):
    """The body of a request came so slowly that it was not waited for."""

    code = "too_slow"


# The first class that fits counts.
_STATUSES: tuple[tuple[type[ChatpageError], int], ...] = (
    (UnauthorizedError, 401),
    (ForbiddenError, 403),
    (NotFoundError, 404),
    (UnknownRequestError, 404),
    (ConflictError, 409),
    (TooLargeError, 413),
    (TooSlowError, 408),
    (OverloadedError, 429),
    (InvalidRequestError, 400),
    (EngineDeadError, 503),
    (RestartingError, 503),
    (StoreBusyError, 503),
    (StoreFullError, 507),
)
_RETRYABLE = (OverloadedError, EngineDeadError, RestartingError, StoreBusyError)


def status_of(error: ChatpageError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def retry_after_s(error: ChatpageError) -> float | None:
    """Return the seconds after which the same request can succeed; None: never as it stands."""
    if isinstance(error, OverloadedError):
        return error.retry_after_s
    return RETRY_AFTER_S if isinstance(error, _RETRYABLE) else None


def error_message(error: ChatpageError, ref: str | None = None) -> ErrorMessage:
    """Return an error as a message of `chatpage.v1`."""
    wait_s = retry_after_s(error)
    return ErrorMessage(
        code=error.code,
        message=str(error),
        ref=ref,
        retryable=wait_s is not None,
        retry_after_ms=None if wait_s is None else math.ceil(wait_s * 1e3),
    )


def error_response(error: ChatpageError, path: str = "") -> JSONResponse:
    """Return an error as an HTTP response, `{"error": {"code", "message", "retryable", "version"?}}` or the shape of OpenAI."""
    version = error.version if isinstance(error, ConflictError) else None
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, UnauthorizedError) else {}
    if (wait_s := retry_after_s(error)) is not None:
        headers["Retry-After"] = str(math.ceil(wait_s))
    if is_openai_path(path):
        param: str | None = getattr(error, "param", None)
        return openai_response(status_of(error), error.code, str(error), param=param, headers=headers)
    is_retryable = wait_s is not None
    return _response(
        path, status_of(error), error.code, str(error), is_retryable=is_retryable, version=version, headers=headers
    )


def handle_errors(app: FastAPI) -> None:
    """Answer every exception of an endpoint in the shape of its path."""

    async def own(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ChatpageError)
        return error_response(error, request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        if is_openai_path(request.url.path):
            code, message, param = describe(error.errors())
            return openai_response(400, code, message[:1000], param=param)
        lines = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:3]]
        return _response("", 422, "invalid_request", "; ".join(lines)[:1000] + ".")

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if isinstance(cause := error.__cause__, ChatpageError):  # FastAPI wraps whatever ends the reading of a body
            return error_response(cause, path)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        return _response(path, error.status_code, code, str(error.detail), headers=error.headers)

    async def internal(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return error_response(OverloadedError("The server has no file descriptor left; try again soon."), request.url.path)
        return _response(request.url.path, 500, INTERNAL_CODE, INTERNAL_TEXT)

    app.add_exception_handler(ChatpageError, own)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, internal)


def _response(
    path: str,
    status: int,
    code: str,
    message: str,
    *,
    is_retryable: bool = False,
    version: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    if is_openai_path(path):
        return openai_response(status, code, message, headers=headers)
    body: dict[str, object] = {"code": code, "message": message, "retryable": is_retryable}
    if version is not None:
        body["version"] = version
    return JSONResponse({"error": body}, status, headers=headers)
