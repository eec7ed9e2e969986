"""Tokens of replies are found by whom they belong to, after the same messages, and by nobody else."""

from chatpage.events import FinishReason, RequestId, SampleFinished
from chatpage.prompt import Message
from chatpage.server.openai.replies import ReplyMemory
from chatpage.store import LOCAL_USER, UserId

ASKED = [Message("system", "Be brief."), Message("user", "Hi")]
NEXT = Message("user", "More")


def _finished(text: str = "Hello", stop: str | int | None = 2) -> SampleFinished:
    ids = (7, 8, 9)
    return SampleFinished(RequestId("r"), 0, FinishReason.STOP, text, ids, -1.0, 0.1, 10.0, stop)


def _recalled(memory: ReplyMemory, asked: list[Message], text: str, user: UserId = LOCAL_USER) -> tuple[int, ...] | None:
    return memory.recall(user, [*asked, Message("assistant", text), NEXT])[len(asked)].token_ids


def test_a_reply_is_found_after_the_same_messages_by_its_user() -> None:
    memory = ReplyMemory()
    memory.keep(LOCAL_USER, ASKED, _finished())
    assert _recalled(memory, ASKED, "Hello") == (7, 8, 9)
    assert _recalled(memory, ASKED, "Hello!") is None
    assert _recalled(memory, ASKED[1:], "Hello") is None, "another conversation may have tokenised it otherwise"
    assert _recalled(memory, ASKED, "Hello", UserId("ann")) is None


def test_messages_cannot_be_shifted_into_each_other() -> None:
    memory = ReplyMemory()
    memory.keep(LOCAL_USER, [Message("user", "a"), Message("user", "b")], _finished())
    assert _recalled(memory, [Message("user", "a4:user:1:b")], "Hello") is None


def test_text_that_does_not_tell_its_tokens_is_not_kept() -> None:
    memory = ReplyMemory()
    memory.keep(LOCAL_USER, ASKED, _finished(stop="###"))  # the tokens of the stop string are no part of the text
    memory.keep(LOCAL_USER, ASKED, _finished("half a character \ufffd"))
    memory.keep(LOCAL_USER, ASKED, _finished(""))
    assert len(memory) == 0


def test_the_oldest_is_forgotten_first() -> None:
    memory = ReplyMemory(kept=2)
    for text in ("one", "two", "three"):
        memory.keep(LOCAL_USER, ASKED, _finished(text))
    assert [_recalled(memory, ASKED, text) is not None for text in ("one", "two", "three")] == [False, True, True]
