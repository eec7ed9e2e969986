"""`chatpage user` and `chatpage key`: who may use a server that others can reach.

Invariant: a password is never an argument, which other users of the machine could read; what cannot be undone is asked first.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chatpage.errors import InvalidRequestError, NotFoundError

if TYPE_CHECKING:
    from chatpage.store import Store, User

DataDir = Annotated[Path | None, typer.Option("--data", metavar="DIR", help="where the conversations lie")]
_Name = Annotated[str, typer.Argument(help="name of the user")]
_help = {"no_args_is_help": True, "context_settings": {"help_option_names": ["-h", "--help"]}}
users = typer.Typer(help="Users of a server that others can reach.", **_help)  # type: ignore[arg-type]
keys = typer.Typer(help="API keys, for programs.", **_help)  # type: ignore[arg-type]


@users.command("add")
def add_user(name: _Name, data: DataDir = None) -> None:
    """Make a user; asks for the password, or reads it from stdin."""
    from chatpage.server.passwords import hash_password

    with _open(data) as store:
        if store.find_user(name) is not None:
            raise InvalidRequestError(f"There is a user named {name!r} already; 'chatpage user password' changes the password.")
        store.create_user(name, hash_password(_read_password()))


@users.command("password")
def change_password(name: _Name, data: DataDir = None) -> None:
    """Change a password, or give one; every login of the user ends."""
    from chatpage.server.passwords import hash_password

    with _open(data) as store:
        user = _find(store, name)
        store.set_password_hash(user.id, hash_password(_read_password()))


@users.command("list")
def list_users(data: DataDir = None) -> None:
    """Print users, whether they have a password, and their number of keys."""
    with _open(data) as store:
        for user in store.list_users():
            password = "password" if user.password_hash else "-"
            print(f"{user.name}\t{password}\t{len(store.list_api_keys(user.id))} keys\t{_day(user.created_at)}")


@users.command("remove")
def remove_user(
    name: _Name, yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False, data: DataDir = None
) -> None:
    """Remove a user with all conversations, for good."""
    with _open(data) as store:
        user = _find(store, name)
        if not yes and not _confirm(f"Remove {name} with every conversation of theirs, for good?"):
            raise InvalidRequestError("Nothing was removed.")
        store.delete_user(user.id)


@keys.command("add")
def add_key(
    user: Annotated[str, typer.Argument(help="whose key; made if there is no such user")],
    name: Annotated[str, typer.Option(help="what the key is for")] = "",
    data: DataDir = None,
) -> None:
    """Make an API key and print it, once."""
    with _open(data) as store:
        owner = store.find_user(user) or store.create_user(user)
        print(store.create_api_key(owner.id, name)[1])


@keys.command("list")
def list_keys(
    user: Annotated[str | None, typer.Argument(help="whose keys; default: all")] = None, data: DataDir = None
) -> None:
    """Print keys by their ids, with what they are for and when they were used last."""
    with _open(data) as store:
        for owner in store.list_users() if user is None else [_find(store, user)]:
            for key in store.list_api_keys(owner.id):
                used = "never" if key.last_used_at is None else _day(key.last_used_at)
                print(f"{key.id}\t{owner.name}\t{key.name or '-'}\t{_day(key.created_at)}\t{used}")


@keys.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(help="as 'key list' shows it")], data: DataDir = None) -> None:
    """Make a key useless."""
    from chatpage.store import ApiKeyId

    with _open(data) as store:
        for owner in store.list_users():
            if any(key.id == key_id for key in store.list_api_keys(owner.id)):
                store.revoke_api_key(owner.id, ApiKeyId(key_id))
                return
    raise NotFoundError(f"There is no API key {key_id}; 'chatpage key list' shows them.")


def _open(data: Path | None) -> "Store":
    from chatpage.store import Store, database_path

    return Store(database_path(data))


def _find(store: "Store", name: str) -> "User":
    user = store.find_user(name)
    if user is None:
        raise NotFoundError(f"There is no user named {name!r}; 'chatpage user list' shows them.")
    return user


def _read_password() -> str:
    if sys.stdin is None:
        raise InvalidRequestError("stdin is closed, so there is no password to read.")
    if sys.stdin.isatty():
        password: str = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
        return password
    return sys.stdin.readline().rstrip("\r\n")


def _confirm(question: str) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise InvalidRequestError("Nobody can be asked here: give --yes to remove the user for good.")
    return typer.confirm(question)


def _day(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d")
