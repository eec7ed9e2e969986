"""From a request to a run that goes on: check, store, drive.

Invariants: a request that is refused has changed nothing; a run that was stored is driven to an end; the text of a node that is
being written is read from its run, not from the store, which is a second behind, or hours if its disk is full. A message sent
below a reply that is still being written is stored at once and answered when the reply is whole.
"""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from chatpage.chat_template import PLAIN_STOP
from chatpage.engine.client import EngineClient
from chatpage.engine.stats import PrefixCost
from chatpage.errors import ChatpageError, ConflictError, EngineDeadError, StoreFullError
from chatpage.events import FinishReason
from chatpage.runs import RunLog, RunLogs, SampleLog
from chatpage.server.protocol import RunCreated
from chatpage.server.views import RunParams, RunRequest
from chatpage.session.admission import Admission, Ticket
from chatpage.session.driver import FLUSH_S, RunDriver, RunHooks
from chatpage.session.editing import ConversationEdits, as_json
from chatpage.session.limits import FullParams, SessionLimits, merge_params
from chatpage.session.paths import overlay, unsaved
from chatpage.session.prompts import Begun, PromptMaker, Rendered, Target
from chatpage.session.views import break_view, prefix_view, run_created
from chatpage.session.watching import RunWatcher
from chatpage.store import Store
from chatpage.store.records import (
    Conversation,
    ConversationId,
    NewNode,
    Node,
    NodeId,
    NodeStatus,
    Role,
    RunId,
    RunKind,
    RunStatus,
    UserId,
)
from chatpage.store.runs import StartedRun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
MAX_TITLE = 60
MAX_UNSAVED_RUNS = 256  # that are kept in memory until the store takes them; with as many nothing more is begun
logger = logging.getLogger(__name__)


