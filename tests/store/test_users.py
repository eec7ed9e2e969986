"""Users and keys: unique, hashed, and gone with everything when removed."""

import pytest
import sqlite_utils

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store import LOCAL_USER, NewNode, Role, Store, UserId

HASH = "$argon2id$v=19$m=65536,t=3,p=4$c2FsdA$aGFzaA"


def test_the_local_user_is_there_from_the_start(store: Store) -> None:
    assert [found.id for found in store.list_users()] == [LOCAL_USER]


def test_a_user_is_found_by_id_and_by_name(store: Store) -> None:
    made = store.create_user("ada@example.org", HASH)
    assert store.get_user(made.id) == store.find_user("ada@example.org") == made
    assert store.find_user("eve") is None
    with pytest.raises(NotFoundError, match="There is no user nobody"):
        store.get_user(UserId("nobody"))


def test_a_name_is_taken_once(store: Store) -> None:
    store.create_user("ada")
    with pytest.raises(ConflictError, match="There is a user named 'ada' already"):
        store.create_user("ada")


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a\nb", "<b>"])
def test_a_name_of_other_characters_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be a user's name"):
        store.create_user(name)


def test_a_password_is_never_stored_as_it_is(store: Store) -> None:
    with pytest.raises(InvalidRequestError, match="never as it is"):
        store.create_user("ada", "correct horse")
    made = store.create_user("ada")
    with pytest.raises(InvalidRequestError, match="never as it is"):
        store.set_password_hash(made.id, "correct horse")
    assert store.set_password_hash(made.id, HASH).password_hash == HASH
    assert HASH not in repr(store.get_user(made.id))


def test_a_key_opens_its_users_door_until_it_is_revoked(store: Store) -> None:
    ada = store.create_user("ada")
    key, secret = store.create_api_key(ada.id, "laptop")
    assert store.find_user_by_api_key(secret) == ada
    assert store.find_user_by_api_key(secret + "x") is None
    assert store.find_user_by_api_key("\ud800") is None
    with pytest.raises(NotFoundError, match="There is no API key"):
        store.revoke_api_key(LOCAL_USER, key.id)
    store.revoke_api_key(ada.id, key.id)
    assert store.find_user_by_api_key(secret) is None
    assert store.list_api_keys(ada.id) == ()


def test_the_file_holds_no_secret_of_a_key(store: Store) -> None:
    _, secret = store.create_api_key(LOCAL_USER, "laptop")
    store.close()
    assert secret.encode() not in store.path.read_bytes()
    assert secret.removeprefix("cp-").encode() not in store.path.read_bytes()


def test_the_use_of_a_key_is_noted_at_most_once_a_minute(store: Store) -> None:
    _, secret = store.create_api_key(LOCAL_USER, "laptop")
    assert store.list_api_keys(LOCAL_USER)[0].last_used_at is None
    store.mark_api_key_used(secret)
    first = store.list_api_keys(LOCAL_USER)[0].last_used_at
    assert first is not None
    store.mark_api_key_used(secret)
    assert store.list_api_keys(LOCAL_USER)[0].last_used_at == first


def test_a_removed_user_leaves_nothing_behind(store: Store) -> None:
    ada = store.create_user("ada").id
    kept = store.create_conversation(LOCAL_USER)
    conversation = store.create_conversation(ada, tags=["x"])
    store.add_node(ada, conversation.id, None, NewNode(role=Role.USER, text="secret"))
    store.create_preset(ada, "poet")
    store.create_api_key(ada, "laptop")
    store.delete_user(ada)

    def owned(db: sqlite_utils.Database) -> int:
        tables = {"conversations": "owner_id", "nodes": "owner_id", "presets": "owner_id", "api_keys": "user_id"}
        counts = (db.execute(f"SELECT count(*) FROM {t} WHERE {c} = ?", (ada,)).fetchone()[0] for t, c in tables.items())
        return sum(counts)

    assert store.database.read(owned).result() == 0
    assert store.list_conversations(LOCAL_USER) == (kept,)
    with pytest.raises(NotFoundError):
        store.create_conversation(ada)


def test_the_local_user_stays(store: Store) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be removed"):
        store.delete_user(LOCAL_USER)
