"""Passwords: only the right one opens, guessing is slowed down, and nobody learns which names exist."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from argon2 import PasswordHasher

from chatpage.errors import InvalidRequestError, OverloadedError
from chatpage.server import passwords
from chatpage.server.passwords import MAX_PER_ADDRESS, MAX_PER_NAME, Guesses, Passwords, TooManyGuessesError, hash_password
from chatpage.store import LOCAL_USER, Store
from tests.store.conftest import store as store  # noqa: PLC0414 - a fixture

GOOD = "correct horse"


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "_hasher", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))


def _run(store: Store, test: Callable[[Passwords], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        checker = Passwords(store)
        try:
            await test(checker)
        finally:
            checker.close()

    asyncio.run(run())


def test_a_name_opens_with_its_password_alone(store: Store) -> None:
    ada = store.create_user("ada", hash_password(GOOD))
    store.create_user("bob")

    async def test(checker: Passwords) -> None:
        assert await checker.find_user("ada", GOOD, "1.1.1.1") == ada
        for name, password in [
            ("ada", "wrong horse"),
            ("bob", ""),
            ("bob", GOOD),
            ("eve", GOOD),
            ("local", ""),
            ("ada", "\ud800"),
        ]:
            assert await checker.find_user(name, password, "1.1.1.1") is None

    _run(store, test)


def test_the_same_letters_typed_on_another_system_are_the_same_password(store: Store) -> None:
    """One keyboard sends é as one code point, another as e with an accent."""
    ada = store.create_user("ada", hash_password("caf\u00e9 caf\u00e9"))

    async def test(checker: Passwords) -> None:
        assert await checker.find_user("ada", "cafe\u0301 cafe\u0301", "1.1.1.1") == ada

    _run(store, test)


def test_a_name_that_does_not_exist_is_compared_as_one_that_does(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes at once would tell that there is no such user."""
    store.create_user("ada", hash_password(GOOD))
    compared = []

    def counted(password_hash: str, password: str) -> bool:
        compared.append(password_hash)
        return False

    monkeypatch.setattr(passwords, "matches", counted)

    async def test(checker: Passwords) -> None:
        for name in ("ada", "eve", "local"):
            await checker.find_user(name, GOOD, "1.1.1.1")

    _run(store, test)
    costs = {stored.rpartition("$")[0].rpartition("$")[0] for stored in compared}
    assert len(compared) == 3
    assert len(costs) == 1, "all of them cost the same"


@pytest.mark.parametrize("password", ["", "short", "x" * 1025])
def test_a_password_that_is_too_short_or_too_long_is_refused(password: str) -> None:
    with pytest.raises(InvalidRequestError, match="8 to 1024 are needed"):
        hash_password(password)


def test_wrong_passwords_are_counted_even_when_they_come_at_once(store: Store) -> None:
    store.create_user("ada", hash_password(GOOD))

    async def test(checker: Passwords) -> None:
        guesses = [checker.find_user("ada", f"wrong {i}", "1.1.1.1") for i in range(MAX_PER_NAME + 5)]
        answers = await asyncio.gather(*guesses, return_exceptions=True)
        assert [type(answer) for answer in answers] == [type(None)] * MAX_PER_NAME + [TooManyGuessesError] * 5
        with pytest.raises(TooManyGuessesError):
            await checker.find_user("ada", GOOD, "2.2.2.2")

    _run(store, test)


def test_right_passwords_are_not_counted(store: Store) -> None:
    ada = store.create_user("ada", hash_password(GOOD))

    async def test(checker: Passwords) -> None:
        for _ in range(MAX_PER_NAME + 1):
            assert await checker.find_user("ada", GOOD, "1.1.1.1") == ada

    _run(store, test)


def test_too_many_who_wait_for_a_hash_are_turned_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passwords, "MAX_WAITING", 3)

    async def test(checker: Passwords) -> None:
        waiting = [checker.find_user(f"user{i}", GOOD, f"1.1.1.{i}") for i in range(5)]
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(answer) for answer in answers] == [type(None)] * 3 + [OverloadedError] * 2

    _run(store, test)


def test_guesses_are_forgotten_after_a_while_and_bounded() -> None:
    now = 0.0
    guesses = Guesses(lambda: now)
    for _ in range(MAX_PER_NAME):
        guesses.count("ada", "1.1.1.1")
    with pytest.raises(TooManyGuessesError) as caught:
        guesses.count("ada", "1.1.1.2")
    assert caught.value.wait_s == passwords.WINDOW_S
    now = passwords.WINDOW_S + 1
    guesses.count("ada", "1.1.1.2")
    for i in range(passwords.MAX_REMEMBERED + 10):
        guesses.count(f"name{i}", f"address{i}")
    assert len(guesses._times) == passwords.MAX_REMEMBERED


@pytest.mark.parametrize("later_s", [0.1, 0.4, 0.6, 0.9])
def test_who_comes_after_the_seconds_it_was_told_is_let_in(later_s: float) -> None:
    now = 0.0
    guesses = Guesses(lambda: now)
    for _ in range(MAX_PER_NAME):
        guesses.count("ada", "1.1.1.1")
    now = later_s
    with pytest.raises(TooManyGuessesError) as caught:
        guesses.count("ada", "1.1.1.1")
    now += caught.value.retry_after_s
    guesses.count("ada", "1.1.1.1")


def test_one_address_cannot_try_every_name_and_an_ipv6_network_is_one_address() -> None:
    guesses = Guesses(lambda: 0.0)
    for i in range(MAX_PER_ADDRESS):
        guesses.count(f"name{i}", f"2001:db8::{i:x}")
    with pytest.raises(TooManyGuessesError):
        guesses.count("another", "2001:db8::ffff")
    guesses.count("another", "2001:db8:1::1")


def test_a_guess_that_must_wait_is_not_counted() -> None:
    """Else whoever keeps trying would never be let in again."""
    now = 0.0
    guesses = Guesses(lambda: now)
    for _ in range(MAX_PER_NAME):
        guesses.count("ada", "1.1.1.1")
    now = passwords.WINDOW_S - 1
    for _ in range(3):
        with pytest.raises(TooManyGuessesError):
            guesses.count("ada", "1.1.1.1")
    now = passwords.WINDOW_S + 1
    guesses.count("ada", "1.1.1.1")


def test_the_local_user_has_no_password_from_the_start(store: Store) -> None:
    assert store.get_user(LOCAL_USER).password_hash is None