def title_of(text: str) -> str:
    """Return the title of a conversation that begins with a message."""
    words = " ".join(text.split())
    return words if len(words) <= MAX_TITLE else words[: MAX_TITLE - 1].rstrip() + "…"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was checked: where it goes, and its prompt as far as that can be told now."""

    conversation: Conversation
    target: Target
    params: FullParams
    rendered: Rendered
    pending: tuple[SampleLog, ...]  # replies on the path that are still being written


class ConversationRuns(ConversationEdits):
    """The part of a session that starts runs. Arguments as for `Session`."""

    def __init__(
        self,
        engine: EngineClient,
        store: Store,
        tokenizer: "PreTrainedTokenizerBase",
        limits: SessionLimits,
        *,
        defaults: RunParams | None = None,
        flush_s: float = FLUSH_S,
    ) -> None:
        super().__init__(store)
        self.engine = engine
        self.tokenizer = tokenizer
        self.limits = replace(limits, max_samples=min(limits.max_samples, engine.info.max_num_seqs))
        self.logs = RunLogs()
        self._defaults = as_json(defaults)
        if not tokenizer.chat_template:
            self._defaults = {"stop": list(PLAIN_STOP), **self._defaults}
        self._flush_s = flush_s
        self.prompts = PromptMaker(tokenizer, engine.info)
        self._drivers: dict[RunId, RunDriver] = {}
        self._live: dict[NodeId, SampleLog] = {}
        self._unsaved: set[RunId] = set()  # ended, but the store refuses to take them
        self.admission = Admission(limits)
        self.watchers: list[RunWatcher] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- check -----------------------------------------------------------------------------------------------------

    async def _read_path(
        self, user_id: UserId, conversation_id: ConversationId, leaf_id: NodeId | None
    ) -> tuple[tuple[Node, ...], tuple[SampleLog, ...]]:
        """Return the nodes up to `leaf_id` with their text up to now, and those of their samples that still run."""
        if leaf_id is None:
            return (), ()
        before = dict(self._live)  # a sample that is stored while the store reads is in neither of the two otherwise
        nodes = await self.store.get_path.aio(user_id, conversation_id, leaf_id=leaf_id)
        live = before | self._live
        running = (live[node.id] for node in nodes if node.id in live)
        return tuple(overlay(node, live) for node in nodes), tuple(log for log in running if not log.ended.is_set())

    async def _prepare(self, user_id: UserId, request: RunRequest, news: Sequence[NewNode] = ()) -> Prepared:
        """Check a request and render its prompt; changes nothing. `news`: messages between its parent and its input."""
        self.limits.check_samples(request.n)
        conversation_id = ConversationId(request.conversation_id)
        leaf_id = None if request.parent_id is None else NodeId(request.parent_id)
        conversation = await self.store.get_conversation.aio(user_id, conversation_id)
        await self._settle(leaf_id, request.kind)
        path, pending = await self._read_path(user_id, conversation_id, leaf_id)
        target = self.prompts.find_target(request, (*path, *map(unsaved, news)))
        params = await self._merge_params(user_id, conversation, request)
        rendered = await self.prompts.render(target, request.input, params.template_variables)
        above = {node.id for node in target.history}
        return Prepared(conversation, target, params, rendered, tuple(log for log in pending if log.node_id in above))

    async def _settle(self, node_id: NodeId | None, kind: RunKind) -> None:
        """A reply that is to go on must have ended, and the store must have all of it."""
        log = self._live.get(node_id) if node_id is not None and kind is RunKind.CONTINUE else None
        if log is None:
            return
        if not log.ended.is_set():
            raise ConflictError(f"The reply {node_id} is still being written: stop it first, or wait.")
        await log.wait_until_stored()

    async def _merge_params(self, user_id: UserId, conversation: Conversation, request: RunRequest) -> FullParams:
        stored = [("conversation", conversation.params)]
        if conversation.preset_id is not None:
            preset = await self.store.get_preset.aio(user_id, conversation.preset_id)
            stored.append((f"preset {preset.name!r}", preset.params))
        return merge_params(request.params, [*stored, ("server", self._defaults)], n=request.n, limits=self.limits)

    # -- store -----------------------------------------------------------------------------------------------------

    async def _create_run(
        self, user_id: UserId, request: RunRequest, expected_version: int | None, news: Sequence[NewNode], client: str
    ) -> RunCreated:
        if not self.engine.is_alive:
            raise EngineDeadError("The engine is not running; it is started again in a moment: send the request again.")
        if len(self._unsaved) >= MAX_UNSAVED_RUNS:
            raise StoreFullError(f"{MAX_UNSAVED_RUNS} replies wait to be saved: free space on the disk, and try again.")
        ticket = self.admission.enter(user_id, client)
        is_driven = False
        try:
            prepared = await self._prepare(user_id, request, news)
            cost = self._spawn(self._prefix_cost(user_id, prepared))
            started = await self._store_run(user_id, request, prepared, expected_version, news)
            if not started.is_new:
                return self._known(user_id, started)
            log = self._drive(started, prepared, ticket)
            is_driven = True
        except ChatpageError:
            if (known := await self._find_stored(user_id, request)) is not None:
                return known
            raise
        finally:
            if not is_driven:
                ticket.leave()
        found = prepared.rendered.prompt.prefix_break
        if not prepared.pending and (prefix := await cost) is not None:
            update = {"prefix": prefix_view(prefix), "prefix_break": break_view(found)}
            log.created = log.created.model_copy(update=update)
        for watcher in self.watchers:
            watcher.run_started(log, request)
        if feed := self.feeds.find(log.conversation_id):
            feed.publish(log.created)
        if request.input and not prepared.conversation.title:
            self._spawn(self._name(user_id, prepared.conversation, request.input))
        return log.created

    async def _store_run(
        self,
        user_id: UserId,
        request: RunRequest,
        prepared: Prepared,
        expected_version: int | None,
        news: Sequence[NewNode] = (),
    ) -> StartedRun:
        target, rendered = prepared.target, prepared.rendered
        kind, node = request.kind, target.node
        text, token_ids, parent_id = rendered.text, rendered.token_ids, target.parent_id
        if news:
            parent_id = None if request.parent_id is None else NodeId(request.parent_id)
        if node is not None:
            if request.n == 1 and self._can_go_on(node, rendered):
                text, token_ids, parent_id = "", (), node.id  # the store lets the node itself stream on
            else:
                kind = RunKind.FORK  # a sibling that begins with all of it
        return await self._write(
            self.store.start_run.submit(
                user_id,
                ConversationId(request.conversation_id),
                parent_id,
                kind=kind,
                n=request.n,
                news=news,
                input=None if request.input is None else NewNode(role=Role.USER, text=request.input),
                text=text,
                token_ids=token_ids,
                params=prepared.params.stored,
                model=self.engine.info.model,
                client_msg_id=request.client_msg_id,
                expected_version=expected_version,
            )
        )

    def _can_go_on(self, node: Node, rendered: Rendered) -> bool:
        """Whether a node may stream on itself: it ended early, and its tokens are exactly those the prompt ends with."""
        is_cut = node.status is not NodeStatus.COMPLETE or node.finish_reason == FinishReason.LENGTH
        return is_cut and node.token_ids == rendered.token_ids

    async def _find_stored(self, user_id: UserId, request: RunRequest) -> RunCreated | None:
        """Return the run that a message started before the server was restarted; its path may be gone since."""
        if request.client_msg_id is None:
            return None
        with contextlib.suppress(ChatpageError):
            run = await self.store.find_run_of_message.aio(
                user_id, request.client_msg_id, ConversationId(request.conversation_id), request.input
            )
            return None if run is None else run_created(run)
        return None

    def _known(self, user_id: UserId, started: StartedRun) -> RunCreated:
        log = self.logs.get(user_id, started.run.id)
        return run_created(started.run) if log is None else log.created

    async def _name(self, user_id: UserId, conversation: Conversation, text: str) -> None:
        """Give a conversation without a title the start of its first message."""
        title = title_of(text)
        with contextlib.suppress(ChatpageError):  # it was deleted, or named, meanwhile
            now = await self.store.get_conversation.aio(user_id, conversation.id)
            if not now.title and title:
                await self._write(
                    self.store.update_conversation.submit(user_id, now.id, title=title, expected_version=now.version)
                )

    async def _prefix_cost(self, user_id: UserId, prepared: Prepared) -> PrefixCost | None:
        with contextlib.suppress(ChatpageError):  # the run will meet the same error, and say so
            return await self.engine.prefix_cost(prepared.rendered.prompt.token_ids, cache_salt=user_id)
        return None

    # -- drive -----------------------------------------------------------------------------------------------------

    def _drive(self, started: StartedRun, prepared: Prepared, ticket: Ticket) -> RunLog:
        """Start the driver of a run that was stored just now. Nothing may be awaited between the two."""
        run = started.run
        nodes = {node.id: node for change in started.changes for node in change.nodes}
        samples = [SampleLog(s.sample, s.node_id, nodes[s.node_id].text, nodes[s.node_id].token_ids) for s in run.samples]
        log = RunLog(run.user_id, run_created(run), samples)
        self.logs.add(log)
        self._live.update((sample.node_id, sample) for sample in samples)

        async def wait_turn() -> None:
            for pending in prepared.pending:  # before taking a slot: one of them may be waiting for the very slot
                await pending.ended.wait()
            await ticket.wait()

        async def render() -> Rendered:
            if not prepared.pending:
                return prepared.rendered
            history, _ = await self._read_path(run.user_id, run.conversation_id, run.parent_id)
            first = prepared.rendered
            begun = Begun(first.text, first.token_ids) if first.token_ids else None
            target = Target(history, run.parent_id, begun)
            return await self.prompts.render(target, None, prepared.params.template_variables)

        hooks = RunHooks(wait_turn, render, self._publish, self._forget_sample)
        driver = RunDriver(self.engine, self.store, log, prepared.params.sampling, hooks, flush_s=self._flush_s)
        self._drivers[run.id] = driver

        def when_ended(status: RunStatus) -> None:
            ticket.leave()
            for watcher in self.watchers:
                watcher.run_ended(log, status)

        def when_late() -> None:
            self._unsaved.add(run.id)
            when_ended(RunStatus.ERROR)

        def when_done(status: RunStatus) -> None:
            self._forget_run(log)
            if run.id not in self._unsaved:
                when_ended(status)
                return
            self._unsaved.remove(run.id)
            if status is not RunStatus.ERROR:
                logger.warning("The run %s is stored after all.", run.id)

        driver.start(when_done, when_late)
        return log

    def _forget_sample(self, sample: SampleLog, rendered: Rendered | None) -> None:
        """The store has all of a sample: from now on it is read from there."""
        self._live.pop(sample.node_id, None)
        self._hidden -= {key for key in self._hidden if key[1] == sample.node_id}
        if rendered is not None:
            self.prompts.remember(sample.node_id, rendered, sample.token_ids)

    def _forget_run(self, log: RunLog) -> None:
        for sample in log.samples:  # those of a failed run were taken back and never stored
            self._forget_sample(sample, None)
            sample.note_stored()
        del self._drivers[log.run_id]
        self.logs.mark_ended(log.run_id)

    def _is_live(self, node_id: NodeId) -> bool:
        return node_id in self._live

    def _stop_runs(self, conversation_id: ConversationId, node_ids: Collection[NodeId] | None) -> None:
        for driver in self._drivers_of(conversation_id):
            for sample in driver.log.samples:
                if node_ids is None or sample.node_id in node_ids:
                    self._spawn(driver.stop(sample.sample))

    def _drivers_of(self, conversation_id: ConversationId) -> list[RunDriver]:
        return [driver for driver in self._drivers.values() if driver.log.conversation_id == conversation_id]

    async def unbroken(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work to its end, even if whoever waits for it is cancelled meanwhile; `close` waits for it too."""
        return await asyncio.shield(self._spawn(work))

    def _spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run in the background, held until it ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
