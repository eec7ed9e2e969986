"""Bring conversations in from files of other programs, and from our own.

Invariant: importing a file twice adds nothing the second time. Ids are derived from the user, the origin's own ids, and the
content, so the same message gets the same id and a message that changed gets another; a file that has grown adds what is new.
Each conversation is stored whole or not at all; what could not be read stands in the report.

Files come from strangers: links that lead nowhere or in circles, wrong types and absurd sizes are expected (see
`formats.reading` and `formats.draft`), and an id of another user's conversation in a file reaches nothing of that user.
"""

import hashlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from sqlite_utils import Database

from chatpage.errors import ImportFileError, InvalidRequestError
from chatpage.store.conversations import MAX_TITLE, insert_conversation, set_tags
from chatpage.store.formats import chatgpt, openwebui, own, sharegpt, sillytavern
from chatpage.store.formats.draft import BadRecordError, Draft, DraftNode
from chatpage.store.formats.reading import Record, read_records
from chatpage.store.nodes import MAX_TEXT
from chatpage.store.records import ConversationId, NodeId, UserId, clean_text, now, pack_tokens
from chatpage.store.rows import bump, dump_json, find_conversation, load_shape, save_choices
from chatpage.store.store import Store
from chatpage.store.tree import Link, build_tree

MAX_SKIPS_LISTED = 1000
MAX_NODES_PENDING = 2000  # read ahead of the writer
_FORMATS = (own, chatgpt, sharegpt, openwebui)  # one conversation a record
IMPORT_FORMATS = (*(form.NAME for form in _FORMATS), sillytavern.NAME)
_USABLE_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Skip:
    """Something that was left out, and why."""

    where: str
    reason: str


@dataclass(slots=True)
class ImportReport:
    """What an import did."""

    conversation_ids: list[ConversationId] = field(default_factory=list)  # those added or that grew
    num_added: int = 0
    num_grown: int = 0  # conversations that were here and got messages, or came back from the deleted
    num_unchanged: int = 0
    num_nodes_added: int = 0
    num_skipped: int = 0
    skips: list[Skip] = field(default_factory=list)  # the first thousand

    def skip(self, where: str, reason: str) -> None:
        self.num_skipped += 1
        if len(self.skips) < MAX_SKIPS_LISTED:
            self.skips.append(Skip(clean_text(where), clean_text(reason)[:500]))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A draft's node with its place in the tree: parents come before their children, siblings in order."""

    node: DraftNode
    parent_key: str | None


@dataclass(frozen=True, slots=True)
class _Stored:
    """What became of one draft."""

    conversation_id: ConversationId
    is_new: bool
    is_restored: bool  # it was here, deleted
    num_nodes_added: int


@dataclass(frozen=True, slots=True)
class _Pending:
    """A conversation on its way to the writer, which commits those that wait there together."""

    where: str
    num_nodes: int
    future: "Future[_Stored]"


def import_file(store: Store, user_id: UserId, path: Path, *, format: str | None = None) -> ImportReport:
    """Import the conversations of a file into a user's own.

    Blocks while it reads and stores; run it in a thread of its own beside an event loop.

    Args:
        format: One of `IMPORT_FORMATS`; None: each record tells by its looks.

    Raises:
        ImportFileError: The file cannot be read, or is nothing that could be imported.
        StoreError: The store failed; conversations stored before stay.
    """
    try:
        with path.open("rb") as stream:
            return import_stream(store, user_id, stream, format=format)
    except OSError as error:
        raise ImportFileError(f"Cannot read {path}: {error.strerror}.") from error


def import_stream(store: Store, user_id: UserId, stream: BinaryIO, *, format: str | None = None) -> ImportReport:
    """Import from an open, seekable binary stream; otherwise as `import_file`."""
    if format is not None and format not in IMPORT_FORMATS:
        raise ImportFileError(f"{format!r} cannot be imported; known are {', '.join(IMPORT_FORMATS)}.")
    report = ImportReport()
    pending: deque[_Pending] = deque()
    for where, draft in _read_drafts(read_records(stream), format, report):
        if (submitted := _submit(store, user_id, draft, where, report)) is not None:
            pending.append(submitted)
        while sum(waiting.num_nodes for waiting in pending) > MAX_NODES_PENDING:
            _collect(pending.popleft(), report)
    for waiting in pending:
        _collect(waiting, report)
    if not (report.num_added or report.num_grown or report.num_unchanged) and report.num_skipped:
        first = report.skips[0]
        raise ImportFileError(f"Nothing in the file could be imported: {first.where}: {first.reason}.")
    return report


