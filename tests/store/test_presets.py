"""Presets: a system prompt and parameters under a name, per user."""

import pytest

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store import LOCAL_USER, Store


def test_a_preset_can_be_made_changed_and_removed(store: Store) -> None:
    made = store.create_preset(LOCAL_USER, " poet ", system_prompt="Rhyme.", params={"temperature": 1.2})
    assert (made.name, made.system_prompt, made.params) == ("poet", "Rhyme.", {"temperature": 1.2})
    changed = store.update_preset(LOCAL_USER, made.id, system_prompt="Scan.")
    assert (changed.name, changed.system_prompt, changed.params) == ("poet", "Scan.", {"temperature": 1.2})
    assert store.list_presets(LOCAL_USER) == (changed,)
    assert store.delete_preset(LOCAL_USER, made.id) == changed
    assert store.list_presets(LOCAL_USER) == ()


def test_names_are_unique_per_user(store: Store) -> None:
    store.create_preset(LOCAL_USER, "poet")
    other = store.create_preset(LOCAL_USER, "critic")
    with pytest.raises(ConflictError, match="named 'poet' already"):
        store.create_preset(LOCAL_USER, "poet")
    with pytest.raises(ConflictError, match="named 'poet' already"):
        store.update_preset(LOCAL_USER, other.id, name="poet")
    store.create_preset(store.create_user("bob").id, "poet")


@pytest.mark.parametrize("name", ["", "  ", "x" * 201])
def test_a_name_out_of_bounds_is_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="must be 1 to 200 characters"):
        store.create_preset(LOCAL_USER, name)


def test_another_users_preset_is_not_found(store: Store) -> None:
    made = store.create_preset(LOCAL_USER, "poet")
    bob = store.create_user("bob").id
    for attempt in (
        lambda: store.get_preset(bob, made.id),
        lambda: store.update_preset(bob, made.id, name="mine"),
        lambda: store.delete_preset(bob, made.id),
        lambda: store.create_conversation(bob, preset_id=made.id),
    ):
        with pytest.raises(NotFoundError, match="There is no preset"):
            attempt()


def test_a_conversation_outlives_its_preset(store: Store) -> None:
    preset = store.create_preset(LOCAL_USER, "poet")
    conversation = store.create_conversation(LOCAL_USER, preset_id=preset.id)
    assert conversation.preset_id == preset.id
    with pytest.raises(InvalidRequestError, match="choose one of the two"):
        store.update_conversation(LOCAL_USER, conversation.id, preset_id=preset.id, without_preset=True)
    assert store.update_conversation(LOCAL_USER, conversation.id, without_preset=True).preset_id is None
    assert store.update_conversation(LOCAL_USER, conversation.id, preset_id=preset.id).preset_id == preset.id
    store.delete_preset(LOCAL_USER, preset.id)
    after = store.get_conversation(LOCAL_USER, conversation.id)
    assert (after.preset_id, after.version) == (None, 4)
