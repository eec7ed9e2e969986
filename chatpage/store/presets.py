"""Presets: system prompts and parameters under a name, per user.

Invariant: a user's preset names are unique. A conversation keeps a copy of nothing: it names the preset it was made with.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

from sqlite_utils import Database

from chatpage.errors import ConflictError, InvalidRequestError, NotFoundError
from chatpage.store.records import NO_JSON, Json, Preset, PresetId, UserId, clean_text, new_id, now
from chatpage.store.rows import dump_json, load_json

MAX_NAME = 200
_COLUMNS = "id, owner_id, name, system_prompt, params, created_at, updated_at"


def create_preset(db: Database, user_id: UserId, name: str, *, system_prompt: str = "", params: Json = NO_JSON) -> Preset:
    """Make a preset.

    Raises:
        NotFoundError: There is no such user.
        ConflictError: The user has a preset of this name.
        InvalidRequestError: The name is empty or too long, or a value cannot be stored.
    """
    if db.execute("SELECT 1 FROM users WHERE id = ?", (user_id,)).fetchone() is None:
        raise NotFoundError(f"There is no user {user_id}.")
    preset_id, created_at = PresetId(new_id()), now()
    row = (preset_id, user_id, _checked_name(name), clean_text(system_prompt), dump_json(params), created_at, created_at)
    try:
        db.execute(f"INSERT INTO presets ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    except sqlite3.IntegrityError as error:
        raise ConflictError(f"There is a preset named {name!r} already: choose another name, or change that one.") from error
    return get_preset(db, user_id, preset_id)


def get_preset(db: Database, user_id: UserId, preset_id: PresetId) -> Preset:
    """Return one preset.

    Raises:
        NotFoundError: There is none, or it is another user's.
    """
    row = db.execute(f"SELECT {_COLUMNS} FROM presets WHERE id = ? AND owner_id = ?", (preset_id, user_id)).fetchone()
    if row is None:
        raise NotFoundError(f"There is no preset {preset_id}.")
    return _preset_from_row(row)


def list_presets(db: Database, user_id: UserId) -> tuple[Preset, ...]:
    """Return the user's presets by name."""
    rows = db.execute(f"SELECT {_COLUMNS} FROM presets WHERE owner_id = ? ORDER BY name", (user_id,))
    return tuple(_preset_from_row(row) for row in rows)


def update_preset(
    db: Database,
    user_id: UserId,
    preset_id: PresetId,
    *,
    name: str | None = None,
    system_prompt: str | None = None,
    params: Json | None = None,
) -> Preset:
    """Change what is given (None: leave as it is). Raises as `create_preset` does."""
    old = get_preset(db, user_id, preset_id)
    new_name = old.name if name is None else _checked_name(name)
    prompt = old.system_prompt if system_prompt is None else clean_text(system_prompt)
    try:
        db.execute(
            "UPDATE presets SET name = ?, system_prompt = ?, params = ?, updated_at = ? WHERE id = ?",
            (new_name, prompt, dump_json(old.params if params is None else params), now(), preset_id),
        )
    except sqlite3.IntegrityError as error:
        raise ConflictError(f"There is a preset named {new_name!r} already: choose another name.") from error
    return get_preset(db, user_id, preset_id)


def delete_preset(db: Database, user_id: UserId, preset_id: PresetId) -> Preset:
    """Remove a preset and return it; conversations made with it stay as they are, without it.

    Raises:
        NotFoundError: There is none, or it is another user's.
    """
    preset = get_preset(db, user_id, preset_id)
    db.execute("UPDATE conversations SET preset_id = NULL, version = version + 1 WHERE preset_id = ?", (preset_id,))
    db.execute("DELETE FROM presets WHERE id = ?", (preset_id,))
    return preset


def _checked_name(name: str) -> str:
    name = clean_text(name).strip()
    if not 0 < len(name) <= MAX_NAME:
        raise InvalidRequestError(f"The name of a preset must be 1 to {MAX_NAME} characters long, not {len(name)}.")
    return name


def _preset_from_row(row: Sequence[Any]) -> Preset:
    preset_id, owner_id, name, system_prompt, params, created_at, updated_at = row
    return Preset(preset_id, owner_id, name, system_prompt, load_json(params), created_at, updated_at)