def _read_drafts(records: Iterator[Record], format: str | None, report: ImportReport) -> Iterator[tuple[str, Draft]]:
    for record in records:
        where = f"record {record.number}"
        if record.value is None:
            report.skip(where, record.problem)
            continue
        known = next((form for form in _FORMATS if format in (None, form.NAME) and form.is_ours(record.value)), None)
        try:
            if known is not None:
                yield where, known.read(record.value)
            elif format in (None, sillytavern.NAME) and sillytavern.is_ours(record.value):
                yield "chat", sillytavern.read_lines(chain([record], records))
            else:
                report.skip(where, f"it does not look like {format or 'any of ' + ', '.join(IMPORT_FORMATS)}")
        except BadRecordError as error:
            report.skip(where, f"it {error}")


def _submit(store: Store, user_id: UserId, draft: Draft, where: str, report: ImportReport) -> "_Pending | None":
    placed, problems = _place(draft)
    for problem in (*draft.problems, *problems):
        report.skip(where, problem)
    if not placed and not draft.keeps_ids:
        report.skip(where, "it has no messages")
        return None
    return _Pending(where, len(placed), store.database.write(lambda db: _store(db, user_id, draft, placed)))


def _collect(waiting: "_Pending", report: ImportReport) -> None:
    try:
        stored = waiting.future.result()
    except InvalidRequestError as error:
        report.skip(waiting.where, str(error))
        return
    report.num_nodes_added += stored.num_nodes_added
    if stored.is_new:
        report.num_added += 1
    elif stored.num_nodes_added or stored.is_restored:
        report.num_grown += 1
    else:
        report.num_unchanged += 1
        return
    report.conversation_ids.append(stored.conversation_id)


def _place(draft: Draft) -> tuple[list[_Placed], list[str]]:
    """Join a draft's nodes into a tree; those that hold nothing are taken out and what hangs below them moves up."""
    by_key: dict[str, DraftNode] = {}
    problems = []
    for node in draft.nodes:
        if by_key.setdefault(node.key, node) is not node:
            problems.append(f"message {node.key}: there is another one with this id")
        elif len(node.text) > MAX_TEXT:
            problems.append(f"message {node.key}: it has {len(node.text)} characters; at most {MAX_TEXT} are allowed")
            node.is_kept = False
    tree = build_tree([Link(NodeId(n.key), _node_id(n.parent_key), n.order) for n in by_key.values()])
    placed = []
    kept_above: dict[str | None, str | None] = {None: None}  # of each node: itself, or the nearest above that is kept
    for link in tree.in_order():
        node, parent_key = by_key[link.id], tree.parents[link.id]
        if parent_key is None and link.parent_id is not None:
            problems.append(f"message {node.key}: its parent is missing, or the parents go in a circle; it became a root")
        kept_above[node.key] = node.key if node.is_kept else kept_above[parent_key]
        if node.is_kept:
            placed.append(_Placed(node, kept_above[parent_key]))
    current = kept_above.get(draft.current)
    parents = {place.node.key: place.parent_key for place in placed}
    path = []
    while current is not None:
        path.append(current)
        current = parents[current]
    draft.shown = (*(key for key in draft.shown if key in parents), *path)
    return placed, problems


def _node_id(key: str | None) -> NodeId | None:
    return None if key is None else NodeId(key)


def _store(db: Database, user_id: UserId, draft: Draft, placed: list[_Placed]) -> _Stored:
    conversation_id = _conversation_id(db, user_id, draft, placed)
    existing = find_conversation(db, user_id, conversation_id)
    moments = _moments(draft, placed)
    if existing is None:
        begun = draft.created_at or min(moments.values(), default=now())
        insert_conversation(
            db,
            user_id,
            conversation_id,
            title=draft.title[:MAX_TITLE],
            params=draft.params,
            source=draft.format,
            created_at=begun,
            updated_at=max(begun, draft.updated_at or max(moments.values(), default=begun)),
        )
        db.execute("UPDATE conversations SET pinned = ? WHERE id = ?", (int(draft.is_pinned), conversation_id))
        set_tags(db, conversation_id, draft.tags)
    shape = load_shape(db, conversation_id)
    ids = _choose_ids(db, user_id, conversation_id, draft, placed)
    _insert_nodes(db, user_id, placed, ids, moments)
    marked_at = now()
    pointers = [(conversation_id, ids[p.node.key], marked_at if p.node.is_marked else None) for p in placed]
    num_added = max(  # the driver says -1 for no rows at all
        0,
        db.conn.executemany(
            "INSERT INTO conversation_nodes (conversation_id, node_id, kept_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
            pointers,
        ).rowcount,
    )
    if existing is None:
        parents = {place.node.key: place.parent_key for place in placed}
        choices = {None if (above := parents[key]) is None else ids[above]: ids[key] for key in draft.shown}
        save_choices(db, conversation_id, choices)
    elif num_added or existing.deleted_at is not None:
        # What is shown stays shown, also where the file brought a younger sibling.
        shown = {parent: child for parent in shape.children if (child := shape.chosen(parent)) is not None}
        save_choices(db, conversation_id, shown)
        db.execute("UPDATE conversations SET deleted_at = NULL WHERE id = ?", (conversation_id,))
        bump(db, existing)
    is_restored = existing is not None and existing.deleted_at is not None
    return _Stored(conversation_id, existing is None, is_restored, num_added)


