"""Replies token by token: places, alternatives, forced tokens, blocks."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from chatpage.errors import InvalidParameterError, InvalidRequestError
from chatpage.server.bodies import TokenSpan
from chatpage.server.views import RunParams
from chatpage.session import inspecting, tokens
from chatpage.session.prompts import ReplyTokens
from chatpage.session.tokens import _spans
from chatpage.store import LOCAL_USER, Conversation, Node, NodeId, RunKind
from tests.engine.engines import tiny_engine
from tests.sessions import SHORT, Desk, with_desk
from tests.tiny_models import SPECIAL_TOKENS


def test_tokens_have_their_places_in_the_text(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, prefill="a€😀b", params=_only(desk, "c", 2))
        found = (await tokens.reply_tokens(desk.session, LOCAL_USER, chat.id, reply.id)).tokens
        assert [token.id for token in found] == list(reply.token_ids)
        assert [(token.text, token.start, token.end) for token in found] == [
            ("a", 0, 1),
            *[("€", 1, 2)] * 3,
            *[("😀", 2, 4)] * 4,  # two units of a browser's string
            ("b", 4, 5),
            ("c", 5, 6),
            ("c", 6, 7),
        ]

    with_desk(tmp_path, test)


def test_every_place_of_a_text_belongs_to_a_token(tmp_path: Path) -> None:
    """Also of what a random model writes, which is hardly ever whole characters."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        for seed in range(5):
            params = RunParams(max_tokens=60, ignore_eos=True, temperature=2.0, seed=seed)
            reply = await desk.reply(chat, params=params)
            view = await tokens.reply_tokens(desk.session, LOCAL_USER, chat.id, reply.id)
            _check_places(reply.text, view.tokens)
            assert view.ends[-1] == len(reply.text)

    with_desk(tmp_path, test)


def test_a_stop_string_that_was_cut_and_special_tokens_have_no_place() -> None:
    found = ReplyTokens((), (5, 1, 6, 7, 8), (1, 1, 2, 4, 4))
    assert _spans("ab", found, lambda token_id: token_id == 1) == (
        TokenSpan(id=5, text="a", start=0, end=1),
        TokenSpan(id=1, text="", start=1, end=1),
        TokenSpan(id=6, text="b", start=1, end=2),
        TokenSpan(id=7, text="", start=2, end=2),
        TokenSpan(id=8, text="", start=2, end=2),
    )


def test_the_end_token_of_a_reply_is_not_one_of_its_tokens(tmp_path: Path) -> None:
    """A fork does not count it either: after it a model would not go on."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        end = desk.engine.tokenizer.eos_token_id
        reply = await desk.reply(chat, prefill="ab", params=RunParams(max_tokens=4, logit_bias={end: 100}))
        assert reply.token_ids[-1] == end
        view = await tokens.reply_tokens(desk.session, LOCAL_USER, chat.id, reply.id)
        assert [token.text for token in view.tokens] == ["a", "b"]

    with_desk(tmp_path, test)


def test_only_a_reply_has_tokens(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        await desk.reply(chat)
        question = (await desk.path(chat))[0]
        with pytest.raises(InvalidRequestError, match="Only a reply"):
            await tokens.reply_tokens(desk.session, LOCAL_USER, chat.id, question.id)

    with_desk(tmp_path, test)


def test_alternatives_are_what_the_model_thought_before_temperature(tmp_path: Path) -> None:
    """Compared with the model itself; the chosen token is right even where it was most unlikely."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, params=RunParams(max_tokens=12, ignore_eos=True, temperature=5.0, seed=3))
        found = await desk.session.prompts.reply_tokens(await desk.path(chat))
        expected = _logprobs(desk, (*found.before, *found.token_ids))
        for index in (0, 1, 5, 11):
            got = await tokens.token_alternatives(desk.session, LOCAL_USER, chat.id, reply.id, index, num_alternatives=4)
            row = expected[len(found.before) + index - 1]
            assert got.chosen.token_id == found.token_ids[index]
            assert got.chosen.logprob == pytest.approx(row[found.token_ids[index]].item(), abs=1e-4)
            assert [choice.token_id for choice in got.alternatives] == row.topk(4).indices.tolist()
            for choice in got.alternatives:
                assert choice.logprob == pytest.approx(row[choice.token_id].item(), abs=1e-4)
            assert got.usage.prompt_tokens == len(found.before) + index
            assert got.usage.prompt_tokens - got.usage.cached_tokens <= 1, "the prefix is shared"

    with_desk(tmp_path, test)


