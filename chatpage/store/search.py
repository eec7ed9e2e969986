"""Search over the text of messages.

Invariant: whatever a user types is text, never query syntax, and only messages that user could open are found: in the own
conversations, not deleted, not below something deleted. Hits come newest first. Replies are found once they have ended.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqlite_utils import Database

from chatpage.errors import InvalidRequestError
from chatpage.store.records import ConversationId, NodeId, Role, UserId
from chatpage.store.rows import load_shape
from chatpage.store.tree import Link, Tree

MAX_QUERY = 1000  # characters
MAX_WORDS = 32
SNIPPET_WORDS = 24
CONTEXT = 60  # characters on each side of a hit, where words cannot be counted
# FTS5 marks hits inside the text it returns; these code points are no characters and stand in no text.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# Scripts written without spaces: to the index a whole sentence is one word, so these are looked for as they stand.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One message that holds what was looked for. To open it: `choose_node(hit.node_id)`, or show the path to `leaf_id`."""

    conversation_id: ConversationId
    title: str
    node_id: NodeId
    leaf_id: NodeId  # the end of a branch that holds the node
    role: Role
    created_at: int
    snippet: str
    highlights: tuple[tuple[int, int], ...]  # [start, end) within the snippet


def search(
    db: Database, user_id: UserId, query: str, *, conversation_id: ConversationId | None = None, limit: int = 20
) -> tuple[SearchHit, ...]:
    """Find messages that hold all words of the query; the last word may be the beginning of one.

    Args:
        query: Words, or "a phrase" in quotes.
        conversation_id: Look only here.
        limit: Most hits to return, 1 to 200.

    Raises:
        InvalidRequestError: The query is too long, or the limit is out of range.
    """
    if len(query) > MAX_QUERY:
        raise InvalidRequestError(f"The query has {len(query)} characters; at most {MAX_QUERY} are allowed.")
    if not 1 <= limit <= 200:
        raise InvalidRequestError(f"limit is {limit}; it must be between 1 and 200.")
    if _UNSPACED.search(query):
        rows = _rows_with_substrings(db, user_id, query.split()[:MAX_WORDS], conversation_id)
    elif match := match_expression(query):
        rows = _rows_that_match(db, user_id, match, conversation_id)
    else:
        return ()
    return tuple(_openable(db, rows, limit))


def match_expression(query: str) -> str:
    """Return the FTS5 expression for what a user typed, every word quoted; "" if there is nothing to look for."""
    phrases = re.findall(r'"([^"]*)"|([^\s"]+)', query.replace("\0", " "))
    words = [(quoted or bare, bool(bare)) for quoted, bare in phrases]
    words = [(word, is_bare) for word, is_bare in words if any(_is_indexed(character) for character in word)][:MAX_WORDS]
    quoted_words = [f'"{word}"' for word, _ in words]
    if words and words[-1][1] and not query[-1:].isspace():
        quoted_words[-1] += "*"
    return " AND ".join(quoted_words)


def _is_indexed(character: str) -> bool:
    """Whether the index's tokenizer keeps a character; a phrase of none would match nothing."""
    return unicodedata.category(character)[0] in "LN" or unicodedata.category(character) == "Co"


def _rows_that_match(
    db: Database, user_id: UserId, match: str, conversation_id: ConversationId | None
) -> Iterator[tuple[str, ...]]:
    # Ordered by rowid the index yields hits one by one, newest first, so a word that is everywhere costs no more than a rare
    # one; by rank it would have to score them all. CROSS JOIN keeps the planner from looking at all conversations per hit.
    return db.execute(
        "SELECT n.id, n.role, n.created_at, c.id, c.title,"
        " snippet(nodes_fts, 0, :open, :close, '…', :words)"
        " FROM nodes_fts CROSS JOIN nodes n ON n.seq = nodes_fts.rowid"
        " CROSS JOIN conversation_nodes m ON m.node_id = n.id CROSS JOIN conversations c ON c.id = m.conversation_id"
        " WHERE nodes_fts MATCH :match AND c.owner_id = :user AND c.deleted_at IS NULL"
        " AND (:conversation IS NULL OR c.id = :conversation) ORDER BY nodes_fts.rowid DESC",
        {
            **{"open": _OPEN, "close": _CLOSE, "words": SNIPPET_WORDS, "user": user_id, "conversation": conversation_id},
            "match": f'text : ({match}) AND owner_id : "{user_id}"',
        },
    )


def _rows_with_substrings(
    db: Database, user_id: UserId, words: list[str], conversation_id: ConversationId | None
) -> Iterator[tuple[str, ...]]:
    rows = db.execute(
        "SELECT n.id, n.role, n.created_at, c.id, c.title, n.text FROM nodes n"
        " CROSS JOIN conversation_nodes m ON m.node_id = n.id CROSS JOIN conversations c ON c.id = m.conversation_id"
        " WHERE n.owner_id = :user AND n.status <> 'streaming' AND c.owner_id = :user AND c.deleted_at IS NULL"
        " AND (:conversation IS NULL OR c.id = :conversation)"
        f" AND {' AND '.join(f'instr(n.text, :word{number})' for number in range(len(words)))} ORDER BY n.seq DESC",
        {"user": user_id, "conversation": conversation_id, **{f"word{number}": word for number, word in enumerate(words)}},
    )
    for *row, text in rows:
        start = text.find(words[0])
        left, right = max(0, start - CONTEXT), start + len(words[0]) + CONTEXT
        found = f"{text[left:start]}{_OPEN}{words[0]}{_CLOSE}{text[start + len(words[0]) : right]}"
        yield (*row, ("…" if left else "") + found + ("…" if right < len(text) else ""))


def _openable(db: Database, rows: Iterable[tuple[str, ...]], limit: int) -> Iterator[SearchHit]:
    shapes: dict[str, Tree[Link]] = {}
    count = 0
    for node_id, role, created_at, conversation_id, title, marked in rows:
        if conversation_id not in shapes:
            shapes[conversation_id] = load_shape(db, ConversationId(conversation_id))
        shape = shapes[conversation_id]
        if node_id not in shape.nodes:
            continue
        snippet, highlights = _split_marks(marked)
        yield SearchHit(
            *(ConversationId(conversation_id), title, NodeId(node_id), shape.leaf_below(NodeId(node_id)), Role(role)),
            *(int(created_at), snippet, highlights),
        )
        count += 1
        if count == limit:
            return


def _split_marks(marked: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Take the marks out of a snippet and return where they were."""
    snippet, highlights = "", []
    for part in marked.split(_OPEN)[1:]:
        hit, _, rest = part.partition(_CLOSE)
        highlights.append((hit, rest))
    snippet = marked.split(_OPEN, 1)[0]
    ranges = []
    for hit, rest in highlights:
        ranges.append((len(snippet), len(snippet) + len(hit)))
        snippet += hit + rest
    return snippet, tuple(ranges)
