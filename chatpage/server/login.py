"""`/login` and `/logout`: a password becomes a cookie.

Invariants: the cookie holds a token that is unreadable for scripts and unknown to the database; a login cannot be made by a
page of somebody else, nor the browser be led elsewhere after it.
"""

import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError
from starlette.responses import JSONResponse, RedirectResponse, Response

from chatpage.errors import ChatpageError, InvalidRequestError
from chatpage.server.login_page import login_page
from chatpage.server.passwords import Passwords
from chatpage.server.problems import ForbiddenError, TooLargeError, UnauthorizedError, retry_after_s, status_of
from chatpage.server.revoking import Credential, Revoker
from chatpage.server.security import LOGIN_PATH, LOGOUT_PATH, Auth, check_not_forged
from chatpage.server.views import Model
from chatpage.store import User

LOGIN_S = 30 * 24 * 3600
MAX_LOGIN_BYTES = 16_384
_FORM = "application/x-www-form-urlencoded"

router = APIRouter(include_in_schema=False)


class Login(Model):
    """Name and password, and where to go on."""

    name: str = Field(max_length=200)
    password: str = Field(max_length=5000)
    next: str = Field(default="/", max_length=4000)


@router.api_route(LOGIN_PATH, methods=["GET", "HEAD"])
async def show_login(request: Request, next: str = "/") -> Response:
    """Show the form; who is logged in already goes on."""
    auth: Auth = request.app.state.auth
    try:
        is_user = await auth.find_user(request) is not None
    except UnauthorizedError:  # a wrong key; the form helps
        is_user = False
    return RedirectResponse(_own_path(next), 303) if is_user and auth.needs_key else login_page(next=_own_path(next))


@router.post(LOGIN_PATH)
async def log_in(request: Request) -> Response:
    """Take a form, or JSON, and answer with the cookie."""
    is_form = _is_form(request)
    login = None
    try:
        if is_form:
            check_not_forged(request)
        login = await _read(request, is_form=is_form)
        user = await _user_of(request, login)
    except ChatpageError as error:
        if not is_form or isinstance(error, ForbiddenError):
            raise
        wait_s = retry_after_s(error)
        headers = {} if wait_s is None else {"Retry-After": str(math.ceil(wait_s))}
        name, next = (login.name, login.next) if login else ("", "/")
        return login_page(next=_own_path(next), name=name, problem=str(error), status=status_of(error), headers=headers)
    auth: Auth = request.app.state.auth
    token = await auth.store.create_login.aio(user.id, lifetime_s=LOGIN_S)
    answer: Response = (
        RedirectResponse(_own_path(login.next), 303) if is_form else JSONResponse({"user_id": user.id, "name": user.name})
    )
    _set_cookie(answer, request, token, LOGIN_S)
    return answer


@router.post(LOGOUT_PATH)
async def log_out(request: Request) -> Response:
    """End the login of the cookie, if there is one."""
    auth: Auth = request.app.state.auth
    if token := request.cookies.get(auth.cookie_name(request)):
        check_not_forged(request)
        await auth.store.end_login.aio(token)
        revoker: Revoker = request.app.state.revoker
        await revoker.end(Credential(token, is_key=False))
    answer: Response = RedirectResponse(LOGIN_PATH, 303) if _is_form(request) else Response(status_code=204)
    _set_cookie(answer, request, "", 0)
    return answer


async def _user_of(request: Request, login: Login) -> User:
    passwords: Passwords = request.app.state.passwords
    address = request.client.host if request.client else ""
    user = await passwords.find_user(login.name, login.password, address)
    if user is None:
        raise UnauthorizedError("Name or password is wrong.")
    return user


async def _read(request: Request, *, is_form: bool) -> Login:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_LOGIN_BYTES:
            raise TooLargeError(f"A login may have {MAX_LOGIN_BYTES} bytes.")
    try:
        values: Any = _form_values(body) if is_form else json.loads(body)
        return Login.model_validate(values)
    except (ValidationError, ValueError, RecursionError) as error:
        raise InvalidRequestError("A login is a JSON object, or a form, with name, password and perhaps next.") from error


def _form_values(body: bytes) -> Mapping[str, str]:
    values = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=10, strict_parsing=bool(body))
    return {name: given[-1] for name, given in values.items()}


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == _FORM


def _own_path(path: str) -> str:
    """Return a path of this server; browsers read `//host` and `/\\host` as another."""
    is_own = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() and path.isascii()
    return path if is_own else "/"


def _set_cookie(answer: Response, request: Request, token: str, max_age_s: int) -> None:
    auth: Auth = request.app.state.auth
    answer.set_cookie(
        auth.cookie_name(request),
        token,
        max_age=max_age_s,
        path="/",
        secure=auth.is_secure(request),
        httponly=True,
        samesite="lax",
    )
    answer.headers["Cache-Control"] = "no-store"
