"""Session and store under random actions, restarts and crashes, against a model of the tree.

The model knows which nodes exist, where they hang, which are deleted, and the text of every reply that has ended. Whatever
happens, the store shows exactly these; a text that has ended changes only by being continued; nothing streams that nobody
writes; and in the end every block has been given back.
"""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatpage.engine.core import Engine
from chatpage.engine.loop import AsyncEngine
from chatpage.errors import ConflictError, InvalidParameterError
from chatpage.server.protocol import RunCreated
from chatpage.server.views import RunParams, RunRequest
from chatpage.session import Session, SessionLimits
from chatpage.store import LOCAL_USER, ConversationId, NodeId, NodeStatus, Role, RunId, RunKind, RunStatus, Store
from tests.engine.engines import assert_whole, tiny_engine
from tests.sessions import Copy, Desk

T = TypeVar("T")
Picks = st.integers(0, 10**6)
Lengths = st.sampled_from([1, 2, 3, 5, 8, 300])


@cache
def shared_engine() -> Engine:
    return tiny_engine()


@dataclass(slots=True)
class Chat:
    """What a conversation is expected to show."""

    parents: dict[str, str | None] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)  # each hides what is below it
    is_deleted: bool = False

    def visible(self) -> list[str]:
        return [node_id for node_id in self.parents if not self.path(node_id) & set(self.deleted)]

    def path(self, node_id: str) -> set[str]:
        path: set[str] = set()
        step: str | None = node_id
        while step is not None:
            path.add(step)
            step = self.parents[step]
        return path


