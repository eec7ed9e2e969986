"""One random user: does things, hears what comes of them, and keeps account of it.

Invariants: what a user does is drawn from the user's own generator alone; whatever is heard stands in the ledger before the
next thing is done; an error that no fault explains is a finding.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from websockets.exceptions import WebSocketException

from chatpage.chaos.findings import Finding, Findings, Journal
from chatpage.chaos.invariants import foreign_in
from chatpage.chaos.ledger import Ledger
from chatpage.chaos.weather import Weather
from chatpage.client import AsyncClient, ServerError
from chatpage.server.protocol import ResetOp, RunCreated, RunDelta, RunDone, RunMessage, RunSnapshot
from chatpage.server.views import NodeView, RunRequest
from chatpage.store import NodeStatus, RunKind, RunStatus

HANGS_S = 300.0
PAUSE_S = 0.3  # after a server that could not be reached
_STORE_ERRORS = ("store_full", "store_error", "store_read_only", "store_busy")
UNREACHABLE = (OSError, TimeoutError, WebSocketException)


@dataclass(slots=True)
class Surroundings:
    """What all users share."""

    weather: Weather
    findings: Findings
    ledgers: dict[str, Ledger]  # by user id
    counts: Counter[str] = field(default_factory=Counter)
    may_act: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Heard:
    """What was heard of one run."""

    created: RunCreated
    seq: int = 0
    texts: dict[str, str] = field(default_factory=dict)  # by message


class User:
    """One user with conversations of their own.

    Args:
        ledger: Where what is heard is kept.
        client: With the user's own key.
        chance: Decides everything.
        around: What all users share.
    """

    def __init__(self, ledger: Ledger, client: AsyncClient, chance: random.Random, around: Surroundings) -> None:
        self.ledger = ledger
        self.client = client
        self.chance = chance
        self.around = around
        self.journal = Journal()
        around.findings.journals[ledger.who] = self.journal
        self.conversations: list[str] = []
        self.left: list[Heard] = []
        self.is_busy = False

    @property
    def who(self) -> str:
        return self.ledger.who

    # -- running ---------------------------------------------------------------------------------------------------

    async def hear(self, request: RunRequest, *, leave_after: int | None = None, stop_after: int | None = None) -> None:
        """Start a run and listen.

        Args:
            leave_after: Hang up after so many messages; the run is kept in `left`.
            stop_after: Stop it after so many messages.
        """
        if request.kind is RunKind.CONTINUE and request.parent_id in self.ledger.messages:
            self.ledger.begins(request.conversation_id, request.parent_id, time.monotonic())
        asked = time.monotonic()
        heard: Heard | None = None
        num_heard = 0
        has_ended = False
        async with contextlib.aclosing(self.client.run(request)) as messages, _Beside() as beside:
            async for message in messages:
                if isinstance(message, RunCreated):
                    heard = self._created(message, request, asked)
                    continue
                assert heard is not None, "run.created comes first"
                self.take(heard, message)
                num_heard += 1
                has_ended = isinstance(message, RunDone)
                if num_heard == stop_after and not has_ended:
                    self.around.counts["stops"] += 1
                    beside.start(self.client.cancel(heard.created.run_id, self.chance.choice([None, 0])))
                if num_heard == leave_after or has_ended:
                    break
        assert heard is not None
        if not has_ended:
            self.left.append(heard)

    async def resume(self, heard: Heard) -> None:
        """Listen to a run again, from where it was left or from the beginning."""
        after_seq = heard.seq if heard.texts and self.chance.random() < 0.5 else None
        async with contextlib.aclosing(self.client.follow(heard.created.run_id, after_seq)) as messages:
            async for message in messages:
                self.take(heard, message)

    def _created(self, created: RunCreated, request: RunRequest, asked: float) -> Heard:
        if created.input_node_id is not None and request.input is not None:
            self.ledger.said(request.conversation_id, created.input_node_id, request.input)
        for node_id in created.node_ids:
            told = self.ledger.begins(request.conversation_id, node_id, asked, created.run_id)
            told.may_be_gone = not told.text  # until something of it was heard
        return Heard(created)

    def take(self, heard: Heard, message: RunMessage) -> None:
        """Note what a run says, by the rules of the protocol."""
        heard.seq = message.seq
        match message:
            case RunSnapshot():
                heard.texts = {sample.node_id: sample.text for sample in message.samples}
                self._hear(heard, list(heard.texts))
            case RunDelta():
                for number, text, num_tokens, *_ in message.d:
                    node_id = heard.created.node_ids[number]
                    heard.texts[node_id] += text
                    self.ledger.messages[node_id].may_be_gone &= not text
                    self.around.counts["tokens heard"] += num_tokens
                self._hear(heard, [heard.created.node_ids[number] for number, *_ in message.d])
            case RunDone():
                self._done(heard, message)

    def _hear(self, heard: Heard, node_ids: Sequence[str]) -> None:
        for node_id in node_ids:
            most = self.around.weather.most_lost_s(self.ledger.messages[node_id].began)
            run_id, text = heard.created.run_id, heard.texts[node_id]
            self._note(self.ledger.hears(run_id, node_id, text, time.monotonic(), most))

    def _done(self, heard: Heard, done: RunDone) -> None:
        created = heard.created
        self.around.counts[f"replies {done.status}"] += len(created.node_ids)
        began = min(self.ledger.messages[node_id].began for node_id in created.node_ids)
        is_lost = done.error is not None and done.error.code in _STORE_ERRORS
        for node_id, text in heard.texts.items():
            if not is_lost:
                self._note(self.ledger.ends(created.run_id, node_id, text))
            self.ledger.messages[node_id].may_be_gone &= done.status is RunStatus.ERROR
        if done.status is RunStatus.INTERRUPTED and not self.around.weather.explains_interruption(began):
            self._find("interrupted", f"the run {created.run_id} was interrupted, and nothing happened to the server")
        if done.error is not None and done.status is RunStatus.ERROR:
            error = ServerError(done.error.code, done.error.message, retryable=done.error.retryable)
            self._refused(error, f"the run {created.run_id} ended")

    # -- reading ---------------------------------------------------------------------------------------------------

    async def read(self, conversation_id: str) -> ResetOp:
        """Read a conversation, and hold it against the ledger."""
        tree = await self.client.tree(conversation_id)
        for node in tree.nodes:
            self._read_node(conversation_id, node)
        for kind, value in (("title", tree.conversation.title), ("tags", tuple(sorted(tree.conversation.tags)))):
            self._note(self.ledger.compare_value((kind, conversation_id), value))
        return tree

    def _read_node(self, conversation_id: str, node: NodeView) -> None:
        self.no_foreign(node.text, f"message {node.id}")
        told = self.ledger.messages.get(node.id)
        if told is None:
            if node.status is not NodeStatus.STREAMING:
                self.ledger.said(conversation_id, node.id, node.text)
        elif told.is_final or node.status is NodeStatus.STREAMING:
            self._note(self.ledger.compare(node.id, node.text, is_ended=False))
        else:
            self._note(self.ledger.settles(node.id, node.text, self.around.weather.most_lost_s(told.began)))

    def _note(self, finding: Finding | None) -> None:
        if finding is not None:
            self.around.findings.add(finding)

    def no_foreign(self, text: str, where: str) -> None:
        """Look for words of other users."""
        self.around.findings.add(*foreign_in(text, self.ledger, self.around.ledgers.values(), where))

    # -- errors ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def attempt(self, what: str) -> AsyncGenerator[None, None]:
        """Do something that may fail as faults explain."""
        self.journal.note(what)
        try:
            async with asyncio.timeout(HANGS_S) as limit:
                yield
            self.around.counts[what.partition(" ")[0]] += 1
        except ServerError as error:
            self._refused(error, what)
            await asyncio.sleep(PAUSE_S)
        except UNREACHABLE as error:
            if limit.expired():
                self._find("hangs", f"{what} did not end within {HANGS_S:.0f} s")
                return
            self.journal.note(f"  unreachable: {error}")
            self.around.counts["unreachable"] += 1
            await asyncio.sleep(PAUSE_S)

    def _refused(self, error: ServerError, what: str) -> None:
        self.journal.note(f"  {error.server_code}: {error}")
        self.around.counts[f"refused {error.server_code}"] += 1
        if not self.around.weather.explains(error.server_code, is_retryable=error.retryable):
            self._find("unexplained error", f"{what}: {error.server_code}: {error}")

    def _find(self, kind: str, text: str) -> None:
        self.around.findings.add(Finding(kind, self.who, text))


class _Beside:
    """Lets something be asked while one goes on listening: a word counts as heard when it came, not when that was answered."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._task is None:
            return
        if kind is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        else:
            await self._task

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work)
