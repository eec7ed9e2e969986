"""A response as a stream of events, each with its `sequence_number`.

Invariant: a number says how far the text is, so it means the same to every reader of a response, live or later, however its
deltas were merged, and also after a restart; who has everything up to a number gets exactly the rest.

    0 created   1 in_progress   2 item added   3 part added
    3 + k       the delta that makes the text k characters long
    4 + k ...   text done, part done, item done, and the end, for a text of k characters
"""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from chatpage.server.openai.response_objects import COMPLETED, FAILED, Json, ReplyState, ResponseHead

FIRST_TEXT = 3
_PLACE = {"output_index": 0, "content_index": 0}
_ENDS = {COMPLETED: "response.completed", FAILED: "response.failed"}  # of others, the end is that it is incomplete


async def response_events(
    head: ResponseHead, states: AsyncGenerator[ReplyState, None], starting_after: int = -1
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events after `starting_after`, up to the end.

    Args:
        head: What of the response never changes.
        states: The response as it grows; the last state is final.
        starting_after: The last number that the reader has; -1: everything.
    """
    writer = _Writer(head, starting_after)
    async with contextlib.aclosing(states):
        async for state in states:
            for event in writer.take(state):
                yield event


class _Writer:
    """Turns states into the events that are new."""

    def __init__(self, head: ResponseHead, starting_after: int) -> None:
        self._head = head
        self._after = starting_after
        self._num_sent = max(0, starting_after - FIRST_TEXT)  # characters
        self._num_tokens = 0
        self._has_begun = False
        self._has_item = False

    def take(self, state: ReplyState) -> list[dict[str, Any]]:
        events: list[tuple[int, str, Json]] = []
        if not self._has_begun:
            self._has_begun = True
            begun = {"response": self._head.view(ReplyState())}
            events += [(0, "response.created", begun), (1, "response.in_progress", begun)]
        if self._head.item_id is not None and state.has_item and not self._has_item:
            self._has_item = True
            events += self._item_added()
        if delta := state.text[self._num_sent :]:
            self._num_sent = len(state.text)
            logprobs = self._head.texts.chat_view(state.tokens[self._num_tokens :])
            self._num_tokens = len(state.tokens)
            fields = self._text(delta=delta, logprobs=logprobs)
            events.append((FIRST_TEXT + self._num_sent, "response.output_text.delta", fields))
        if state.is_final:
            events += self._end(state)
        return [{"type": kind, "sequence_number": number, **fields} for number, kind, fields in events if number > self._after]

    def _item_added(self) -> list[tuple[int, str, Json]]:
        empty = ReplyState()
        return [
            (2, "response.output_item.added", {"output_index": 0, "item": self._head.item(empty)}),
            (3, "response.content_part.added", self._text(part=self._head.part(empty))),
        ]

    def _end(self, state: ReplyState) -> list[tuple[int, str, Json]]:
        number = FIRST_TEXT + 1 + len(state.text)
        if state.status == FAILED and self._after > number + 3:  # the server crashed, and lost text that the reader has
            number = self._after + 1
        events: list[tuple[int, str, Json]] = []
        if self._has_item:
            part = self._head.part(state)
            text = self._text(text=state.text, logprobs=part["logprobs"])
            events = [
                (number, "response.output_text.done", text),
                (number + 1, "response.content_part.done", self._text(part=part)),
                (number + 2, "response.output_item.done", {"output_index": 0, "item": self._head.item(state)}),
            ]
        kind = _ENDS.get(state.status, "response.incomplete")
        return [*events, (number + 3, kind, {"response": self._head.view(state)})]

    def _text(self, **fields: Any) -> Json:
        return {"item_id": self._head.item_id, **_PLACE, **fields}
