"""Sessions for tests: a tiny engine on its thread, a store in a file, and what tests ask of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chatpage.engine.core import Engine
from chatpage.engine.loop import AsyncEngine
from chatpage.server.protocol import RunCreated, RunDelta, RunDone, RunMessage, RunSnapshot, SampleDone
from chatpage.server.views import RunParams, RunRequest
from chatpage.session import Session, SessionLimits
from chatpage.store import LOCAL_USER, Conversation, Node, NodeId, RunId, RunKind, Store, UserId
from tests.engine.engines import assert_whole, tiny_engine

TIMEOUT_S = 60
SHORT = RunParams(max_tokens=8, ignore_eos=True, temperature=0.0)
LONG = RunParams(max_tokens=1000, ignore_eos=True, temperature=0.0)


@dataclass(slots=True)
class Copy:
    """What a client has of a run, by the rules of the protocol: snapshots replace, deltas append, numbers only rise."""

    texts: dict[int, str] = field(default_factory=dict)
    done: dict[int, SampleDone] = field(default_factory=dict)
    seq: int | None = None
    end: RunDone | None = None
    num_snapshots: int = 0

    def take(self, message: RunMessage) -> None:
        match message:
            case RunSnapshot():
                self.num_snapshots += 1
                self.texts = {view.sample: view.text for view in message.samples}
            case RunDelta():
                assert self.seq is not None
                assert message.seq > self.seq
                for sample, text, *_ in message.d:
                    self.texts[sample] += text
            case SampleDone():
                assert self.seq is not None
                assert message.seq > self.seq
                self.done[message.sample] = message
            case RunDone():
                self.end = message
        self.seq = message.seq


@dataclass(slots=True)
class Desk:
    """A session and what tests need around it."""

    session: Session
    engine: Engine
    running: AsyncEngine

    @property
    def store(self) -> Store:
        return self.session.store

    async def conversation(self, user_id: UserId = LOCAL_USER, **options: Any) -> Conversation:
        return await self.session.create_conversation(user_id, **options)

    async def ask(
        self,
        conversation: Conversation,
        text: str = "Hello",
        parent_id: str | None = None,
        *,
        user_id: UserId = LOCAL_USER,
        params: RunParams = SHORT,
        **options: Any,
    ) -> RunCreated:
        request = RunRequest(
            conversation_id=conversation.id, parent_id=parent_id, kind=RunKind.REPLY, input=text, params=params, **options
        )
        return await self.session.create_run(user_id, request)

    async def again(
        self,
        kind: RunKind,
        conversation: Conversation,
        node_id: str,
        *,
        user_id: UserId = LOCAL_USER,
        params: RunParams = SHORT,
        **options: Any,
    ) -> RunCreated:
        """Regenerate, continue or fork."""
        request = RunRequest(conversation_id=conversation.id, parent_id=node_id, kind=kind, params=params, **options)
        return await self.session.create_run(user_id, request)

    async def read(
        self, run: RunCreated, *, user_id: UserId = LOCAL_USER, copy: Copy | None = None, after_seq: int | None = None
    ) -> Copy:
        """Follow a run to its end."""
        copy = copy or Copy()
        async for message in self.session.follow(user_id, RunId(run.run_id), after_seq):
            copy.take(message)
        return copy

    async def reply(
        self, conversation: Conversation, text: str = "Hello", parent_id: str | None = None, **options: Any
    ) -> Node:
        """Ask, wait for the end, and return the first reply."""
        run = await self.ask(conversation, text, parent_id, **options)
        await self.read(run, user_id=options.get("user_id", LOCAL_USER))
        return await self.node(conversation, run.node_ids[0], user_id=options.get("user_id", LOCAL_USER))

    async def first_text(self, run: RunCreated) -> None:
        """Return when the run has said something in every sample."""
        copy = Copy()
        async for message in self.session.follow(LOCAL_USER, RunId(run.run_id)):
            copy.take(message)
            if len(copy.texts) == len(run.node_ids) and all(copy.texts.values()):
                return

    async def node(self, conversation: Conversation, node_id: str, *, user_id: UserId = LOCAL_USER) -> Node:
        return await self.store.get_node.aio(user_id, conversation.id, NodeId(node_id))

    async def nodes(self, conversation: Conversation) -> tuple[Node, ...]:
        return (await self.store.get_tree.aio(LOCAL_USER, conversation.id)).tree.in_order()

    async def children(self, conversation: Conversation, parent_id: str | None) -> Sequence[NodeId]:
        tree = (await self.store.get_tree.aio(LOCAL_USER, conversation.id)).tree
        return tree.children.get(None if parent_id is None else NodeId(parent_id), ())

    async def path(self, conversation: Conversation) -> tuple[Node, ...]:
        return await self.store.get_path.aio(LOCAL_USER, conversation.id)


@contextlib.asynccontextmanager
async def open_desk(
    folder: Path, *, engine: Engine | None = None, limits: SessionLimits | None = None, **options: Any
) -> AsyncIterator[Desk]:
    """Open store, engine and session; at the end every block has been given back."""
    engine = engine or tiny_engine()
    async with AsyncEngine(load=lambda _: engine) as running:
        with Store(folder / "chatpage.db") as store:
            session = Session(running, store, engine.tokenizer, limits, **{"flush_s": 0.05, **options})
            try:
                yield Desk(session, engine, running)
            finally:
                await session.close()
    while engine.has_work:
        engine.step()
    assert_whole(engine)


def with_desk(folder: Path, test: Callable[[Desk], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a test with a session of its own."""

    async def run() -> None:
        async with open_desk(folder, **options) as desk:
            await asyncio.wait_for(test(desk), TIMEOUT_S)

    asyncio.run(run())
