"""The one public object: conversations of the store, answered by the engine.

Invariants: a run belongs to the session, not to whoever asked for it or follows it; nothing is stored for a request that is
refused; a request with a `client_msg_id` starts one run, however often it is sent; users share neither conversations nor blocks
(the cache salt is the user's id). Used on one event loop.

    session = Session(engine, store, tokenizer)
    created = await session.create_run(LOCAL_USER, RunRequest(conversation_id=c.id, kind=RunKind.REPLY, input="Hi", n=4))
    async for message in session.follow(LOCAL_USER, created.run_id):
        ...
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chatpage.engine.client import EngineClient
from chatpage.errors import ChatpageError, InvalidParameterError, RestartingError
from chatpage.events import RequestId
from chatpage.runs import SampleLog
from chatpage.server.protocol import ConversationMessage, PlanResult, RunCreated, RunMessage, TreePatch
from chatpage.server.views import KvStats, KvView, RunParams, RunRequest
from chatpage.session.driver import FLUSH_S
from chatpage.session.limits import SessionLimits
from chatpage.session.paths import overlay, stored_messages
from chatpage.session.prompts import Target
from chatpage.session.running import ConversationRuns
from chatpage.session.views import WARM_PREFIX, block_views, break_view, kv_stats, prefix_view, whole_tree
from chatpage.store import Store
from chatpage.store.records import ConversationId, NewNode, Node, NodeId, Role, RunId, RunKind, UserId
from chatpage.store.tree import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """What goes on in a session."""

    num_live_runs: int
    num_followers: int  # of conversations
    num_kept_logs: int
    num_unsaved_runs: int  # ended, but the store refuses to take them


class Session(ConversationRuns):
    """Everything that can be done with conversations, for every user.

    Args:
        engine: Started; the session neither starts nor closes it.
        store: Open; the session does not close it.
        tokenizer: Of the engine's model.
        limits: Per user.
        defaults: Parameters of runs that neither request, conversation nor preset set.
        flush_s: Seconds between two writes of a running sample.
    """

    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        tokenizer: "PreTrainedTokenizerBase",
        limits: SessionLimits | None = None,
        *,
        defaults: RunParams | None = None,
        flush_s: float = FLUSH_S,
    ) -> None:
        super().__init__(engine, store, tokenizer, limits or SessionLimits(), defaults=defaults, flush_s=flush_s)
        self._starting: dict[tuple[UserId, str], asyncio.Task[RunCreated]] = {}
        self._warming: dict[UserId, asyncio.Task[None]] = {}

    async def drain(self) -> None:
        """Refuse new runs from now on, and end all there are as interrupted, with their text stored; followers hear all of it.

        Whatever needs no engine still works, until `close`. A second time is fine.
        """
        self.admission.close()
        for warming in list(self._warming.values()):
            warming.cancel()
        while self._starting or self._drivers or self._tasks:
            await asyncio.gather(*(driver.interrupt() for driver in list(self._drivers.values())))
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=0.1)
            await asyncio.sleep(0)

    async def close(self) -> None:
        """As `drain`, and end what makes prompts. Closing twice is fine."""
        await self.drain()
        self.prompts.close()

    # -- runs ------------------------------------------------------------------------------------------------------

    async def create_run(
        self,
        user_id: UserId,
        request: RunRequest,
        *,
        expected_version: int | None = None,
        news: Sequence[NewNode] = (),
        client: str = "",
    ) -> RunCreated:
        """Start a run and return once its nodes are stored; its events are in `follow`.

        The same `client_msg_id` again returns the same run. If the caller is cancelled the run starts all the same.

        Args:
            news: Messages to be stored with it, in a line below the parent; the last of them, or the input, is answered.
            client: As for `Admission.enter`.

        Raises:
            NotFoundError: No such conversation or message.
            ConflictError: The conversation is not at `expected_version`, the reply to be continued is still being written, or
                the `client_msg_id` was that of another message.
            InvalidRequestError: The request does not fit the message it names, or a parameter is wrong.
            ContextLengthError: The prompt leaves no room for an answer.
            OverloadedError: The user, or all users together, have too many runs waiting.
            RestartingError: The server is ending.
            EngineDeadError: The engine is gone.
        """
        message_id = request.client_msg_id
        if message_id is not None:
            if starting := self._starting.get((user_id, message_id)):
                known: RunCreated | None = await asyncio.shield(starting)
            else:
                log = self.logs.find(user_id, message_id)
                known = None if log is None else log.created
            if known is not None:  # the store says whether it is the same message
                place = ConversationId(request.conversation_id)
                await self.store.find_run_of_message.aio(user_id, message_id, place, request.input)
                return known
        if self.admission.is_closed:
            raise RestartingError
        task = self._spawn(self._create_run(user_id, request, expected_version, news, client))
        if message_id is not None:
            self._starting[user_id, message_id] = task
            task.add_done_callback(lambda _: self._starting.pop((user_id, message_id)))
        return await asyncio.shield(task)

    async def edit_and_answer(
        self,
        user_id: UserId,
        conversation_id: ConversationId,
        node_id: NodeId,
        text: str,
        *,
        n: int = 1,
        params: RunParams | None = None,
        client_msg_id: str | None = None,
        expected_version: int | None = None,
    ) -> RunCreated:
        """Put another version beside a user's message and have it answered. Raises as `create_run` does."""
        path = await self.store.get_path.aio(user_id, conversation_id, leaf_id=node_id)
        if path[-1].role is not Role.USER:
            raise InvalidParameterError(f"Only a user's message is answered; {node_id} is a {path[-1].role} message.")
        request = RunRequest(
            client_msg_id=client_msg_id,
            conversation_id=conversation_id,
            parent_id=path[-2].id if len(path) > 1 else None,
            kind=RunKind.REPLY,
            input=text,
            n=n,
            params=params or RunParams(),
        )
        return await self.create_run(user_id, request, expected_version=expected_version)

    async def cancel_run(self, user_id: UserId, run_id: RunId, sample: int | None = None) -> None:
        """Stop a run, or one sample of it; its text stays. One that has ended is left as it is.

        Raises:
            NotFoundError: No such run.
            InvalidParameterError: No such sample.
        """
        log = self.logs.get(user_id, run_id)
        num_samples = len(log.samples) if log else len((await self.store.get_run.aio(user_id, run_id)).samples)
        if sample is not None and not 0 <= sample < num_samples:
            raise InvalidParameterError(f"The run has samples 0 to {num_samples - 1}, not {sample}.")
        if driver := self._drivers.get(run_id):
            await driver.stop(sample)

    async def follow(self, user_id: UserId, run_id: RunId, after_seq: int | None = None) -> AsyncGenerator[RunMessage, None]:
        """Yield the messages of a run after `after_seq` up to its `run.done`; None: a snapshot first.

        A run that ended long ago is read from the store: a snapshot and its end.

        Raises:
            NotFoundError: No such run, or its conversation was deleted.
        """
        log = self.logs.get(user_id, run_id)
        if log is None:
            for message in await stored_messages(self.store, user_id, run_id, after_seq or 0):
                yield message
            return
        async with contextlib.aclosing(log.follow(after_seq)) as messages:
            async for message in messages:
                yield message

    async def follow_conversation(
        self, user_id: UserId, conversation_id: ConversationId, after_version: int | None = None
    ) -> AsyncGenerator[ConversationMessage, None]:
        """Yield the changes of a conversation after `after_version`, and its runs as they start; None: the whole tree first.

        Never ends by itself, except by an error.

        Raises:
            NotFoundError: No such conversation, or it was deleted.
        """

        async def read_version() -> int:
            return (await self.store.get_conversation.aio(user_id, conversation_id)).version

        messages = self.feeds.open(conversation_id).follow(
            after_version,
            read_version=read_version,
            read_tree=lambda: self.tree(user_id, conversation_id),
            running=lambda: [driver.log.created for driver in self._drivers_of(conversation_id)],
        )
        async with contextlib.aclosing(messages):
            async for message in messages:
                yield message

    async def tree(self, user_id: UserId, conversation_id: ConversationId) -> TreePatch:
        """Return the whole conversation as a patch with one `reset`; text that is being written is there up to now.

        Raises:
            NotFoundError: No such conversation.
        """
        live = dict(self._live)
        found = await self.store.get_tree.aio(user_id, conversation_id)
        nodes = {node_id: overlay(node, live) for node_id, node in found.tree.nodes.items()}
        tree: Tree[Node] = replace(found.tree, nodes=nodes)
        return whole_tree(found.conversation, tree)

    # -- before a run ----------------------------------------------------------------------------------------------

    async def plan(self, user_id: UserId, request: RunRequest, *, ref: str | None = None) -> PlanResult:
        """Say what a run would cost now. Changes nothing. Raises as `create_run` does."""
        prepared = await self._prepare(user_id, request)
        cost = await self.engine.prefix_cost(prepared.rendered.prompt.token_ids, cache_salt=user_id)
        return PlanResult(
            ref=ref,
            prefix=prefix_view(cost),
            prefix_break=break_view(prepared.rendered.prompt.prefix_break),
            max_model_len=self.engine.info.max_model_len,
            is_pending=bool(prepared.pending),
        )

    async def warm(
        self, user_id: UserId, conversation_id: ConversationId, parent_id: NodeId | None = None, draft: str | None = None
    ) -> None:
        """Compute the path to a message, and a draft of the next, in the background; replaces the user's last warming.

        Raises:
            NotFoundError: No such conversation or message.
            InvalidRequestError, ContextLengthError: The path makes no prompt.
        """
        if previous := self._warming.pop(user_id, None):
            previous.cancel()
        await self.store.get_conversation.aio(user_id, conversation_id)  # without a parent nothing else does
        path, pending = await self._read_path(user_id, conversation_id, parent_id)
        if pending or self.admission.is_closed or not (path or draft):
            return
        target = Target(path, parent_id)
        rendered = await self.prompts.render(target, draft, {}, add_generation_prompt=False)
        if previous := self._warming.pop(user_id, None):  # begun while this one waited
            previous.cancel()
        task = self._spawn(self._compute_prefix(user_id, rendered.prompt.token_ids))
        self._warming[user_id] = task

        def forget(ended: "asyncio.Task[None]") -> None:
            if self._warming.get(user_id) is ended:
                del self._warming[user_id]

        task.add_done_callback(forget)

    async def _compute_prefix(self, user_id: UserId, token_ids: Sequence[int]) -> None:
        request_id = RequestId(f"{WARM_PREFIX}{secrets.token_hex(8)}")
        try:
            await self.engine.add_request(token_ids, cache_salt=user_id, request_id=request_id, prefill_only=True)
            async with contextlib.aclosing(self.engine.stream(request_id)) as events:
                async for _ in events:
                    pass
        except ChatpageError as error:  # nobody waits for it, and the run itself will say what is wrong
            logger.info("A prefix could not be warmed: %s", error)

    # -- what goes on ----------------------------------------------------------------------------------------------

    async def kv(self, user_id: UserId) -> KvView:
        """Return the block map; holders are named if they are the user's own."""
        blocks, stats = await asyncio.gather(self.engine.block_map(), self.engine.stats())
        own = {driver.log.run_id: driver.log for driver in self._drivers.values() if driver.log.user_id == user_id}
        return KvView(stats=kv_stats(stats), blocks=block_views(blocks, own))

    def live_samples(self) -> dict[NodeId, SampleLog]:
        """Return the samples that are being written, by their messages."""
        return dict(self._live)

    async def follow_kv(self, *, interval_s: float = 0.5) -> AsyncGenerator[KvStats, None]:
        """Yield the block memory in numbers, again whenever it changed, at most once per interval."""
        last: KvStats | None = None
        while True:
            stats = kv_stats(await self.engine.stats())
            if stats != last:
                last = stats
                yield stats
            await asyncio.sleep(interval_s)

    def counts(self) -> SessionCounts:
        """Count what goes on, without asking the engine."""
        return SessionCounts(
            num_live_runs=len(self._drivers) - len(self._unsaved),
            num_followers=self.feeds.num_followers,
            num_kept_logs=len(self.logs),
            num_unsaved_runs=len(self._unsaved),
        )
