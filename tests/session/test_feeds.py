"""Two tabs on one conversation stay in step, however slow one of them is and whatever goes around it."""

import asyncio
from pathlib import Path

import pytest

from chatpage.errors import NotFoundError
from chatpage.server.protocol import (
    ChooseOp,
    ConversationMessage,
    ConversationOp,
    NodeOp,
    RemoveOp,
    ResetOp,
    RunCreated,
    TreePatch,
)
from chatpage.server.views import ConversationView, NodeView
from chatpage.session.feeds import Feed, Feeds
from chatpage.store import LOCAL_USER, ConversationId, NewNode, NodeId, Role, UserId
from tests.sessions import SHORT, Desk, with_desk


class Tab:
    """A client's copy of a conversation, by the rules of the protocol."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.nodes: dict[str, NodeView] = {}
        self.choices: dict[str | None, str] = {}
        self.conversation: ConversationView | None = None
        self.runs: list[str] = []
        self.num_resets = 0

    def take(self, message: ConversationMessage) -> None:
        if isinstance(message, RunCreated):
            self.runs.append(message.run_id)
            return
        if not isinstance(message.ops[0] if message.ops else None, ResetOp):
            assert self.version is not None
            assert message.version == self.version + 1
        self.version = message.version
        for op in message.ops:
            match op:
                case ResetOp():
                    self.num_resets += 1
                    self.nodes = {node.id: node for node in op.nodes}
                    self.choices = {choice.parent_id: choice.child_id for choice in op.choices}
                    self.conversation = op.conversation
                case NodeOp():
                    self.nodes[op.node.id] = op.node
                case RemoveOp():
                    for node_id in op.node_ids:
                        del self.nodes[node_id]
                case ChooseOp():
                    self.choices[op.parent_id] = op.child_id
                case ConversationOp():
                    self.conversation = op.conversation

    async def watch(self, desk: Desk, conversation_id: str) -> None:
        async for message in desk.session.follow_conversation(LOCAL_USER, ConversationId(conversation_id), self.version):
            self.take(message)


async def settled(desk: Desk, conversation_id: ConversationId, *tabs: Tab) -> int:
    """Wait until the tabs are at the version of the store, and return it."""
    version = (await desk.store.get_conversation.aio(LOCAL_USER, conversation_id)).version
    while any(tab.version != version for tab in tabs):
        await asyncio.sleep(0.01)
    return version


def test_tabs_see_every_change_in_order_and_end_with_the_tree_of_the_store(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(system_prompt="Be brief.")
        [system] = await desk.path(chat)
        early, late = Tab(), Tab()
        watching = [asyncio.create_task(early.watch(desk, chat.id))]
        run = await desk.ask(chat, "Hello", system.id, n=2)
        await desk.read(run)
        watching.append(asyncio.create_task(late.watch(desk, chat.id)))
        await settled(desk, chat.id, early, late)
        edited = await desk.session.edit(LOCAL_USER, chat.id, NodeId(run.node_ids[0]), "No")
        await desk.session.select(LOCAL_USER, chat.id, NodeId(run.node_ids[1]))
        await desk.session.delete_node(LOCAL_USER, chat.id, edited.id)
        await desk.session.update_conversation(LOCAL_USER, chat.id, title="New", tags=["a"], is_pinned=True)
        second = await desk.ask(chat, "More", run.node_ids[1])
        await desk.read(second)
        await desk.session.restore_node(LOCAL_USER, chat.id, edited.id)
        await settled(desk, chat.id, early, late)
        [reset] = (await desk.session.tree(LOCAL_USER, chat.id)).ops
        assert isinstance(reset, ResetOp)
        for tab in (early, late):
            assert tab.nodes == {node.id: node for node in reset.nodes}
            assert tab.choices == {choice.parent_id: choice.child_id for choice in reset.choices}
            assert tab.num_resets == 1
            assert tab.conversation is not None
            assert (tab.conversation.title, tab.conversation.tags, tab.conversation.is_pinned) == ("New", ("a",), True)
        assert (early.runs, late.runs) == ([run.run_id, second.run_id], [second.run_id])
        for task in watching:
            task.cancel()

    with_desk(tmp_path, test)


def test_a_tab_that_comes_back_gets_what_it_missed_and_the_runs_that_go_on(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation(title="Mine")
        tab = Tab()
        watching = asyncio.create_task(tab.watch(desk, chat.id))
        await settled(desk, chat.id, tab)
        watching.cancel()
        await desk.reply(chat)
        going_on = await desk.ask(chat, "More", params=SHORT.model_copy(update={"max_tokens": 100}))
        watching = asyncio.create_task(tab.watch(desk, chat.id))
        await settled(desk, chat.id, tab)
        await desk.read(going_on)
        await settled(desk, chat.id, tab)
        watching.cancel()
        assert tab.num_resets == 1, "the changes were enough"
        assert len(tab.nodes) == 4
        assert tab.runs.count(going_on.run_id) == 1

    with_desk(tmp_path, test)


def test_changes_that_went_around_the_session_reach_tabs_as_a_new_tree(tmp_path: Path) -> None:
    """An import, or another process, changes the file without a word."""

    async def test(desk: Desk) -> None:
        chat = await desk.conversation(title="Mine")
        tab = Tab()
        watching = asyncio.create_task(tab.watch(desk, chat.id))
        await settled(desk, chat.id, tab)
        await desk.store.add_node.aio(LOCAL_USER, chat.id, None, NewNode(role=Role.USER, text="imported"))
        await desk.session.add_message(LOCAL_USER, chat.id, None, Role.USER, "typed")
        await settled(desk, chat.id, tab)
        watching.cancel()
        assert {node.text for node in tab.nodes.values()} == {"imported", "typed"}
        assert tab.num_resets == 2

    with_desk(tmp_path, test)


def test_strangers_and_deleted_conversations_are_not_followed(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        with pytest.raises(NotFoundError):
            await anext(desk.session.follow_conversation(UserId("stranger"), chat.id, 1))
        await desk.session.delete_conversation(LOCAL_USER, chat.id)
        with pytest.raises(NotFoundError):
            await anext(desk.session.follow_conversation(LOCAL_USER, chat.id))
        assert desk.session.feeds.num_followers == 0

    with_desk(tmp_path, test)


def test_a_fork_that_shares_a_running_reply_sees_it_end(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        chat = await desk.conversation()
        run = await desk.ask(chat, params=SHORT.model_copy(update={"max_tokens": 60}))
        fork = await desk.session.fork_conversation(LOCAL_USER, chat.id)
        tab = Tab()
        watching = asyncio.create_task(tab.watch(desk, fork.id))
        await desk.read(run)
        await settled(desk, fork.id, tab)
        watching.cancel()
        assert tab.nodes[run.node_ids[0]].num_tokens == 60

    with_desk(tmp_path, test)


def patch(version: int) -> TreePatch:
    return TreePatch(conversation_id="c", version=version, ops=())


def test_a_follower_too_far_behind_gets_the_tree_and_goes_on_from_there() -> None:
    async def test() -> None:
        feed = Feed(kept_messages=4)
        version = 0

        async def read_version() -> int:
            return version

        async def read_tree() -> TreePatch:
            return patch(version)

        messages = feed.follow(0, read_version=read_version, read_tree=read_tree, running=list)
        feed.publish(patch(1))
        version = 1
        # A feed that started after the follower's version still has what follows it.
        assert await anext(messages) == patch(1)
        for version in range(2, 40):
            feed.publish(patch(version))
        assert [(await anext(messages)).version for _ in range(1)] == [39]  # type: ignore[union-attr]
        version = 40
        feed.publish(patch(40))
        assert await anext(messages) == patch(40)
        await messages.aclose()
        assert len(feed._messages) < 8

    asyncio.run(asyncio.wait_for(test(), 10))


def test_feeds_that_nobody_follows_are_forgotten_oldest_first() -> None:
    async def test() -> None:
        feeds = Feeds(kept_feeds=2)
        opened = [feeds.open(ConversationId(f"{i}")) for i in range(3)]
        assert feeds.open(ConversationId("2")) is opened[2]
        assert feeds.open(ConversationId("0")) is not opened[0]

    asyncio.run(test())
