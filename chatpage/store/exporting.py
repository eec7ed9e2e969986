"""Write conversations to files: our own format, those of other programs, and Markdown.

Invariant: one conversation is in memory at a time, and what is written is read back as the same tree, as far as the format can
hold one: our own holds everything, ChatGPT's and Open WebUI's the tree and its texts, SillyTavern's the shown path with its
siblings, ShareGPT's the accepted part of the shown path.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from chatpage.errors import InvalidRequestError
from chatpage.store.formats import chatgpt, markdown, openwebui, own, sharegpt, sillytavern
from chatpage.store.records import ConversationId, ConversationTree, UserId
from chatpage.store.store import Store

_RECORDS: dict[str, Callable[[ConversationTree], dict[str, Any] | None]] = {
    form.NAME: form.write for form in (own, chatgpt, openwebui, sharegpt)
}
EXPORT_FORMATS = (*_RECORDS, sillytavern.NAME, markdown.NAME)
FILE_SUFFIXES = {**dict.fromkeys(_RECORDS, ".json"), sillytavern.NAME: ".jsonl", markdown.NAME: ".md"}


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote. `without_content` have nothing this format could hold, such as no accepted reply."""

    num_written: int
    without_content: tuple[ConversationId, ...] = ()


def export_conversations(
    store: Store,
    user_id: UserId,
    stream: TextIO,
    *,
    format: str = own.NAME,
    conversation_ids: Sequence[ConversationId] | None = None,
) -> ExportReport:
    """Write a user's conversations to a text stream.

    Blocks while it reads and writes; run it in a thread of its own beside an event loop.

    Args:
        format: One of `EXPORT_FORMATS`.
        conversation_ids: Which; None: all that are not deleted.

    Raises:
        NotFoundError: One of the conversations does not exist.
        InvalidRequestError: The format is unknown, or holds a single conversation and several were asked for.
    """
    if format not in EXPORT_FORMATS:
        raise InvalidRequestError(f"{format!r} is no format to export to; known are {', '.join(EXPORT_FORMATS)}.")
    if conversation_ids is None:
        conversation_ids = [found.id for found in store.list_conversations(user_id, limit=2**31 - 1)]
    trees = (store.get_tree(user_id, conversation_id) for conversation_id in conversation_ids)
    if format in _RECORDS:
        return _write_records(stream, trees, _RECORDS[format])
    if format == markdown.NAME:
        return _write_documents(stream, trees)
    if len(conversation_ids) != 1:
        raise InvalidRequestError(
            f"A SillyTavern file holds one conversation, not {len(conversation_ids)}: export them one by one."
        )
    for line in sillytavern.write(next(trees)):
        stream.write(_dump(line) + "\n")
    return ExportReport(1)


def _write_records(
    stream: TextIO, trees: Iterable[ConversationTree], write: Callable[[ConversationTree], dict[str, Any] | None]
) -> ExportReport:
    num_written, empty = 0, []
    stream.write("[")
    for opened in trees:
        record = write(opened)
        if record is None:
            empty.append(opened.conversation.id)
            continue
        stream.write((",\n" if num_written else "\n") + _dump(record))
        num_written += 1
    stream.write("\n]\n")
    return ExportReport(num_written, tuple(empty))


def _write_documents(stream: TextIO, trees: Iterable[ConversationTree]) -> ExportReport:
    num_written = 0
    for opened in trees:
        stream.write(("\n---\n\n" if num_written else "") + markdown.write(opened))
        num_written += 1
    return ExportReport(num_written)


def _dump(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))