def test_alternatives_say_what_they_would_add(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, prefill="a€b", params=SHORT)
        texts = [
            (await tokens.token_alternatives(desk.session, LOCAL_USER, chat.id, reply.id, i, num_alternatives=0)).chosen.text
            for i in range(5)
        ]
        assert texts == ["a", "\ufffd", "\ufffd", "€", "b"]
        num_tokens = reply.num_tokens
        with pytest.raises(InvalidParameterError, match=f"0 to {num_tokens - 1}"):
            await tokens.token_alternatives(desk.session, LOCAL_USER, chat.id, reply.id, num_tokens, num_alternatives=1)

    with_desk(tmp_path, test)


def test_asking_for_alternatives_leaves_the_conversation_as_it_is(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat)
        before = await desk.session.tree(LOCAL_USER, chat.id)
        await tokens.token_alternatives(desk.session, LOCAL_USER, chat.id, reply.id, 2, num_alternatives=20)
        assert await desk.session.tree(LOCAL_USER, chat.id) == before
        assert desk.session.admission.num_users == 0

    with_desk(tmp_path, test)


@pytest.mark.parametrize("kept", [0, 3, 8])
def test_a_fork_with_a_forced_token_has_it_in_every_sample_and_goes_on(tmp_path: Path, kept: int) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, prefill="abcdefgh", params=SHORT)
        [forced] = desk.engine.tokenizer.encode("Z")
        params = RunParams(max_tokens=3, ignore_eos=True, temperature=3.0)
        run = await desk.again(RunKind.FORK, chat, reply.id, branch_at_token=kept, branch_token_id=forced, n=3, params=params)
        assert run.prefix is not None
        assert run.prefix.computed <= 2, "but for the forced token all was computed before"
        await desk.read(run)
        for node_id in run.node_ids:
            node = await desk.node(chat, node_id)
            assert node.parent_id == reply.parent_id
            assert node.token_ids[: kept + 1] == (*reply.token_ids[:kept], forced)
            assert node.num_tokens == kept + 1 + 3
            assert node.text.startswith("abcdefgh"[:kept] + "Z")

    with_desk(tmp_path, test)


def test_a_forced_token_may_begin_or_end_within_a_character(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat, prefill="a€b", params=SHORT)
        first, second, third = desk.engine.tokenizer.encode("₭")  # as €, but for its last byte
        ends = await desk.again(
            RunKind.FORK, chat, reply.id, branch_at_token=3, branch_token_id=third, params=_only(desk, "c", 1)
        )
        assert (await desk.read(ends)).texts[0] == "a₭c"
        params = RunParams(max_tokens=2, ignore_eos=True, temperature=0.0, logit_bias={second: 50, third: 50})
        begins = await desk.again(RunKind.FORK, chat, reply.id, branch_at_token=1, branch_token_id=first, params=params)
        await desk.read(begins)
        assert (await desk.node(chat, begins.node_ids[0])).token_ids[:2] == (reply.token_ids[0], first)

    with_desk(tmp_path, test)


def test_a_token_that_is_no_text_cannot_be_forced(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat)
        special = desk.engine.tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[1])
        for token_id, problem in ((special, "ends or frames"), (10**6, "has the tokens 0 to")):
            with pytest.raises(InvalidParameterError, match=problem):
                await desk.again(RunKind.FORK, chat, reply.id, branch_at_token=1, branch_token_id=token_id)
        assert len(await desk.nodes(chat)) == 2

    with_desk(tmp_path, test)


