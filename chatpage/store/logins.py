"""Logins: whoever gave a password holds a token for a while, and shows it instead.

Invariant: of a token only its SHA-256 is kept, which is enough for 256 random bits; a token opens nothing once it has expired,
was given back, or its user's password was changed.
"""

import hashlib
import secrets

from sqlite_utils import Database

from chatpage.store.records import User, UserId, now
from chatpage.store.users import get_user


def create_login(db: Database, user_id: UserId, *, lifetime_s: int) -> str:
    """Return a token that stands for the user for `lifetime_s` seconds; it cannot be read again.

    Raises:
        NotFoundError: There is no such user.
    """
    get_user(db, user_id)
    token = secrets.token_urlsafe(32)
    db.execute("DELETE FROM logins WHERE expires_at <= ?", (now(),))
    db.execute(
        "INSERT INTO logins (token_hash, user_id, created_at, expires_at) VALUES (?, ?, ?, ?)",
        (_hash(token), user_id, now(), now() + lifetime_s * 1_000_000),
    )
    return token


def find_user_by_login(db: Database, token: str) -> User | None:
    """Return whom a token stands for, if it still does."""
    row = db.execute(
        "SELECT u.id, u.name, u.password_hash, u.created_at FROM logins l JOIN users u ON u.id = l.user_id"
        " WHERE l.token_hash = ? AND l.expires_at > ?",
        (_hash(token), now()),
    ).fetchone()
    return None if row is None else User(*row)


def end_login(db: Database, token: str) -> None:
    """Forget a token; one that is not known is none already."""
    db.execute("DELETE FROM logins WHERE token_hash = ?", (_hash(token),))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