def _insert_nodes(
    db: Database, user_id: UserId, placed: list[_Placed], ids: dict[str, NodeId], moments: dict[str, int]
) -> None:
    db.conn.executemany(
        "INSERT INTO nodes (id, owner_id, parent_id, created_at, role, status, finish_reason, model, params, usage, timing,"
        " extra, detail, text, token_ids) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
        (
            (
                *(ids[node.key], user_id, None if parent_key is None else ids[parent_key], moments[node.key]),
                *(str(node.role), str(node.status), node.finish_reason, node.model, dump_json(node.params)),
                *(dump_json(node.usage), dump_json(node.timing), dump_json(node.extra), node.detail),
                *(node.text, pack_tokens(node.token_ids)),
            )
            for node, parent_key in ((place.node, place.parent_key) for place in placed)
        ),
    )


def _moments(draft: Draft, placed: list[_Placed]) -> dict[str, int]:
    """Return a time per node that keeps siblings in order; our own files hold times that do so already."""
    moments: dict[str, int] = {}
    youngest: dict[str | None, int] = {}
    latest = now()
    for place in placed:
        node, parent_key = place.node, place.parent_key
        default = draft.created_at or latest if parent_key is None else moments[parent_key] + 1
        moment = node.created_at or default
        if not (draft.keeps_ids and node.created_at):
            moment = max(min(moment, latest), youngest.get(parent_key, 0) + 1)
        moments[node.key] = youngest[parent_key] = moment
    return moments


def _conversation_id(db: Database, user_id: UserId, draft: Draft, placed: list[_Placed]) -> ConversationId:
    source = draft.source_id
    if draft.keeps_ids and source is not None and _USABLE_ID.fullmatch(source):
        owner = db.execute("SELECT owner_id FROM conversations WHERE id = ?", (source,)).fetchone()
        if owner is None or owner[0] == user_id:
            return ConversationId(source)
    content = [[p.node.key, p.parent_key, str(p.node.role), p.node.text] for p in placed] if source is None else []
    return ConversationId(_stable_id(user_id, draft.format, source, content))


def _choose_ids(
    db: Database, user_id: UserId, conversation_id: ConversationId, draft: Draft, placed: list[_Placed]
) -> dict[str, NodeId]:
    """Return an id per key: the file's own if it is ours and free, or the same message; else one derived from the content."""
    keys = [place.node.key for place in placed] if draft.keeps_ids else []
    taken = {
        row[0]: row[1:]
        for row in db.execute(
            "SELECT id, owner_id, parent_id, role, text, token_ids FROM nodes WHERE id IN (SELECT value FROM json_each(?))",
            (json.dumps(keys),),
        )
    }
    ids: dict[str, NodeId] = {}
    used: set[NodeId] = set()
    for place in placed:
        node = place.node
        parent_id = None if place.parent_key is None else ids[place.parent_key]
        same = (user_id, str(node.role), node.text, pack_tokens(node.token_ids))
        owner_id, stored_parent_id, *content = taken.get(node.key, (user_id, parent_id, *same[1:]))
        # A stored orphan is a root in its file.
        is_same_place = parent_id == (stored_parent_id if stored_parent_id in used else None)
        if draft.keeps_ids and _USABLE_ID.fullmatch(node.key) and is_same_place and (owner_id, *content) == same:
            ids[node.key] = NodeId(node.key)
        else:
            ids[node.key] = NodeId(_stable_id(conversation_id, parent_id, node.key, str(node.role), node.text))
        used.add(ids[node.key])
    return ids


def _stable_id(*parts: object) -> str:
    """Return 32 hex digits that depend on all parts and nothing else."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def summarize(report: ImportReport) -> Iterable[str]:
    """Yield the lines that tell a person what an import did."""
    yield (
        f"{report.num_added} conversations added, {report.num_grown} grown, {report.num_unchanged} unchanged;"
        f" {report.num_nodes_added} messages added; {report.num_skipped} things skipped."
    )
    for skip in report.skips:
        yield f"  {skip.where}: {skip.reason}"
    if report.num_skipped > len(report.skips):
        yield f"  and {report.num_skipped - len(report.skips)} more"
