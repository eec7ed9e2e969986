"""What starts a run: replies, regenerations, continuations and forks, their limits, and what they would cost."""

import asyncio
from pathlib import Path

import pytest

from chatpage.errors import (
    ConflictError,
    ContextLengthError,
    InvalidParameterError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from chatpage.server.views import RunParams, RunRequest
from chatpage.session import SessionLimits
from chatpage.store import LOCAL_USER, NewNode, NodeId, NodeStatus, Role, RunId, RunKind, RunStatus, UserId
from tests.engine.engines import tiny_engine
from tests.sessions import LONG, SHORT, Desk, open_desk, with_desk


def test_a_reply_is_the_users_message_and_its_samples_beside_each_other(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(system_prompt="Be brief.")
        [system] = await desk.path(chat)
        run = await desk.ask(chat, "Hello", system.id, n=3, params=RunParams(max_tokens=8, ignore_eos=True, seed=5))
        copy = await desk.read(run)
        assert await desk.children(chat, system.id) == (run.input_node_id,)
        assert await desk.children(chat, run.input_node_id) == run.node_ids
        nodes = [await desk.node(chat, node_id) for node_id in run.node_ids]
        assert [node.text for node in nodes] == [copy.texts[i] for i in range(3)]
        assert len({node.text for node in nodes}) == 3
        assert all(node.num_tokens == 8 and node.params["seed"] == 5 for node in nodes)
        assert all((node.status, node.finish_reason) == (NodeStatus.COMPLETE, "length") for node in nodes)
        assert (await desk.path(chat))[-1].id == run.node_ids[0], "the first sample is shown"
        stored = await desk.store.get_run.aio(LOCAL_USER, RunId(run.run_id))
        assert (stored.status, stored.usage["completion_tokens"]) == (RunStatus.COMPLETE, 24)
        assert stored.samples[0].sum_logprob is not None

    with_desk(tmp_path, test)


def test_the_next_turn_and_a_regeneration_find_all_but_the_new_tokens(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        first = await desk.reply(chat, "Hello")
        second = await desk.reply(chat, "More", first.id)
        prompt, cached = first.usage["prompt_tokens"], second.usage["cached_tokens"]
        assert cached == prompt + first.num_tokens - 1, "only the last token of the reply was never computed"
        again = await desk.again(RunKind.REGENERATE, chat, second.id)
        copy = await desk.read(again)
        assert copy.done[0].usage.cached_tokens == copy.done[0].usage.prompt_tokens
        assert (await desk.node(chat, again.node_ids[0])).text == second.text, "greedy says the same"

    with_desk(tmp_path, test)


def test_regenerating_adds_siblings_and_differs_each_time_unless_seeded(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        free = RunParams(max_tokens=12, ignore_eos=True)
        reply = await desk.reply(chat, "Hello", params=free)
        texts = {reply.text}
        for _attempt in range(2):
            run = await desk.again(RunKind.REGENERATE, chat, reply.id, params=free, n=2)
            texts |= set((await desk.read(run)).texts.values())
        assert len(texts) == 5
        assert run.seed is not None
        seeded = free.model_copy(update={"seed": run.seed})
        same = await desk.again(RunKind.REGENERATE, chat, reply.parent_id or "", params=seeded)
        assert set((await desk.read(same)).texts.values()) < texts
        assert len(await desk.children(chat, reply.parent_id)) == 6

    with_desk(tmp_path, test)


def test_continuing_a_stopped_reply_says_what_it_would_have_said(tmp_path: Path) -> None:
    """A stopped reply once lost its text, or was repeated from its start, when it was continued."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        whole = await desk.reply(chat, "Hello", params=LONG.model_copy(update={"max_tokens": 300}))
        run = await desk.again(RunKind.REGENERATE, chat, whole.id, params=LONG)
        await desk.first_text(run)
        await desk.session.cancel_run(LOCAL_USER, RunId(run.run_id))
        await desk.read(run)
        cut = await desk.node(chat, run.node_ids[0])
        assert (cut.status, cut.finish_reason) == (NodeStatus.ABORTED, "abort")
        assert 0 < cut.num_tokens < 300
        assert whole.text.startswith(cut.text.rstrip("\ufffd"))  # it may be cut inside a character
        rest = LONG.model_copy(update={"max_tokens": 300 - cut.num_tokens})
        more = await desk.again(RunKind.CONTINUE, chat, cut.id, params=rest)
        assert more.node_ids == (cut.id,), "it goes on in place"
        copy = await desk.read(more)
        continued = await desk.node(chat, cut.id)
        assert continued.text == copy.texts[0]
        assert continued.text.replace("\ufffd", "") == whole.text.replace("\ufffd", "")
        assert continued.token_ids == whole.token_ids
        assert copy.done[0].usage.cached_tokens >= cut.num_tokens

    with_desk(tmp_path, test)


def test_continuing_a_reply_that_was_cut_by_its_length_goes_on_in_place(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, "Hello")
        run = await desk.again(RunKind.CONTINUE, chat, reply.id)
        await desk.read(run)
        longer = await desk.node(chat, reply.id)
        assert run.node_ids == (reply.id,)
        assert (longer.text.startswith(reply.text), longer.num_tokens) == (True, 16)

    with_desk(tmp_path, test)


def test_continuing_a_reply_that_goes_on_already_or_in_several_ways_makes_siblings_that_begin_with_it(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, "Hello")
        run = await desk.again(RunKind.CONTINUE, chat, reply.id, n=2, params=RunParams(max_tokens=5, ignore_eos=True))
        copy = await desk.read(run)
        for i, node_id in enumerate(run.node_ids):
            node = await desk.node(chat, node_id)
            assert node.text == copy.texts[i]
            assert node.token_ids[: reply.num_tokens] == reply.token_ids
            assert node.num_tokens == reply.num_tokens + 5
        assert (await desk.node(chat, reply.id)).text == reply.text

    with_desk(tmp_path, test)


def test_a_reply_without_tokens_is_continued_after_its_text(tmp_path: Path) -> None:
    """An imported or edited reply has text alone; what is added must not become all the tokens it has."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, "Hello")
        edited = await desk.session.edit(LOCAL_USER, chat.id, reply.id, "I think")
        run = await desk.again(RunKind.CONTINUE, chat, edited.id)
        await desk.read(run)
        node = await desk.node(chat, run.node_ids[0])
        assert node.text.startswith("I think")
        assert desk.engine.tokenizer.decode(list(node.token_ids[:7])) == "I think"
        assert node.num_tokens == 7 + 8

    with_desk(tmp_path, test)


@pytest.mark.parametrize("kept", [0, 1, 5, 8])
def test_a_fork_keeps_the_first_tokens_of_a_reply_and_goes_on(tmp_path: Path, kept: int) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, "Hello", params=SHORT.model_copy(update={"max_tokens": 16}))
        rest = SHORT.model_copy(update={"max_tokens": 16 - kept})
        run = await desk.again(RunKind.FORK, chat, reply.id, branch_at_token=kept, params=rest)
        await desk.read(run)
        fork = await desk.node(chat, run.node_ids[0])
        assert fork.id != reply.id
        assert (fork.parent_id, fork.token_ids, fork.text) == (reply.parent_id, reply.token_ids, reply.text)

    with_desk(tmp_path, test)


def test_a_fork_in_the_middle_of_a_character_keeps_none_of_it(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, "Hello", prefill="5 \u20ac", params=SHORT)
        assert reply.num_tokens == 5 + 8
        only_a = RunParams(max_tokens=2, ignore_eos=True, logit_bias={desk.engine.tokenizer.encode("a")[0]: 100})
        for branch_at_token, text in [(2, "5 aa"), (3, "5 aa"), (4, "5 aa"), (5, "5 \u20acaa")]:
            run = await desk.again(RunKind.FORK, chat, reply.id, branch_at_token=branch_at_token, params=only_a)
            assert (await desk.read(run)).texts[0] == text

    with_desk(tmp_path, test)


def test_a_running_reply_can_be_forked_at_its_current_token(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=LONG)
        await desk.first_text(run)
        fork = await desk.again(RunKind.FORK, chat, run.node_ids[0], branch_at_token=1)
        await desk.read(fork)
        await desk.session.cancel_run(LOCAL_USER, RunId(run.run_id))
        await desk.read(run)
        original, forked = await desk.node(chat, run.node_ids[0]), await desk.node(chat, fork.node_ids[0])
        assert forked.token_ids == original.token_ids[:9]

    with_desk(tmp_path, test)


def test_a_prefill_is_the_start_of_every_sample(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, prefill="Sure, ", n=2)
        copy = await desk.read(run)
        for i, node_id in enumerate(run.node_ids):
            node = await desk.node(chat, node_id)
            assert node.text == copy.texts[i]
            assert node.text.startswith("Sure, ")
            assert node.num_tokens == 6 + 8

    with_desk(tmp_path, test)


def test_a_message_sent_while_the_reply_before_it_runs_attaches_to_it_and_sees_all_of_it(tmp_path: Path) -> None:
    """Sent right after the first token, it once attached to the message before, or was answered without the reply."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        first = await desk.ask(chat, params=LONG.model_copy(update={"max_tokens": 200}))
        await desk.first_text(first)
        second = await desk.ask(chat, "And then?", first.node_ids[0])
        assert second.prefix is None
        assert await desk.children(chat, first.node_ids[0]) == (second.input_node_id,)
        copy = await desk.read(second)
        reply = await desk.node(chat, first.node_ids[0])
        assert reply.num_tokens == 200
        assert copy.done[0].usage.prompt_tokens > 200

    with_desk(tmp_path, test)


def test_stop_then_a_quick_message_keeps_the_context(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        first = await desk.ask(chat, params=LONG)
        await desk.first_text(first)
        await desk.session.cancel_run(LOCAL_USER, RunId(first.run_id))
        second = await desk.ask(chat, "Go on", first.node_ids[0])
        copy = await desk.read(second)
        cut = await desk.node(chat, first.node_ids[0])
        assert copy.done[0].usage.prompt_tokens > cut.num_tokens > 0
        assert copy.done[0].usage.cached_tokens >= cut.num_tokens

    with_desk(tmp_path, test)


def test_sends_and_edits_at_once_lose_nothing(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(system_prompt="Be brief.")
        [system] = await desk.path(chat)
        runs = await asyncio.gather(*(desk.ask(chat, f"Question {i}", system.id) for i in range(6)))
        edits = [desk.session.edit(LOCAL_USER, chat.id, NodeId(run.input_node_id or ""), "Better") for run in runs]
        await asyncio.gather(*edits, *(desk.read(run) for run in runs))
        assert len(await desk.children(chat, system.id)) == 12
        for run in runs:
            [reply] = [await desk.node(chat, child) for child in await desk.children(chat, run.input_node_id)]
            assert reply.num_tokens == 8

    with_desk(tmp_path, test)


# -- the same message again ----------------------------------------------------------------------------------------------


def test_a_message_sent_again_starts_nothing_new(tmp_path: Path) -> None:
    """A client that lost the answer sends again: at the same time, later, or to a server that was restarted meanwhile."""

    async def before(desk: Desk) -> tuple[str, ...]:
        chat = await desk.conversation()
        runs = await asyncio.gather(*(desk.ask(chat, client_msg_id="m1") for _ in range(5)))
        await desk.read(runs[0])
        runs.append(await desk.ask(chat, client_msg_id="m1"))
        assert len({run.run_id for run in runs}) == 1
        assert len(await desk.nodes(chat)) == 2
        return chat.id, runs[0].run_id, runs[0].input_node_id or ""

    async def run() -> None:
        async with open_desk(tmp_path) as desk:
            chat_id, run_id, input_id = await before(desk)
        async with open_desk(tmp_path) as desk:
            chat = await desk.store.get_conversation.aio(LOCAL_USER, chat_id)  # type: ignore[arg-type]
            again = await desk.ask(chat, client_msg_id="m1")
            assert (again.run_id, len(await desk.nodes(chat))) == (run_id, 2)
            copy = await desk.read(again)
            assert copy.end is not None
            assert copy.end.status is RunStatus.COMPLETE
            await desk.session.delete_node(LOCAL_USER, chat.id, NodeId(input_id))
            request = RunRequest(
                conversation_id=chat_id, parent_id=input_id, kind=RunKind.REPLY, input="Hello", client_msg_id="m1"
            )
            assert (await desk.session.create_run(LOCAL_USER, request)).run_id == run_id, "though its path is gone"

    asyncio.run(run())


def test_another_message_with_the_same_id_is_refused_and_nothing_of_it_lost_in_silence(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat, other = await desk.conversation(), await desk.conversation()
        first = asyncio.create_task(desk.ask(chat, "Name a colour.", client_msg_id="1"))
        await asyncio.sleep(0)
        for place, text in [(other, "Name a colour."), (chat, "Name a town.")]:
            with pytest.raises(ConflictError, match="started another run before"):
                await desk.ask(place, text, client_msg_id="1")
        await desk.read(await first)
        assert not await desk.nodes(other)

    with_desk(tmp_path, test)


def test_a_caller_that_goes_away_while_a_run_is_made_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        task = asyncio.create_task(desk.ask(chat, client_msg_id="m1"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        run = await desk.ask(chat, client_msg_id="m1")
        await desk.read(run)
        assert len(await desk.nodes(chat)) == 2

    with_desk(tmp_path, test)


# -- refused -------------------------------------------------------------------------------------------------------------


def test_what_is_refused_stores_nothing(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat)
        before = await desk.nodes(chat)
        system = await desk.session.add_message(LOCAL_USER, chat.id, None, Role.SYSTEM, "")
        with pytest.raises(ContextLengthError, match="2048"):
            await desk.ask(chat, "x" * 3000, reply.id)
        with pytest.raises(InvalidParameterError, match="min_tokens"):
            await desk.ask(chat, params=RunParams(min_tokens=9, max_tokens=3))
        with pytest.raises(InvalidParameterError, match="at most 4 samples"):
            await desk.ask(chat, n=5)
        with pytest.raises(InvalidParameterError, match="at most 500 tokens"):
            await desk.ask(chat, params=RunParams(max_tokens=501))
        with pytest.raises(InvalidParameterError, match="has 8 tokens"):
            await desk.again(RunKind.FORK, chat, reply.id, branch_at_token=9)
        with pytest.raises(InvalidRequestError, match="Only a reply can continue"):
            await desk.again(RunKind.CONTINUE, chat, system.id)
        with pytest.raises(InvalidRequestError, match="without an input"):
            await desk.ask(chat, None, reply.id)  # type: ignore[arg-type]
        with pytest.raises(NotFoundError):
            await desk.ask(chat, "Hello", "nobody")
        with pytest.raises(NotFoundError):
            await desk.ask(chat, "Hello", user_id=UserId("stranger"))
        request = RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="late")
        with pytest.raises(ConflictError):
            await desk.session.create_run(LOCAL_USER, request, expected_version=1)
        assert {node.id for node in await desk.nodes(chat)} == {node.id for node in before} | {system.id}

    with_desk(tmp_path, test, limits=SessionLimits(max_samples=4, max_tokens=500))


def test_a_reply_that_still_runs_cannot_be_continued(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=LONG)
        await desk.first_text(run)
        with pytest.raises(ConflictError, match="still being written"):
            await desk.again(RunKind.CONTINUE, chat, run.node_ids[0])

    with_desk(tmp_path, test)


def test_a_user_has_so_many_runs_at_once_and_so_many_waiting(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        runs = [await desk.ask(chat, f"{i}", params=LONG) for i in range(3)]
        with pytest.raises(OverloadedError, match="3 runs of yours"):
            await desk.ask(chat, "one too many")
        await desk.first_text(runs[0])
        assert (await desk.running.stats()).num_running == 1, "the others wait in the session, not in the engine"
        for i, run in enumerate(runs):
            await desk.first_text(run)
            await desk.session.cancel_run(LOCAL_USER, RunId(run.run_id))
            await desk.read(run)
            if i == 0:
                runs.append(await desk.ask(chat, "now there is room", params=LONG))
        assert desk.session.admission.num_users == 0

    with_desk(tmp_path, test, limits=SessionLimits(max_running_runs=1, max_queued_runs=2))


def test_a_full_context_keeps_the_answer_and_says_so(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=RunParams(ignore_eos=True))
        copy = await desk.read(run)
        assert (copy.done[0].finish_reason, copy.done[0].detail) == ("length", "the context of 64 tokens is full")
        node = await desk.node(chat, run.node_ids[0])
        assert (node.text, node.status) == (copy.texts[0], NodeStatus.COMPLETE)

    with_desk(tmp_path, test, engine=tiny_engine(max_model_len=64))


# -- parameters, models, users -------------------------------------------------------------------------------------------


def test_parameters_come_from_the_request_the_conversation_the_preset_and_the_server_in_this_order(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        preset = await desk.session.create_preset(
            LOCAL_USER, "Terse", system_prompt="Be brief.", params=RunParams(max_tokens=2, top_k=2, temperature=0.2)
        )
        chat = await desk.conversation(preset_id=preset.id, params=RunParams(max_tokens=3, top_k=3))
        [system] = await desk.path(chat)
        assert (system.role, system.text) == (Role.SYSTEM, "Be brief.")
        reply = await desk.reply(chat, "Hello", system.id, params=RunParams(max_tokens=4))
        expected = {"max_tokens": 4, "top_k": 3, "temperature": 0.2, "ignore_eos": True}
        assert {name: reply.params[name] for name in expected} == expected
        assert reply.num_tokens == 4

    with_desk(tmp_path, test, defaults=RunParams(ignore_eos=True, temperature=0.9))


def test_tokens_of_another_model_are_not_taken_for_ours(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        foreign = NewNode(role=Role.ASSISTANT, text="Hi", token_ids=[5, 6, 7, 8, 9], model="another")
        question = await desk.session.add_message(LOCAL_USER, chat.id, None, Role.USER, "Hello")
        reply = (await desk.store.add_node.aio(LOCAL_USER, chat.id, question.id, foreign)).nodes[0]
        ours = await desk.session.edit(LOCAL_USER, chat.id, reply.id, "Hi")
        costs = []
        for node in (reply, ours):
            request = RunRequest(conversation_id=chat.id, parent_id=node.id, kind=RunKind.REPLY, input="More")
            costs.append(await desk.session.plan(LOCAL_USER, request))
        assert costs[0].prefix.tokens == costs[1].prefix.tokens

    with_desk(tmp_path, test)


def test_users_share_neither_conversations_nor_blocks(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        other = (await desk.store.create_user.aio("other")).id
        mine, theirs = await desk.conversation(), await desk.conversation(other)
        first = await desk.reply(mine, "The same words")
        second = await desk.reply(theirs, "The same words", user_id=other)
        assert (first.usage["cached_tokens"], second.usage["cached_tokens"]) == (0, 0)
        run = await desk.ask(mine, params=LONG)
        for call in (
            desk.session.cancel_run(other, RunId(run.run_id)),
            desk.read(run, user_id=other),
            desk.session.tree(other, mine.id),
            desk.ask(mine, user_id=other),
            desk.session.warm(other, mine.id, first.id),
        ):
            with pytest.raises(NotFoundError):
                await call
        await desk.first_text(run)
        own, foreign = await desk.session.kv(LOCAL_USER), await desk.session.kv(other)
        holders = {holder for block in own.blocks for holder in block.holders}
        assert [(h.kind, h.conversation_id, h.node_id) for h in holders] == [("sample", mine.id, run.node_ids[0])]
        assert {holder.kind for block in foreign.blocks for holder in block.holders} == {"other"}

    with_desk(tmp_path, test)


# -- before a run --------------------------------------------------------------------------------------------------------


def test_a_plan_tells_the_cost_and_changes_nothing(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat)
        before = await desk.session.tree(LOCAL_USER, chat.id)
        request = RunRequest(conversation_id=chat.id, parent_id=reply.id, kind=RunKind.REPLY, input="More")
        plan = await desk.session.plan(LOCAL_USER, request, ref="r")
        assert (plan.ref, plan.is_pending, plan.prefix_break) == ("r", False, None)
        assert await desk.session.plan(LOCAL_USER, request, ref="r") == plan
        assert await desk.session.tree(LOCAL_USER, chat.id) == before
        run = await desk.session.create_run(LOCAL_USER, request)
        assert run.prefix == plan.prefix
        copy = await desk.read(run)
        assert copy.done[0].usage.cached_tokens == plan.prefix.cached

    with_desk(tmp_path, test)


def test_warming_computes_the_path_and_the_draft_before_they_are_sent(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(system_prompt="Be brief. " * 10)
        [system] = await desk.path(chat)
        request = RunRequest(conversation_id=chat.id, parent_id=system.id, kind=RunKind.REPLY, input="Hello there")
        cold = await desk.session.plan(LOCAL_USER, request)
        await desk.session.warm(LOCAL_USER, chat.id, system.id, "Hello th")
        while desk.session._warming:
            await asyncio.sleep(0.01)
        warm = await desk.session.plan(LOCAL_USER, request)
        assert cold.prefix.cached == 0
        assert warm.prefix.computed < len("ere<|im_end|>\n<|im_start|>assistant\n")
        assert len(await desk.nodes(chat)) == 1

    with_desk(tmp_path, test)


def test_a_newer_warming_replaces_an_older_one(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        for i in range(10):
            await desk.session.warm(LOCAL_USER, chat.id, None, "x" * (1000 + i))
            assert len(desk.session._warming) <= 1
        await asyncio.gather(*(desk.session.warm(LOCAL_USER, chat.id, None, "y" * (1000 + i)) for i in range(20)))
        await asyncio.sleep(0)
        assert sum(not task.done() for task in desk.session._tasks) <= 1, "each of those sent at once was computed"
        while desk.session._tasks:
            await asyncio.sleep(0.01)
        while (stats := await desk.running.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.01)

    with_desk(tmp_path, test)


def test_a_conversation_without_a_title_gets_the_start_of_its_first_message(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        for title, text, expected in [
            ("", "  What is\na block?  ", "What is a block?"),
            ("Mine", "Hello", "Mine"),
            ("", "word " * 50, "word " * 11 + "word…"),
        ]:
            chat = await desk.conversation(title=title)
            await desk.reply(chat, text)
            assert (await desk.store.get_conversation.aio(LOCAL_USER, chat.id)).title == expected

    with_desk(tmp_path, test)
