"""Users and their API keys.

Invariant: no secret is stored. A password comes here as the hash its caller made (argon2, in PHC form); of an API key only
its SHA-256 is kept. A fast hash is enough for a key, which is 256 random bits and cannot be guessed; a password could be.
"""

import hashlib
import re
import secrets
import sqlite3

from sqlite_utils import Database

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store.purging import drop_unreferenced_nodes, forget_conversation
from chatpage.store.records import LOCAL_USER, ApiKey, ApiKeyId, ConversationId, User, UserId, new_id, now

KEY_PREFIX = "cp-"
_NAME = re.compile(r"[\w.@+-]{1,64}")
_KEY_COLUMNS = "id, user_id, name, created_at, last_used_at"
SECONDS_BETWEEN_KEY_MARKS = 60  # `last_used_at` is for people; a write per request would be for nobody


def create_user(db: Database, name: str, password_hash: str | None = None) -> User:
    """Make a user.

    Args:
        name: 1 to 64 letters, digits and . _ @ + -; letters of either case are told apart.
        password_hash: In PHC form, such as "$argon2id$..."; None: no login by password.

    Raises:
        ConflictError: The name is taken.
        InvalidRequestError: The name has other characters, or the hash is not in PHC form.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(f"{name!r} cannot be a user's name: take 1 to 64 letters, digits, and any of . _ @ + -.")
    _check_hash(password_hash)
    user = User(UserId(new_id()), name, password_hash, now())
    try:
        db.execute(
            "INSERT INTO users (id, name, password_hash, created_at) VALUES (?, ?, ?, ?)",
            (user.id, user.name, user.password_hash, user.created_at),
        )
    except sqlite3.IntegrityError as error:
        raise ConflictError(f"There is a user named {name!r} already.") from error
    return user


def get_user(db: Database, user_id: UserId) -> User:
    """Return a user.

    Raises:
        NotFoundError: There is none.
    """
    row = db.execute("SELECT id, name, password_hash, created_at FROM users WHERE id = ?", (user_id,)).fetchone()
    if row is None:
        raise NotFoundError(f"There is no user {user_id}.")
    return User(*row)


def find_user(db: Database, name: str) -> User | None:
    """Return the user of this name, if there is one."""
    row = db.execute("SELECT id, name, password_hash, created_at FROM users WHERE name = ?", (name,)).fetchone()
    return None if row is None else User(*row)


def list_users(db: Database) -> tuple[User, ...]:
    """Return all users by name."""
    return tuple(User(*row) for row in db.execute("SELECT id, name, password_hash, created_at FROM users ORDER BY name"))


def set_password_hash(db: Database, user_id: UserId, password_hash: str | None) -> User:
    """Change a user's password hash; every login of the user ends. Raises as `create_user` and `get_user` do."""
    _check_hash(password_hash)
    get_user(db, user_id)
    db.execute("DELETE FROM logins WHERE user_id = ?", (user_id,))
    db.execute("UPDATE users SET password_hash = ? WHERE id = ?", (password_hash, user_id))
    return get_user(db, user_id)


def delete_user(db: Database, user_id: UserId) -> User:
    """Remove a user with all that is theirs, for good, and return who it was.

    Raises:
        NotFoundError: There is none.
        InvalidRequestError: It is the local user, whom a server without logins needs.
    """
    user = get_user(db, user_id)
    if user_id == LOCAL_USER:
        raise InvalidRequestError("The local user cannot be removed: a server without logins acts for it.")
    for (conversation_id,) in db.execute("SELECT id FROM conversations WHERE owner_id = ?", (user_id,)).fetchall():
        forget_conversation(db, ConversationId(conversation_id))
    drop_unreferenced_nodes(db)
    db.execute("DELETE FROM presets WHERE owner_id = ?", (user_id,))
    db.execute("DELETE FROM api_keys WHERE user_id = ?", (user_id,))
    db.execute("DELETE FROM logins WHERE user_id = ?", (user_id,))
    db.execute("DELETE FROM users WHERE id = ?", (user_id,))
    return user


def create_api_key(db: Database, user_id: UserId, name: str) -> tuple[ApiKey, str]:
    """Make a key; return it and its secret, which cannot be read again.

    Raises:
        NotFoundError: There is no such user.
        InvalidRequestError: The name is longer than 200 characters.
    """
    get_user(db, user_id)
    if len(name) > 200:
        raise InvalidRequestError(f"The name of a key has {len(name)} characters; at most 200 are allowed.")
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    key = ApiKey(ApiKeyId(new_id()), user_id, name, now())
    db.execute(
        "INSERT INTO api_keys (id, user_id, name, key_hash, created_at) VALUES (?, ?, ?, ?, ?)",
        (key.id, user_id, name, _hash(secret), key.created_at),
    )
    return key, secret


def find_user_by_api_key(db: Database, secret: str) -> User | None:
    """Return whose key it is, if it is one."""
    row = db.execute(
        "SELECT u.id, u.name, u.password_hash, u.created_at FROM api_keys k JOIN users u ON u.id = k.user_id"
        " WHERE k.key_hash = ?",
        (_hash(secret),),
    ).fetchone()
    return None if row is None else User(*row)


def mark_api_key_used(db: Database, secret: str) -> None:
    """Note that a key was used, at most once a minute."""
    db.execute(
        "UPDATE api_keys SET last_used_at = :now WHERE key_hash = :hash AND coalesce(last_used_at, 0) < :now - :pause",
        {"now": now(), "hash": _hash(secret), "pause": SECONDS_BETWEEN_KEY_MARKS * 1_000_000},
    )


def list_api_keys(db: Database, user_id: UserId) -> tuple[ApiKey, ...]:
    """Return the user's keys, oldest first."""
    rows = db.execute(f"SELECT {_KEY_COLUMNS} FROM api_keys WHERE user_id = ? ORDER BY created_at, id", (user_id,))
    return tuple(ApiKey(*row) for row in rows)


def revoke_api_key(db: Database, user_id: UserId, key_id: ApiKeyId) -> None:
    """Remove a key.

    Raises:
        NotFoundError: There is none, or it is another user's.
    """
    if db.execute("DELETE FROM api_keys WHERE id = ? AND user_id = ?", (key_id, user_id)).rowcount == 0:
        raise NotFoundError(f"There is no API key {key_id}.")


def _check_hash(password_hash: str | None) -> None:
    if password_hash is not None and not re.fullmatch(r"\$[a-z0-9-]+\$\S+", password_hash):
        raise InvalidRequestError("A password is stored as a hash in PHC form ('$argon2id$...'), never as it is.")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
