"""Whose request it is, and whether it is for the model that is here.

Invariant: as elsewhere, a key that could be one of this server's must be right. On loopback, where nobody needs a key, one that
is obviously made up (client libraries insist on some key) means the local user.
"""

from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from chatpage.errors import NotFoundError
from chatpage.server.security import Auth, key_of
from chatpage.session import Session
from chatpage.store import LOCAL_USER, User, UserId
from chatpage.store.users import KEY_PREFIX


class ModelUnknownError(NotFoundError):
    """A request is for a model that is not here."""

    code = "model_not_found"
    param = "model"


async def find_user(connection: HTTPConnection) -> User:
    """Return the user of a request or socket.

    Raises:
        UnauthorizedError: It needs a key and has none, or has a wrong one.
        ForbiddenError: It has a login, but nothing says that it comes from a page of this server.
    """
    auth: Auth = connection.app.state.auth
    if not auth.needs_key and (key := key_of(connection)) is not None and not key.startswith(KEY_PREFIX):
        return await auth.store.get_user.aio(LOCAL_USER)
    return await auth.require_user(connection)


async def _caller(request: Request) -> UserId:
    return (await find_user(request)).id


Caller = Annotated[UserId, Depends(_caller)]
NEEDS_USER = [Depends(_caller)]  # for endpoints that need no more of the user than that there is one


def signature(session: Session) -> dict[str, str]:
    """Return what every answer says of who gave it."""
    info = session.engine.info
    return {"model": info.model, "system_fingerprint": f"fp_{info.model_id[:12]}"}


def check_model(session: Session, model: str | None) -> None:
    """Raises `ModelUnknownError` unless `model` is the one that answers, or is left out."""
    here = session.engine.info.model
    if model is not None and model != here:
        raise ModelUnknownError(f"The model {model!r} does not exist here; this server has {here!r}.")
