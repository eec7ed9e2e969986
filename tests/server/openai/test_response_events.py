"""The numbers of the events of a response: the same for every reader, whatever was merged or lost."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chatpage.server.openai.response_events import response_events
from chatpage.server.openai.response_objects import CANCELLED, COMPLETED, FAILED, INCOMPLETE, ReplyState, ResponseHead
from chatpage.server.openai.token_texts import TokenTexts
from tests.tiny_models import tiny_tokenizer

HEAD = ResponseHead("resp_1", 1.0, "tiny", {"store": True}, "msg_1", TokenTexts(tiny_tokenizer()))


def _events(states: Sequence[ReplyState], starting_after: int = -1, head: ResponseHead = HEAD) -> list[dict[str, Any]]:
    async def grow() -> AsyncGenerator[ReplyState, None]:
        for state in states:
            yield state

    async def read() -> list[dict[str, Any]]:
        return [event async for event in response_events(head, grow(), starting_after)]

    return asyncio.run(read())


def _states(text: str, cuts: Sequence[int], status: str = COMPLETED) -> list[ReplyState]:
    """Return a response that was seen when it had so many characters, and at its end."""
    return [*(ReplyState(text=text[:cut]) for cut in sorted(cuts)), ReplyState(status, text)]


texts = st.text(max_size=12)
cuts = st.lists(st.integers(0, 12), max_size=6)


@given(text=texts, first=cuts, second=cuts, data=st.data())
def test_a_reader_who_comes_back_gets_exactly_the_rest_however_deltas_were_merged(
    text: str, first: list[int], second: list[int], data: st.DataObject
) -> None:
    seen = _events(_states(text, first))
    numbers = [event["sequence_number"] for event in seen]
    assert numbers == sorted(set(numbers))
    last = data.draw(st.sampled_from(seen))["sequence_number"]
    rest = _events(_states(text, second), last)
    had = [event for event in seen if event["sequence_number"] <= last]
    assert "".join(event.get("delta", "") for event in had + rest) == text
    kinds = [event["type"] for event in had + rest if "delta" not in event]
    assert kinds == [event["type"] for event in seen if "delta" not in event]


def test_every_end_has_its_event_and_the_whole_text() -> None:
    for status, kind in (
        (COMPLETED, "response.completed"),
        (INCOMPLETE, "response.incomplete"),
        (CANCELLED, "response.incomplete"),
        (FAILED, "response.failed"),
    ):
        end = _events(_states("Hi", [1], status))[-1]
        assert (end["type"], end["response"]["status"], end["sequence_number"]) == (kind, status, 9)
        assert end["response"]["output"][0]["content"][0]["text"] == "Hi"


def test_a_response_that_failed_before_it_said_anything_has_no_item() -> None:
    events = _events([ReplyState(), ReplyState(FAILED, error="gone")])
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert events[-1]["response"]["output"] == []


def test_who_has_more_than_the_store_after_a_crash_is_told_the_end_all_the_same() -> None:
    """The store is a second behind; a client may have seen text that a crash took with it."""
    rest = _events([ReplyState(FAILED, "Hel", error="crashed")], starting_after=3 + 50)
    assert [event["type"] for event in rest][-1] == "response.failed"
    assert rest[0]["sequence_number"] == 54
    assert _events([ReplyState(COMPLETED, "Hel")], starting_after=53) == [], "nothing was lost: there is nothing to tell"


def test_a_prompt_without_a_reply_has_no_item() -> None:
    head = ResponseHead("resp_1", 1.0, "tiny", {}, None, HEAD.texts)
    events = _events([ReplyState(COMPLETED)], head=head)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