def test_samples_of_one_prompt_lie_in_the_same_blocks_up_to_where_they_part(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(system_prompt="Be brief, and to the point, and kind.")
        run = await desk.ask(chat, params=SHORT.model_copy(update={"temperature": 5.0}), n=3, parent_id=await _root(desk, chat))
        await desk.read(run)
        view = await tokens.locate(desk.session, LOCAL_USER, chat.id, [NodeId(node_id) for node_id in run.node_ids])
        size = view.block_size
        paths = [await desk.store.get_path.aio(LOCAL_USER, chat.id, leaf_id=NodeId(n)) for n in run.node_ids]
        for path, location in zip(paths, view.paths, strict=True):
            rendered = await tokens._render(desk.session, path)
            assert [span.node_id for span in location.nodes] == [node.id for node in path]
            for node, span in zip(path, location.nodes, strict=True):
                text = desk.engine.tokenizer.decode(list(rendered.prompt.token_ids[span.start : span.end]))
                assert text == node.text or node.id == path[-1].id
            assert location.nodes[-1].end == location.num_tokens
            assert location.num_tokens - location.num_cached <= 1, "the last token was drawn, and nothing followed it"
            assert len(location.block_ids) == -(-location.num_cached // size)
        first = paths[0][-1].token_ids
        for path, location in zip(paths[1:], view.paths[1:], strict=True):
            same = next((i for i, (a, b) in enumerate(zip(first, path[-1].token_ids, strict=True)) if a != b), len(first))
            num_shared = (location.nodes[-1].start + same) // size
            assert location.block_ids[:num_shared] == view.paths[0].block_ids[:num_shared]
            assert num_shared >= location.nodes[-1].start // size > 0

    with_desk(tmp_path, test)


def test_another_user_finds_nothing_of_it(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        other = (await desk.store.create_user.aio("ada")).id
        chat, theirs = await desk.conversation(), await desk.conversation(other)
        mine = await desk.reply(chat, "Hello")
        question = await desk.session.add_message(other, theirs.id, None, (await desk.path(chat))[0].role, "Hello")
        [location] = (await tokens.locate(desk.session, other, theirs.id, [question.id])).paths
        assert location.num_tokens > 0
        assert (location.num_cached, location.block_ids) == (0, ())
        [location] = (await tokens.locate(desk.session, LOCAL_USER, chat.id, [mine.id])).paths
        assert location.num_cached > 0

    with_desk(tmp_path, test)


def test_a_path_that_is_too_long_for_the_model_lies_nowhere(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        reply = await desk.reply(chat)
        long = await desk.session.add_message(
            LOCAL_USER, chat.id, reply.id, (await desk.path(chat))[0].role, "x" * desk.engine.max_model_len
        )
        view = await tokens.locate(desk.session, LOCAL_USER, chat.id, [long.id, reply.id])
        assert (view.paths[0].num_tokens, view.paths[0].block_ids) == (0, ())
        assert view.paths[1].num_cached > 0

    with_desk(tmp_path, test)


def test_the_mean_probability_of_a_reply_is_known_after_a_restart(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat)
        copy = await desk.read(run)
        node = await desk.node(chat, run.node_ids[0])
        assert node.timing["sum_logprob"] == copy.done[0].sum_logprob
        assert math.exp(node.timing["sum_logprob"] / node.usage["completion_tokens"]) <= 1

    with_desk(tmp_path, test)


async def _root(desk: Desk, chat: Conversation) -> str:
    root: Node = (await desk.path(chat))[0]
    return root.id


def _only(desk: Desk, letter: str, max_tokens: int) -> RunParams:
    return RunParams(max_tokens=max_tokens, ignore_eos=True, logit_bias={desk.engine.tokenizer.encode(letter)[0]: 100})


def _logprobs(desk: Desk, token_ids: tuple[int, ...]) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(desk.engine.config.model, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def _check_places(text: str, found: tuple[TokenSpan, ...]) -> None:
    units = text.encode("utf-16-le")
    for token in found:
        assert units[2 * token.start : 2 * token.end].decode("utf-16-le") == token.text
    for place in range(len(units) // 2):
        assert any(token.start <= place < token.end for token in found)
    starts = [token.start for token in found]
    assert starts == sorted(starts)


def test_the_memory_of_a_conversation_can_be_looked_at_while_it_lies_on_disk_only(tmp_path: Path) -> None:
    """After a restart it was refused: what could be read back was taken for what is in memory."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        await desk.reply(chat, "Hello there, how are you?")
        view = await inspecting.conversation_kv(desk.session, LOCAL_USER, chat.id)
        assert view.num_branches == 1
        while (disk := (await desk.running.stats()).disk) is None or disk.saved_blocks < 3:
            await asyncio.sleep(0.01)
        await desk.running._call(lambda engine: engine.clear_cache())
        view = await inspecting.conversation_kv(desk.session, LOCAL_USER, chat.id)
        assert view.num_branches == 0

    with_desk(tmp_path, test, engine=tiny_engine(kv_disk=str(tmp_path / "kv")))
