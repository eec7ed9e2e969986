"""`chatpage user` and `chatpage key` from a shell: passwords come by stdin, never as arguments."""

from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from typer.testing import CliRunner, Result

from chatpage.cli import app
from chatpage.errors import ChatpageError, InvalidRequestError, NotFoundError
from chatpage.server import passwords
from chatpage.server.passwords import matches
from chatpage.store import LOCAL_USER, Store

GOOD = "correct horse"


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "_hasher", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    def run(*arguments: str, input: str = "") -> Result:
        result = CliRunner().invoke(app, [*arguments, "--data", str(tmp_path)], input=input)
        if result.exception is not None:
            raise result.exception
        return result

    return run


def test_a_user_is_made_listed_given_another_password_and_removed(run: Any, tmp_path: Path) -> None:
    run("user", "add", "ann", input=GOOD + "\n")
    with Store(tmp_path / "chatpage.db") as store:
        first = store.find_user("ann")
        assert first is not None
        assert matches(first.password_hash or "", GOOD)
    run("user", "password", "ann", input="another horse\n")
    run("key", "add", "bob")
    lines = {line.split("\t")[0]: line.split("\t")[1:3] for line in run("user", "list").stdout.splitlines()}
    assert lines == {"ann": ["password", "0 keys"], "bob": ["-", "1 keys"], "local": ["-", "0 keys"]}
    run("user", "remove", "ann", "--yes")
    with Store(tmp_path / "chatpage.db") as store:
        assert store.find_user("ann") is None


def test_what_cannot_be_done_says_why_and_changes_nothing(run: Any, tmp_path: Path) -> None:
    run("user", "add", "ann", input=GOOD + "\n")
    mistakes: list[tuple[tuple[str, ...], str, type[ChatpageError]]] = [
        (("user", "add", "ann"), GOOD, InvalidRequestError),
        (("user", "add", "bob"), "short", InvalidRequestError),
        (("user", "add", "a b"), GOOD, InvalidRequestError),
        (("user", "password", "bob"), GOOD, NotFoundError),
        (("user", "password", "ann"), "", InvalidRequestError),
        (("user", "remove", "ann"), "y", InvalidRequestError),
        (("user", "remove", "bob", "--yes"), "", NotFoundError),
        (("key", "revoke", "none"), "", NotFoundError),
        (("key", "list", "bob"), "", NotFoundError),
    ]
    for arguments, typed, error in mistakes:
        with pytest.raises(error):
            run(*arguments, input=typed + "\n")
    with Store(tmp_path / "chatpage.db") as store:
        assert [user.name for user in store.list_users()] == ["ann", "local"]
        assert matches(store.list_users()[0].password_hash or "", GOOD)


def test_a_key_is_printed_once_listed_without_its_secret_and_revoked(run: Any, tmp_path: Path) -> None:
    keys = [run("key", "add", "ann", "--name", name).stdout.strip() for name in ("laptop", "phone")]
    assert keys[0] != keys[1]
    with Store(tmp_path / "chatpage.db") as store:
        owners = [store.find_user_by_api_key(key) for key in keys]
        assert owners[0] == owners[1] == store.find_user("ann") is not None
    listed = run("key", "list").stdout
    assert listed == run("key", "list", "ann").stdout
    assert not any(key in listed for key in keys)
    [laptop, phone] = [line.split("\t") for line in listed.splitlines()]
    assert (laptop[1:3], phone[1:3]) == (["ann", "laptop"], ["ann", "phone"])
    run("key", "revoke", laptop[0])
    with Store(tmp_path / "chatpage.db") as store:
        assert [store.find_user_by_api_key(key) is not None for key in keys] == [False, True]
        assert store.list_api_keys(LOCAL_USER) == ()
