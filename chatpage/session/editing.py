"""Changes of conversations that need no engine: make, edit, select, delete, undo, rename, presets.

Invariants: whoever follows a conversation hears of every change that was committed, in the order of commits, even if the caller
went away meanwhile; editing and deleting destroy nothing; deleting a message stops the runs that write below it, and what they
had still to say does not come back.
"""

import asyncio
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from chatpage.server.views import RunParams
from chatpage.session.feeds import Feeds
from chatpage.session.views import tree_patch
from chatpage.store import Store
from chatpage.store.records import (
    Conversation,
    ConversationId,
    Json,
    NewNode,
    Node,
    NodeId,
    Preset,
    PresetId,
    Role,
    TreeChange,
    UserId,
)
from chatpage.store.runs import StartedRun

T = TypeVar("T")


class ConversationEdits:
    """The part of a session that changes conversations.

    Reads that stream nothing go to `store` directly; changes come through here, so that followers hear of them.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.feeds = Feeds()
        self._hidden: set[tuple[ConversationId, NodeId]] = set()  # deleted while they were written

    # -- conversations ---------------------------------------------------------------------------------------------

    async def create_conversation(
        self,
        user_id: UserId,
        *,
        title: str = "",
        system_prompt: str | None = None,
        preset_id: PresetId | None = None,
        params: RunParams | None = None,
        tags: Iterable[str] = (),
    ) -> Conversation:
        """Make a conversation. A system prompt (given, else the preset's) becomes its root message.

        Raises:
            NotFoundError: No such user or preset.
            InvalidRequestError: A value is out of bounds.
        """
        if system_prompt is None and preset_id is not None:
            system_prompt = (await self.store.get_preset.aio(user_id, preset_id)).system_prompt
        conversation = await self.store.create_conversation.aio(
            user_id, title=title, params=as_json(params), preset_id=preset_id, tags=tags
        )
        if not system_prompt:
            return conversation
        new = NewNode(role=Role.SYSTEM, text=system_prompt)
        change = await self._write(self.store.add_node.submit(user_id, conversation.id, None, new))
        return change.conversation

    async def update_conversation(
        self,
        user_id: UserId,
        conversation_id: ConversationId,
        *,
        title: str | None = None,
        is_pinned: bool | None = None,
        tags: Iterable[str] | None = None,
        params: RunParams | None = None,
        preset_id: PresetId | None = None,
        without_preset: bool = False,
        expected_version: int | None = None,
    ) -> Conversation:
        """Rename, pin, tag or set the parameters of a conversation; None leaves a thing as it is.

        Raises:
            NotFoundError: No such conversation or preset.
            ConflictError: The conversation is not at `expected_version`.
            InvalidRequestError: A value is out of bounds.
        """
        return await self._write(
            self.store.update_conversation.submit(
                user_id,
                conversation_id,
                title=title,
                is_pinned=is_pinned,
                tags=tags,
                params=None if params is None else as_json(params),
                preset_id=preset_id,
                without_preset=without_preset,
                expected_version=expected_version,
            )
        )

    async def delete_conversation(
        self, user_id: UserId, conversation_id: ConversationId, *, expected_version: int | None = None
    ) -> Conversation:
        """Hide a conversation and stop its runs; `restore_conversation` undoes it. Raises as `Store.delete_conversation`."""
        return await self._write(
            self.store.delete_conversation.submit(user_id, conversation_id, expected_version=expected_version)
        )

    async def restore_conversation(self, user_id: UserId, conversation_id: ConversationId) -> Conversation:
        """Undo `delete_conversation`. Raises as `Store.restore_conversation`."""
        return await self._write(self.store.restore_conversation.submit(user_id, conversation_id))

    async def fork_conversation(
        self, user_id: UserId, conversation_id: ConversationId, *, node_id: NodeId | None = None, title: str | None = None
    ) -> Conversation:
        """Make a conversation that points at the same messages: those up to `node_id`, or all. Raises as the store does."""
        return await self.store.fork_conversation.aio(user_id, conversation_id, node_id=node_id, title=title)

    # -- messages --------------------------------------------------------------------------------------------------

    async def add_message(
        self,
        user_id: UserId,
        conversation_id: ConversationId,
        parent_id: NodeId | None,
        role: Role,
        text: str,
        *,
        expected_version: int | None = None,
    ) -> Node:
        """Add a message that nobody generates, such as a system prompt, and show it. Raises as `Store.add_node`."""
        new = NewNode(role=role, text=text)
        change = await self._write(
            self.store.add_node.submit(user_id, conversation_id, parent_id, new, expected_version=expected_version)
        )
        return change.nodes[0]

    async def add_messages(
        self, user_id: UserId, conversation_id: ConversationId, parent_id: NodeId | None, news: Sequence[NewNode]
    ) -> tuple[Node, ...]:
        """Add messages in a line, all or none, and show them. Raises as `Store.add_line`."""
        change = await self._write(self.store.add_line.submit(user_id, conversation_id, parent_id, news))
        return change.nodes

    async def edit(
        self,
        user_id: UserId,
        conversation_id: ConversationId,
        node_id: NodeId,
        text: str,
        *,
        expected_version: int | None = None,
    ) -> Node:
        """Put another version beside a message and show it; the original and what is below it stay.

        To edit a user's message and have it answered at once, see `Session.edit_and_answer`.

        Raises:
            NotFoundError: No such conversation or message.
            ConflictError: The conversation is not at `expected_version`.
            InvalidRequestError: The text is too long.
        """
        old = await self.store.get_node.aio(user_id, conversation_id, node_id)
        new = NewNode(role=old.role, text=text, extra=old.extra)
        change = await self._write(
            self.store.edit_node.submit(user_id, conversation_id, node_id, new, expected_version=expected_version)
        )
        return change.nodes[0]

    async def select(
        self, user_id: UserId, conversation_id: ConversationId, node_id: NodeId, *, expected_version: int | None = None
    ) -> TreeChange:
        """Show the branch that holds a message. Raises as `Store.choose_node`."""
        return await self._write(
            self.store.choose_node.submit(user_id, conversation_id, node_id, expected_version=expected_version)
        )

    async def delete_node(
        self, user_id: UserId, conversation_id: ConversationId, node_id: NodeId, *, expected_version: int | None = None
    ) -> TreeChange:
        """Hide a message and all below it, and stop the runs that write there. Raises as `Store.delete_node`."""
        return await self._write(
            self.store.delete_node.submit(user_id, conversation_id, node_id, expected_version=expected_version)
        )

    async def restore_node(self, user_id: UserId, conversation_id: ConversationId, node_id: NodeId) -> TreeChange:
        """Undo `delete_node`. Raises as `Store.restore_node`."""
        return await self._write(self.store.restore_node.submit(user_id, conversation_id, node_id), is_restore=True)

    async def keep(self, user_id: UserId, conversation_id: ConversationId, node_id: NodeId, *, is_kept: bool) -> TreeChange:
        """Mark a message in a conversation, or take the mark away. Raises as `Store.keep_node`."""
        return await self._write(self.store.keep_node.submit(user_id, conversation_id, node_id, is_kept=is_kept))

    # -- presets ---------------------------------------------------------------------------------------------------

    async def create_preset(
        self, user_id: UserId, name: str, *, system_prompt: str = "", params: RunParams | None = None
    ) -> Preset:
        """Make a preset. Raises as `Store.create_preset`."""
        return await self.store.create_preset.aio(user_id, name, system_prompt=system_prompt, params=as_json(params))

    async def update_preset(
        self,
        user_id: UserId,
        preset_id: PresetId,
        *,
        name: str | None = None,
        system_prompt: str | None = None,
        params: RunParams | None = None,
    ) -> Preset:
        """Change a preset; None leaves a thing as it is. Raises as `Store.update_preset`."""
        return await self.store.update_preset.aio(
            user_id,
            preset_id,
            name=name,
            system_prompt=system_prompt,
            params=None if params is None else as_json(params),
        )

    async def delete_preset(self, user_id: UserId, preset_id: PresetId) -> Preset:
        """Remove a preset; its conversations stay. Raises as `Store.delete_preset`."""
        return await self.store.delete_preset.aio(user_id, preset_id)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _stop_runs(self, conversation_id: ConversationId, node_ids: Collection[NodeId] | None) -> None:
        """Stop the runs of a conversation that write into one of the nodes, or (None) all."""
        raise NotImplementedError

    def _is_live(self, node_id: NodeId) -> bool:
        """Whether a run still writes into the node."""
        raise NotImplementedError

    async def _write(self, submitted: "Future[T]", *, is_restore: bool = False) -> T:
        """Wait for a write; followers are told when it is committed, whoever is cancelled meanwhile."""
        waiting = asyncio.wrap_future(submitted)
        waiting.add_done_callback(partial(self._tell, is_restore=is_restore))
        return await asyncio.shield(waiting)

    def _tell(self, waiting: "asyncio.Future[T]", *, is_restore: bool) -> None:
        if waiting.cancelled() or waiting.exception() is not None:
            return
        match result := waiting.result():
            case TreeChange():
                if is_restore:
                    self._hidden -= {(result.conversation.id, node.id) for node in result.nodes}
                self._publish([result])
            case Conversation():
                if result.deleted_at is not None:
                    self._stop_runs(result.id, None)
                self._publish([TreeChange(result)])
            case StartedRun():
                self._publish(result.changes)

    def _publish(self, changes: Iterable[TreeChange]) -> None:
        for change in changes:
            conversation_id = change.conversation.id
            if change.removed:
                self._hidden |= {(conversation_id, node_id) for node_id in change.removed if self._is_live(node_id)}
                self._stop_runs(conversation_id, change.removed)
            if feed := self.feeds.find(conversation_id):
                hidden = [node_id for other, node_id in self._hidden if other == conversation_id]
                feed.publish(tree_patch(change, hidden))


def as_json(params: RunParams | None) -> Json:
    """Return parameters as they are stored: only those that are set."""
    return {} if params is None else params.model_dump(mode="json", exclude_none=True)
