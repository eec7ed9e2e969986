"""The schema: applied once, whole or not at all, and of tables that check their types."""

from pathlib import Path

import pytest
import sqlite_utils

from chatpage.errors import StoreError
from chatpage.store import Store
from chatpage.store.migrations import migrations


def test_opening_again_applies_nothing(tmp_path: Path) -> None:
    Store(tmp_path / "chatpage.db").close()
    with sqlite_utils.Database(tmp_path / "chatpage.db") as db:
        assert migrations.pending(db) == []
        before = [(applied.name, applied.applied_at) for applied in migrations.applied(db)]
    Store(tmp_path / "chatpage.db").close()
    with sqlite_utils.Database(tmp_path / "chatpage.db") as db:
        assert [(applied.name, applied.applied_at) for applied in migrations.applied(db)] == before


def test_steps_that_fail_leave_the_file_as_it_was(tmp_path: Path) -> None:
    """Half a schema would look like a whole one at the next start."""
    with sqlite_utils.Database(tmp_path / "chatpage.db") as db:
        db.table("nodes").create({"mine": int})
        before = db.schema
    with pytest.raises(StoreError, match="already exists"):
        Store(tmp_path / "chatpage.db")
    with sqlite_utils.Database(tmp_path / "chatpage.db") as db:
        assert db.schema == before


@pytest.mark.parametrize(
    "table", ["users", "conversations", "nodes", "conversation_nodes", "node_choice", "runs", "presets", "logins"]
)
def test_columns_hold_only_their_type(store: Store, table: str) -> None:
    assert store.database.read(lambda db: sqlite_utils.db.Table(db, table).strict).result()
