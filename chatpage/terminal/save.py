"""Writes a conversation to a file: the whole tree as JSON, or the active path as Markdown.

Invariant: a file is written whole or not at all.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from chatpage.errors import InvalidRequestError
from chatpage.terminal.arguments import shorten
from chatpage.terminal.conversation import Conversation

_HEADINGS = {"system": "System", "user": "You", "assistant": "Assistant", "tool": "Tool"}


def to_json(conversation: Conversation, model: str) -> str:
    """Return the whole tree as JSON: `{"model", "tip", "nodes": [{"id", "parent_id", "role", "text", ...}]}`."""
    nodes = [{name: value for name, value in asdict(node).items() if name != "key"} for node in conversation.nodes]
    return json.dumps({"model": model, "tip": conversation.tip, "nodes": nodes}, ensure_ascii=False, indent=1) + "\n"


def to_markdown(conversation: Conversation, model: str) -> str:
    """Return the active path as Markdown with a heading per message."""
    parts = [f"# Chat with {model}"]
    parts += [f"## {_HEADINGS[node.role]}\n\n{node.text.strip()}" for node in conversation.active_path]
    return "\n\n".join(parts) + "\n"


def read_path(text: str) -> Path:
    """Return the file that a person named, absolute, with `~` as their home.

    Raises:
        InvalidRequestError: There is no such home.
    """
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user; the current folder was removed
        raise InvalidRequestError(f"Cannot find {shorten(text)}: {error}") from error


_WRITERS = {".json": to_json, ".md": to_markdown}


def save(conversation: Conversation, model: str, path: Path, *, may_replace: bool) -> None:
    """Write the conversation; the suffix of the file says how.

    Raises:
        InvalidRequestError: The suffix is unknown, the file exists and must stay, or it cannot be written.
    """
    if "\0" in str(path):
        raise InvalidRequestError("Cannot save there: the name has a null character.")
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise InvalidRequestError(f"Cannot save as {path.name!r}: the name must end in {' or '.join(_WRITERS)}.")
    try:
        if path.exists() and not may_replace:
            raise InvalidRequestError(f"{path} exists and was not written by this chat; choose another name.")
        _write_whole(path, writer(conversation, model))
    except OSError as error:
        raise InvalidRequestError(f"Cannot write {shorten(path.name)}: {error.strerror or error}.") from error


def _write_whole(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        partial = Path(file.name)
        try:
            file.write(text)
            file.flush()
            partial.replace(path)
        except BaseException:  # Ctrl-C too: nothing may be left
            partial.unlink(missing_ok=True)
            raise
