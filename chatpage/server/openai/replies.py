"""The tokens of replies that clients will send back as text.

A stateless client repeats the whole conversation, replies included, as text. Tokenised again a reply may become other tokens
than the model chose, and from there on nothing is found in the cache. So the tokens of the latest replies are kept under what
they replied to; they are of use, never needed.

Invariant: tokens are found only by the user they were generated for, after exactly the same messages, for the same text.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from chatpage.events import SampleFinished
from chatpage.prompt import Message
from chatpage.store import UserId

KEPT_REPLIES = 1024
Key = tuple[UserId, bytes]


class ReplyMemory:
    """The latest replies of all users."""

    def __init__(self, kept: int = KEPT_REPLIES) -> None:
        self._kept = kept
        self._token_ids: OrderedDict[Key, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._token_ids)

    def keep(self, user_id: UserId, messages: Sequence[Message], finished: SampleFinished) -> None:
        """Keep a reply to messages; one that was cut within its last token has a text that its tokens do not tell."""
        if isinstance(finished.stop, str) or not finished.text or finished.text.endswith("\ufffd"):
            return
        key = (user_id, _digests([*messages, Message("assistant", finished.text)])[-1])
        self._token_ids[key] = finished.token_ids
        self._token_ids.move_to_end(key)
        while len(self._token_ids) > self._kept:
            self._token_ids.popitem(last=False)

    def recall(self, user_id: UserId, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, with their tokens where a reply is known."""
        known = (self._token_ids.get((user_id, digest)) for digest in _digests(messages))
        return [
            message if ids is None or message.role != "assistant" else replace(message, token_ids=ids)
            for message, ids in zip(messages, known, strict=True)
        ]


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Return for each message a digest of it and all before it."""
    digest = hashlib.blake2b(digest_size=16)
    digests = []
    for message in messages:
        content = message.content.encode()
        digest.update(f"{message.role}:{len(content)}:".encode() + content)
        digests.append(digest.digest())
    return digests