class Conversations(RuleBasedStateMachine):
    """The actions of one user in several conversations."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="session-machine-"))
        self.chats: dict[str, Chat] = {}
        self.roles: dict[str, Role] = {}
        self.texts: dict[str, str] = {}  # of nodes that ended
        self.prefixes: dict[str, str] = {}  # of nodes that stream: what they began with
        self.writers: dict[str, str] = {}  # node to the run that wrote into it last
        self.live: dict[str, tuple[RunCreated, asyncio.Task[Copy]]] = {}
        self.num_messages = 0
        self.engine = AsyncEngine(load=lambda _: shared_engine())
        self.do(self.engine.start())
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder / "chatpage.db")
        limits = SessionLimits(max_running_runs=2, max_queued_runs=100)
        self.session = Session(self.engine, self.store, shared_engine().tokenizer, limits, flush_s=0.01)
        self.desk = Desk(self.session, shared_engine(), self.engine)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def teardown(self) -> None:
        self.settle()
        self.do(self.session.close())
        self.store.close()
        self.do(self.engine.close())
        self.loop.close()
        shutil.rmtree(self.folder)
        while shared_engine().has_work:
            shared_engine().step()
        assert_whole(shared_engine())

    # -- choosing --------------------------------------------------------------------------------------------------

    def open_chats(self) -> list[str]:
        return [chat_id for chat_id, chat in self.chats.items() if not chat.is_deleted]

    def pick_chat(self, pick: int) -> str:
        chats = self.open_chats()
        return chats[pick % len(chats)]

    def pick_node(self, chat_id: str, pick: int, role: Role | None = None) -> str | None:
        nodes = [node_id for node_id in self.chats[chat_id].visible() if role in (None, self.roles[node_id])]
        return nodes[pick % len(nodes)] if nodes else None

    def streaming(self) -> set[str]:
        return {node_id for created, _ in self.live.values() for node_id in created.node_ids}

    # -- running ---------------------------------------------------------------------------------------------------

    def start(self, chat_id: str, kind: RunKind, parent: str | None, length: int, **options: Any) -> RunCreated:
        self.num_messages += 1
        request = RunRequest(
            conversation_id=chat_id,
            parent_id=parent,
            kind=kind,
            client_msg_id=f"message {self.num_messages}",
            params=RunParams(max_tokens=length, ignore_eos=True, temperature=0.0),
            **options,
        )

        async def twice() -> RunCreated:
            first, second = await asyncio.gather(*(self.session.create_run(LOCAL_USER, request) for _ in range(2)))
            assert first.run_id == second.run_id
            return first

        created = self.do(twice())
        chat = self.chats[chat_id]
        if created.input_node_id is not None:
            chat.parents[created.input_node_id] = parent
            self.roles[created.input_node_id] = Role.USER
            self.texts[created.input_node_id] = options["input"]
        for node_id in created.node_ids:
            self.prefixes[node_id] = self.texts.pop(node_id, "")
            self.writers[node_id] = created.run_id
            if node_id not in chat.parents:
                chat.parents[node_id] = created.parent_id
                self.roles[node_id] = Role.ASSISTANT
        self.live[created.run_id] = (created, self.loop.create_task(self.desk.read(created)))
        return created

    def settle(self) -> None:
        """Wait until every run has ended, and compare what readers got with what is stored."""
        for run_id in list(self.live):
            created, reader = self.live.pop(run_id)
            copy = self.do(_wait(reader))
            assert copy.end is not None
            assert copy.end.status is not RunStatus.RUNNING
            self.compare(created, copy)

    def compare(self, created: RunCreated, copy: Copy, *, crashed: bool = False) -> None:
        for i, node_id in enumerate(created.node_ids):
            if self.writers[node_id] != created.run_id:  # it was continued since
                self.prefixes[node_id] = self.texts.get(node_id, "") if crashed else copy.texts[i]
                continue
            holder = next(chat_id for chat_id, chat in self.chats.items() if node_id in chat.parents and not chat.is_deleted)
            node = self.do(self.store.get_node.aio(LOCAL_USER, ConversationId(holder), NodeId(node_id)))
            assert node.status is not NodeStatus.STREAMING
            assert node.text.startswith(self.prefixes.pop(node_id))
            if crashed:
                assert copy.texts[i].startswith(node.text)
            else:
                assert node.text == copy.texts[i]
            self.texts[node_id] = node.text

    # -- rules -----------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.new_chat("")

    @rule(system_prompt=st.sampled_from(["", "Be brief."]))
    def new_chat(self, system_prompt: str) -> None:
        conversation = self.do(self.session.create_conversation(LOCAL_USER, system_prompt=system_prompt))
        chat = self.chats[conversation.id] = Chat()
        for node in self.do(self.desk.nodes(conversation)):
            chat.parents[node.id], self.roles[node.id], self.texts[node.id] = None, node.role, node.text

    @rule(pick=Picks, length=Lengths, n=st.integers(1, 3), prefill=st.sampled_from([None, "So"]))
    @precondition(lambda self: self.open_chats())
    def send(self, pick: int, length: int, n: int, prefill: str | None) -> None:
        chat_id = self.pick_chat(pick)
        parent = self.pick_node(chat_id, pick // 7)
        created = self.start(chat_id, RunKind.REPLY, parent, length, n=n, input=f"Message {pick}", prefill=prefill)
        for node_id in created.node_ids:
            self.prefixes[node_id] = prefill or ""

    @rule(pick=Picks, length=Lengths, n=st.integers(1, 2))
    @precondition(lambda self: self.open_chats())
    def regenerate(self, pick: int, length: int, n: int) -> None:
        chat_id = self.pick_chat(pick)
        if (reply := self.pick_node(chat_id, pick // 7, Role.ASSISTANT)) is not None:
            created = self.start(chat_id, RunKind.REGENERATE, reply, length, n=n)
            assert created.parent_id == self.chats[chat_id].parents[reply]

    @rule(pick=Picks, length=Lengths, n=st.integers(1, 2))
    @precondition(lambda self: self.open_chats())
    def continue_(self, pick: int, length: int, n: int) -> None:
        chat_id = self.pick_chat(pick)
        reply = self.pick_node(chat_id, pick // 7, Role.ASSISTANT)
        if reply is None:
            return
        text = self.texts.get(reply)
        try:
            created = self.start(chat_id, RunKind.CONTINUE, reply, length, n=n)
        except ConflictError:
            assert reply in self.streaming()
            return
        for node_id in created.node_ids:
            assert node_id == reply or self.chats[chat_id].parents[node_id] == self.chats[chat_id].parents[reply]
            self.prefixes[node_id] = text or ""
        if reply not in created.node_ids and text is not None:
            self.texts[reply] = text

    @rule(pick=Picks, length=Lengths, kept=st.integers(0, 9))
    @precondition(lambda self: self.open_chats())
    def fork(self, pick: int, length: int, kept: int) -> None:
        chat_id = self.pick_chat(pick)
        if (reply := self.pick_node(chat_id, pick // 7, Role.ASSISTANT)) is None:
            return
        with contextlib.suppress(InvalidParameterError):  # the reply has fewer tokens
            self.start(chat_id, RunKind.FORK, reply, length, branch_at_token=kept)

    @rule(pick=Picks)
    @precondition(lambda self: self.open_chats())
    def edit(self, pick: int) -> None:
        chat_id = self.pick_chat(pick)
        if (old := self.pick_node(chat_id, pick // 7)) is None:
            return
        node = self.do(self.session.edit(LOCAL_USER, ConversationId(chat_id), NodeId(old), f"Edited {pick}"))
        chat = self.chats[chat_id]
        chat.parents[node.id], self.roles[node.id], self.texts[node.id] = chat.parents[old], self.roles[old], node.text

    @rule(pick=Picks)
    @precondition(lambda self: self.open_chats())
    def select(self, pick: int) -> None:
        chat_id = self.pick_chat(pick)
        if (node := self.pick_node(chat_id, pick // 7)) is not None:
            self.do(self.session.select(LOCAL_USER, ConversationId(chat_id), NodeId(node)))
            shown = self.do(self.store.get_path.aio(LOCAL_USER, ConversationId(chat_id)))
            assert node in {step.id for step in shown}

    @rule(pick=Picks)
    @precondition(lambda self: self.open_chats())
    def delete(self, pick: int) -> None:
        chat_id = self.pick_chat(pick)
        if (node := self.pick_node(chat_id, pick // 7)) is not None:
            self.do(self.session.delete_node(LOCAL_USER, ConversationId(chat_id), NodeId(node)))
            self.chats[chat_id].deleted.append(node)

    @rule(pick=Picks)
    @precondition(lambda self: self.open_chats())
    def undo_delete(self, pick: int) -> None:
        chat_id = self.pick_chat(pick)
        if deleted := self.chats[chat_id].deleted:
            node = deleted.pop()
            self.do(self.session.restore_node(LOCAL_USER, ConversationId(chat_id), NodeId(node)))

    @rule(pick=Picks)
    @precondition(lambda self: len(self.open_chats()) > 1)
    def delete_chat_and_bring_it_back(self, pick: int) -> None:
        chat_id = ConversationId(self.pick_chat(pick))
        self.do(self.session.delete_conversation(LOCAL_USER, chat_id))
        self.do(self.session.restore_conversation(LOCAL_USER, chat_id))

    @rule(pick=Picks)
    @precondition(lambda self: self.open_chats())
    def fork_chat(self, pick: int) -> None:
        chat_id = self.pick_chat(pick)
        old = self.chats[chat_id]
        visible = old.visible()
        fork = self.do(self.session.fork_conversation(LOCAL_USER, ConversationId(chat_id)))
        self.chats[fork.id] = Chat({node_id: old.parents[node_id] for node_id in visible})

    @rule(pick=Picks, sample=st.sampled_from([None, 0]))
    @precondition(lambda self: self.live)
    def stop(self, pick: int, sample: int | None) -> None:
        run_id = list(self.live)[pick % len(self.live)]
        self.do(self.session.cancel_run(LOCAL_USER, RunId(run_id), sample))

    @rule()
    @precondition(lambda self: self.live)
    def wait_for_all(self) -> None:
        self.settle()

    @rule()
    def restart(self) -> None:
        self.do(self.session.close())
        self.settle()
        self.store.close()
        self.open()

    @rule()
    def crash(self) -> None:
        """Nothing more reaches the disk; what was committed is all there is."""
        self.store.close()
        self.do(self.session.close())
        ended = [(created, self.do(_wait(reader))) for created, reader in self.live.values()]
        self.live.clear()
        self.open()
        for created, copy in ended:
            self.compare(created, copy, crashed=True)

    # -- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def the_store_shows_the_expected_trees(self) -> None:
        streaming = self.streaming()
        for chat_id in self.open_chats():
            chat = self.chats[chat_id]
            tree = self.do(self.store.get_tree.aio(LOCAL_USER, ConversationId(chat_id))).tree
            assert set(tree.nodes) == set(chat.visible())
            for node in tree.nodes.values():
                assert tree.parents[node.id] == chat.parents[node.id]
                assert node.role is self.roles[node.id]
                if node.id not in streaming:
                    assert node.text == self.texts[node.id]
                    assert node.status is not NodeStatus.STREAMING


async def _wait(task: "asyncio.Task[T]") -> T:
    return await task


Conversations.TestCase.settings = settings(
    max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestConversations = Conversations.TestCase
