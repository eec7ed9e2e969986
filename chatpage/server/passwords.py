"""Passwords: made into argon2 hashes, compared beside the event loop, and guessed at a bounded pace.

Invariants: the event loop never hashes; however many logins come, one hash is computed at a time, so its memory is spent once;
a name that does not exist costs as much time as one that does; whoever guesses wrong too often, by name or by address, waits.
"""

import asyncio
import ipaddress
import math
import secrets
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from chatpage.errors import InvalidRequestError, OverloadedError
from chatpage.store import Store, User

MIN_PASSWORD, MAX_PASSWORD = 8, 1024  # characters
MAX_WAITING = 64  # logins whose hash is still to be computed
WINDOW_S = 15 * 60.0
MAX_PER_NAME, MAX_PER_ADDRESS = 10, 50  # wrong passwords per window
MAX_REMEMBERED = 10_000  # names and addresses

_hasher = PasswordHasher()


class TooManyGuessesError(OverloadedError):
    """Too many wrong passwords for a name, or from an address. `wait_s`: seconds until the next one may be tried."""

    code = "too_many_guesses"

    def __init__(self, wait_s: float) -> None:
        self.wait_s = max(1, math.ceil(wait_s))
        super().__init__(f"There were too many wrong passwords: try again in {self.wait_s} s.", retry_after_s=self.wait_s)


def hash_password(password: str) -> str:
    """Return the hash of a password in PHC form; takes a while.

    Raises:
        InvalidRequestError: It is too short or too long.
    """
    text = _normal(password)
    if not MIN_PASSWORD <= len(text) <= MAX_PASSWORD:
        raise InvalidRequestError(
            f"The password has {len(text)} characters; {MIN_PASSWORD} to {MAX_PASSWORD} are needed. Choose another."
        )
    return _hasher.hash(text)


def matches(password_hash: str, password: str) -> bool:
    """Whether a password is the one of a hash; takes a while."""
    try:
        return _hasher.verify(password_hash, _normal(password))
    except (VerificationError, InvalidHashError):
        return False


class Passwords:
    """Checks passwords of the users of a store."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._guesses = Guesses(clock)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chatpage-password")
        self._num_waiting = 0
        self._nobodys: str | None = None  # what a name without a password is compared with

    async def find_user(self, name: str, password: str, address: str) -> User | None:
        """Return the user if name and password are right.

        Args:
            name: As it was typed.
            password: As it was typed.
            address: Of the client.

        Raises:
            TooManyGuessesError: Too many were wrong before; nothing was compared.
            OverloadedError: Too many others are waiting.
        """
        if self._num_waiting >= MAX_WAITING:
            raise OverloadedError("Too many people log in at this moment: try again in a few seconds.")
        take_back = self._guesses.count(name, address)  # first, or guesses sent at once would all be let through
        self._num_waiting += 1
        try:
            user = await self._store.find_user.aio(name)
            stored = None if user is None else user.password_hash
            is_right = await asyncio.get_running_loop().run_in_executor(self._thread, self._compare, stored, password)
        finally:
            self._num_waiting -= 1
        if not is_right:
            return None
        take_back()
        return user

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def _compare(self, stored: str | None, password: str) -> bool:
        if self._nobodys is None:
            self._nobodys = _hasher.hash(secrets.token_urlsafe(32))
        return matches(stored or self._nobodys, password[: MAX_PASSWORD + 1]) and stored is not None


class Guesses:
    """Counts wrong passwords; what is counted is forgotten after `WINDOW_S`, or when there is too much of it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: OrderedDict[str, list[float]] = OrderedDict()

    def count(self, name: str, address: str) -> Callable[[], None]:
        """Count a guess as wrong and return how to take that back.

        Raises:
            TooManyGuessesError: It must wait; it was not counted.
        """
        now = self._clock()
        limits = {f"name {name[:200]}": MAX_PER_NAME, f"address {_network(address)}": MAX_PER_ADDRESS}
        recent = {key: [at for at in self._times.get(key, ()) if at > now - WINDOW_S] for key in limits}
        waits = [recent[key][-most] + WINDOW_S - now for key, most in limits.items() if len(recent[key]) >= most]
        if waits:
            raise TooManyGuessesError(max(waits))
        for key in limits:
            self._times[key] = [*recent[key], now]
            self._times.move_to_end(key)
        while len(self._times) > MAX_REMEMBERED:
            self._times.popitem(last=False)

        def take_back() -> None:
            for key in limits:
                if now in self._times.get(key, ()):
                    self._times[key].remove(now)

        return take_back


def _network(address: str) -> str:
    """Return what one person holds: an IPv4 address, or the 2**64 addresses of an IPv6 network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, 64), strict=False)) if found.version == 6 else str(found)


def _normal(password: str) -> str:
    """The same characters typed on different systems may come as different code points."""
    return unicodedata.normalize("NFC", password.encode("utf-8", "replace").decode("utf-8"))
