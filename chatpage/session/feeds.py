"""Who looks at a conversation sees it change: patches in order of versions, and runs as they start.

Invariant: a follower's copy is always one that existed. A patch is handed on only if it fits the version the follower has;
otherwise (too far behind, or a change that went around this session) the follower gets the whole tree again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable

from chatpage.server.protocol import ConversationMessage, RunCreated, TreePatch
from chatpage.store.records import ConversationId

KEPT_FEEDS = 256
KEPT_MESSAGES = 256


class Feed:
    """The latest messages about one conversation; used on the event loop only."""

    def __init__(self, *, kept_messages: int = KEPT_MESSAGES) -> None:
        self.num_followers = 0
        self._kept = kept_messages
        self._messages: list[ConversationMessage] = []  # the last of them
        self._num_total = 0
        self._changed = asyncio.Event()

    def publish(self, message: ConversationMessage) -> None:
        self._messages.append(message)
        self._num_total += 1
        if len(self._messages) >= 2 * self._kept:
            del self._messages[: -self._kept]
        self._changed.set()

    async def follow(
        self,
        after_version: int | None,
        *,
        read_version: Callable[[], Awaitable[int]],
        read_tree: Callable[[], Awaitable[TreePatch]],
        running: Callable[[], list[RunCreated]],
    ) -> AsyncGenerator[ConversationMessage, None]:
        """Yield what follows version `after_version`; None: the whole tree first. Then, once, the runs that go on.

        Args:
            after_version: What the follower has.
            read_version: Reads the version of the conversation as it is now; whoever may not read it raises here.
            read_tree: Reads the conversation as it is now.
            running: Lists the runs that go on.
        """
        self.num_followers += 1
        try:
            position: int | None = self._num_total  # before the read, so that nothing falls between
            version = after_version
            if await read_version() != version:
                position = self._position_after(version)
            announced: set[str] | None = None
            while True:
                if version is None or position is None:
                    position = self._num_total
                    tree = await read_tree()
                    version = tree.version
                    yield tree
                if announced is None:
                    going_on = running()
                    announced = {created.run_id for created in going_on}
                    for created in going_on:
                        yield created
                if position < self._num_total - len(self._messages):
                    position = None
                    continue
                if position == self._num_total:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                message = self._messages[position - self._num_total]
                position += 1
                if isinstance(message, RunCreated):
                    if message.run_id not in announced:
                        yield message
                elif message.version == version + 1:
                    version += 1
                    yield message
                elif message.version > version:
                    position = None
        finally:
            self.num_followers -= 1

    def _position_after(self, version: int | None) -> int | None:
        """Return where to read on for a follower at `version`; None if the feed does not reach back so far."""
        if version is None:
            return None
        first = self._num_total - len(self._messages)
        for offset, message in enumerate(self._messages):
            if isinstance(message, TreePatch) and message.version == version + 1:
                return first + offset
            if isinstance(message, TreePatch) and message.version == version:
                return first + offset + 1
        return None


class Feeds:
    """The feeds of the conversations that someone looked at last."""

    def __init__(self, *, kept_feeds: int = KEPT_FEEDS, kept_messages: int = KEPT_MESSAGES) -> None:
        self._feeds: OrderedDict[ConversationId, Feed] = OrderedDict()
        self._kept_feeds = kept_feeds
        self._kept_messages = kept_messages

    @property
    def num_followers(self) -> int:
        return sum(feed.num_followers for feed in self._feeds.values())

    def open(self, conversation_id: ConversationId) -> Feed:
        """Return the feed of a conversation, made if there was none."""
        feed = self._feeds.setdefault(conversation_id, Feed(kept_messages=self._kept_messages))
        self._feeds.move_to_end(conversation_id)
        if len(self._feeds) > self._kept_feeds:
            idle = [key for key, other in self._feeds.items() if not other.num_followers and other is not feed]
            for key in idle[: len(self._feeds) - self._kept_feeds]:
                del self._feeds[key]
        return feed

    def find(self, conversation_id: ConversationId) -> Feed | None:
        """Return the feed of a conversation that someone follows, or did a short while ago."""
        return self._feeds.get(conversation_id)
