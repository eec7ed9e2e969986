"""Editing and deleting destroy nothing."""

from pathlib import Path

import pytest

from chatpage.errors import ConflictError, InvalidParameterError, NotFoundError
from chatpage.server.views import RunParams
from chatpage.session.limits import SessionLimits, merge_params
from chatpage.store import LOCAL_USER, PresetId, Role
from chatpage.store.records import Json
from tests.sessions import Desk, with_desk


def test_editing_an_answer_keeps_what_hangs_below_the_original(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        first = await desk.reply(chat, "Hello")
        second = await desk.reply(chat, "More", first.id)
        edited = await desk.session.edit(LOCAL_USER, chat.id, first.id, "Better")
        assert (edited.parent_id, edited.role, edited.num_tokens) == (first.parent_id, Role.ASSISTANT, 0)
        assert (await desk.path(chat))[-1].id == edited.id
        await desk.session.select(LOCAL_USER, chat.id, second.id)
        assert [node.id for node in await desk.path(chat)][-1] == second.id
        assert (await desk.node(chat, first.id)).text == first.text

    with_desk(tmp_path, test)


def test_editing_a_question_can_have_it_answered_at_once(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(system_prompt="Be brief.")
        [system] = await desk.path(chat)
        reply = await desk.reply(chat, "Hello", system.id)
        assert reply.parent_id is not None
        run = await desk.session.edit_and_answer(
            LOCAL_USER, chat.id, reply.parent_id, "Good morning", n=2, params=RunParams(max_tokens=3, ignore_eos=True)
        )
        await desk.read(run)
        assert run.parent_id == run.input_node_id
        assert [len(await desk.children(chat, parent)) for parent in (system.id, run.input_node_id)] == [2, 2]
        with pytest.raises(InvalidParameterError, match="Only a user's message"):
            await desk.session.edit_and_answer(LOCAL_USER, chat.id, reply.id, "x")
        with pytest.raises(ConflictError):
            await desk.session.edit_and_answer(LOCAL_USER, chat.id, reply.parent_id, "x", expected_version=1)

    with_desk(tmp_path, test)


def test_presets_are_changed_through_the_session(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        preset = await desk.session.create_preset(LOCAL_USER, "Terse", params=RunParams(top_k=2))
        changed = await desk.session.update_preset(LOCAL_USER, preset.id, name="Short", params=RunParams(top_k=3))
        assert (changed.name, changed.params) == ("Short", {"top_k": 3})
        chat = await desk.conversation(preset_id=preset.id)
        await desk.session.delete_preset(LOCAL_USER, preset.id)
        assert (await desk.reply(chat)).num_tokens == 8
        with pytest.raises(NotFoundError):
            await desk.conversation(preset_id=PresetId("nobody"))

    with_desk(tmp_path, test)


def test_stored_parameters_that_are_none_of_ours_are_passed_over_and_wrong_ones_named() -> None:
    """An imported conversation keeps the parameters of its origin."""
    stored: list[tuple[str, Json]] = [("conversation", {"model": "gpt", "temperature": 0.5})]
    merged = merge_params(RunParams(), stored, n=2, limits=SessionLimits())
    assert (merged.sampling.temperature, merged.sampling.n) == (0.5, 2)
    assert set(merged.stored) == {"temperature", "seed"}
    with pytest.raises(InvalidParameterError, match="temperature of the conversation"):
        merge_params(RunParams(), [("conversation", {"temperature": "hot"})], n=1, limits=SessionLimits())


def test_the_seed_of_an_unseeded_run_is_drawn_and_small_enough_for_a_browser() -> None:
    seeds = {merge_params(RunParams(), [], n=1, limits=SessionLimits()).seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) < 2**53
