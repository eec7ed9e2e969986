"""Sockets end with what let them in: a login that ended, a key that was revoked, a user who was removed.

Invariant: a socket outlives its key or login by `CHECK_S` at most, whichever process ended them; by nothing after a logout
here. HTTP requests are checked one by one; one that is being answered is answered to its end.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import HTTPConnection

from chatpage.errors import StoreError
from chatpage.server.security import Auth, key_of
from chatpage.store import LOCAL_USER, User
from chatpage.store.users import KEY_PREFIX

CHECK_S = 5.0
REASON = "the login or key of this connection has ended"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credential:
    """What somebody came in with."""

    secret: str = field(repr=False)
    is_key: bool  # else the token of a login


class Revocable(Protocol):
    """A socket that can be shown the door."""

    async def revoke(self) -> None:
        """Close with 1008."""


def credential_of(auth: Auth, connection: HTTPConnection, user: User | None) -> Credential | None:
    """Return what a connection of `user` was let in for; None: it needed nothing, or brings it later."""
    if (key := key_of(connection)) is not None:
        return Credential(key, is_key=True) if auth.needs_key or key.startswith(KEY_PREFIX) else None
    token = connection.cookies.get(auth.cookie_name(connection))
    is_somebody = user is not None and user.id != LOCAL_USER  # on loopback whoever has no login is the local user
    return Credential(token, is_key=False) if token and is_somebody else None


class Revoker:
    """Looks after the open sockets of one application."""

    def __init__(self, auth: Auth) -> None:
        self._auth = auth
        self._sockets: dict[Revocable, Credential] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self, socket: Revocable, credential: Credential | None) -> Iterator[None]:
        """Look after a socket meanwhile."""
        try:
            if credential is not None:
                self.watch(socket, credential)
            yield
        finally:
            self._sockets.pop(socket, None)
            if not self._sockets and self._task is not None:
                self._task.cancel()
                self._task = None

    def watch(self, socket: Revocable, credential: Credential) -> None:
        """Look after a socket from now on; within `watching`."""
        self._sockets[socket] = credential
        if self._task is None:
            self._task = asyncio.create_task(self._check_again_and_again())

    async def end(self, credential: Credential) -> None:
        """Close the sockets that came in with this."""
        await self._close({credential})

    async def check(self) -> None:
        """Close the sockets whose login or key is no longer good."""
        await self._close({one for one in set(self._sockets.values()) if not await self._is_good(one)})

    async def _check_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.check()
            except StoreError as error:  # a full or busy database says nothing about a login
                logger.warning("Logins and keys could not be checked: %s", error)

    async def _is_good(self, credential: Credential) -> bool:
        store = self._auth.store
        find = store.find_user_by_api_key if credential.is_key else store.find_user_by_login
        return await find.aio(credential.secret) is not None

    async def _close(self, bad: set[Credential]) -> None:
        sockets = [socket for socket, credential in self._sockets.items() if credential in bad]
        for socket in sockets:
            self._sockets.pop(socket, None)
        await asyncio.gather(*(socket.revoke() for socket in sockets), return_exceptions=True)
