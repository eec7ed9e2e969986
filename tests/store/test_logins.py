"""Logins: a token opens its user's door until it expires, is given back, or the password changes."""

import pytest

from chatpage.errors import NotFoundError
from chatpage.store import Store, UserId

HASH = "$argon2id$v=19$m=65536,t=3,p=4$c2FsdA$aGFzaA"


def test_a_token_stands_for_its_user_until_it_is_given_back(store: Store) -> None:
    ada = store.create_user("ada", HASH)
    laptop, phone = (store.create_login(ada.id, lifetime_s=60) for _ in range(2))
    assert store.find_user_by_login(laptop) == store.find_user_by_login(phone) == ada
    assert store.find_user_by_login(laptop + "x") is None
    assert store.find_user_by_login("\ud800") is None
    store.end_login(laptop)
    store.end_login(laptop)
    assert store.find_user_by_login(laptop) is None
    assert store.find_user_by_login(phone) == ada


def test_an_expired_token_opens_nothing_and_is_swept_away(store: Store) -> None:
    ada = store.create_user("ada", HASH)
    token = store.create_login(ada.id, lifetime_s=0)
    assert store.find_user_by_login(token) is None
    store.create_login(ada.id, lifetime_s=60)
    assert store.database.read(lambda db: db.execute("SELECT count(*) FROM logins").fetchone()[0]).result() == 1


def test_another_password_ends_every_login_and_so_does_the_end_of_the_user(store: Store) -> None:
    ada, bob = store.create_user("ada", HASH), store.create_user("bob", HASH)
    adas, bobs = (store.create_login(user.id, lifetime_s=60) for user in (ada, bob))
    store.set_password_hash(ada.id, HASH + "x")
    assert store.find_user_by_login(adas) is None
    assert store.find_user_by_login(bobs) == bob
    store.delete_user(bob.id)
    assert store.find_user_by_login(bobs) is None
    with pytest.raises(NotFoundError):
        store.create_login(UserId("nobody"), lifetime_s=60)


def test_the_file_holds_no_token(store: Store) -> None:
    token = store.create_login(store.create_user("ada", HASH).id, lifetime_s=60)
    store.close()
    assert token.encode() not in store.path.read_bytes()
