"""Events on their way from an engine to a reader on the event loop.

Invariant: a mailbox never makes the engine wait. A slow reader finds adjacent deltas of a sample merged, so what waits is
bounded by the text itself.
"""

import asyncio
from collections import deque

from chatpage.events import Event, TokenDelta


class Mailbox:
    """Events of one request on their way to one reader; used on the event loop only."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, TokenDelta) and isinstance(event, TokenDelta) and last.sample == event.sample:
            text, token_ids = last.text + event.text, last.token_ids + event.token_ids
            logprobs = last.logprobs + event.logprobs
            self._events[-1] = TokenDelta(event.request_id, event.sample, text, token_ids, logprobs)
        else:
            self._events.append(event)
        self._arrived.set()

    async def take(self) -> Event:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()
