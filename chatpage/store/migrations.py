"""The schema, as the steps that lead to it.

Invariant: a step that has been released is never edited; a change is a new step at the end.

Which nodes a conversation has is said by `conversation_nodes`, one row per node it points at. A fork copies these rows, never
the nodes, so a node is shared by as many conversations as have a row for it, and may be purged when none has. On a row,
`deleted_at` hides the node and all below it in that conversation alone, and `kept_at` marks the node there. `nodes.parent_id`
has no foreign key: files from elsewhere and rows repaired by hand may hold orphans, and a conversation with orphans must still
open.
"""

from sqlite_utils import Database, Migrations

from chatpage.store.records import LOCAL_USER, now

migrations = Migrations("chatpage")


@migrations()
def users_and_keys(db: Database) -> None:
    db.table("users").create(
        {"id": str, "name": str, "password_hash": str, "created_at": int}, pk="id", not_null={"name", "created_at"}, strict=True
    ).create_index(["name"], unique=True)
    db.table("api_keys").create(
        {"id": str, "user_id": str, "name": str, "key_hash": str, "created_at": int, "last_used_at": int},
        pk="id",
        not_null={"user_id", "name", "key_hash", "created_at"},
        foreign_keys=[("user_id", "users", "id")],
        strict=True,
    ).create_index(["key_hash"], unique=True)
    db.table("users").insert({"id": LOCAL_USER, "name": "local", "password_hash": None, "created_at": now()})


@migrations()
def conversations_and_nodes(db: Database) -> None:
    db.table("presets").create(
        {"id": str, "owner_id": str, "name": str, "system_prompt": str, "params": str, "created_at": int, "updated_at": int},
        pk="id",
        not_null={"owner_id", "name", "system_prompt", "params", "created_at", "updated_at"},
        foreign_keys=[("owner_id", "users", "id")],
        strict=True,
    ).create_index(["owner_id", "name"], unique=True)
    db.table("conversations").create(
        {
            **{"id": str, "owner_id": str, "title": str, "version": int, "created_at": int, "updated_at": int, "pinned": int},
            **{"params": str, "preset_id": str, "forked_from": str, "source": str, "deleted_at": int},
        },
        pk="id",
        not_null={"owner_id", "title", "version", "created_at", "updated_at", "pinned", "params"},
        foreign_keys=[("owner_id", "users", "id")],
        strict=True,
    ).create_index(["owner_id", "updated_at"])
    db.table("tags").create(
        {"conversation_id": str, "name": str},
        pk=("conversation_id", "name"),
        foreign_keys=[("conversation_id", "conversations", "id")],
        strict=True,
    )
    # seq, not the implicit rowid, ties a node to its search row: an implicit rowid may change under VACUUM.
    db.table("nodes").create(
        {
            **{"seq": int, "id": str, "owner_id": str, "parent_id": str, "created_at": int, "role": str, "status": str},
            **{"finish_reason": str, "model": str, "params": str, "usage": str, "timing": str, "extra": str},
            **{"text": str, "token_ids": bytes},  # the long ones last: reading the shape of a tree must not walk over them
        },
        pk="seq",
        not_null={"id", "owner_id", "role", "text", "token_ids", "status", "created_at"},
        foreign_keys=[("owner_id", "users", "id")],
        strict=True,
    ).create_index(["id"], unique=True)
    db.table("nodes").create_index(["parent_id"])
    db.execute("CREATE INDEX nodes_streaming ON nodes (seq) WHERE status = 'streaming'")
    db.table("conversation_nodes").create(
        {"conversation_id": str, "node_id": str, "deleted_at": int},
        pk=("conversation_id", "node_id"),
        foreign_keys=[("conversation_id", "conversations", "id"), ("node_id", "nodes", "id")],
        strict=True,
    ).create_index(["node_id"])
    db.table("node_choice").create(
        {"conversation_id": str, "parent_id": str, "child_id": str},  # parent_id '' is the root level
        pk=("conversation_id", "parent_id"),
        not_null={"child_id"},
        foreign_keys=[("conversation_id", "conversations", "id")],
        strict=True,
    )


@migrations()
def runs_and_samples(db: Database) -> None:
    db.table("runs").create(
        {
            **{"id": str, "user_id": str, "conversation_id": str, "parent_id": str, "kind": str, "status": str},
            **{"params": str, "usage": str, "client_msg_id": str, "input_node_id": str, "previous_choice": str},
            **{"error_code": str, "error_message": str, "created_at": int, "finished_at": int},
        },
        pk="id",
        not_null={"user_id", "conversation_id", "kind", "status", "params", "created_at"},
        foreign_keys=[("user_id", "users", "id"), ("conversation_id", "conversations", "id")],
        strict=True,
    ).create_index(["user_id", "client_msg_id"], unique=True)
    db.table("runs").create_index(["conversation_id", "created_at"])
    db.execute("CREATE INDEX runs_running ON runs (id) WHERE status = 'running'")
    db.table("run_samples").create(
        {
            **{"run_id": str, "sample": int, "node_id": str, "num_prefix_tokens": int, "sum_logprob": float},
            "previous_status": str,  # of a node that is continued, to give back if the run comes to nothing
        },
        pk=("run_id", "sample"),
        not_null={"node_id", "num_prefix_tokens"},
        foreign_keys=[("run_id", "runs", "id")],
        strict=True,
    ).create_index(["node_id"])


@migrations()
def search_index(db: Database) -> None:
    # The owner is a column of the index, so that a search meets only the rows of its user. Streaming nodes are left out: a
    # flush a second would index the same growing text again and again.
    db.table("nodes").enable_fts(["text", "owner_id"], tokenize="unicode61 remove_diacritics 2")
    add = "INSERT INTO nodes_fts (rowid, text, owner_id) VALUES (new.seq, new.text, new.owner_id);"
    drop = "INSERT INTO nodes_fts (nodes_fts, rowid, text, owner_id) VALUES ('delete', old.seq, old.text, old.owner_id);"
    was, is_now = "old.status = 'streaming'", "new.status = 'streaming'"
    db.executescript(f"""
        CREATE TRIGGER nodes_added AFTER INSERT ON nodes WHEN NOT {is_now} BEGIN {add} END;
        CREATE TRIGGER nodes_finished AFTER UPDATE ON nodes WHEN {was} AND NOT {is_now} BEGIN {add} END;
        CREATE TRIGGER nodes_reopened AFTER UPDATE ON nodes WHEN {is_now} AND NOT {was} BEGIN {drop} END;
        CREATE TRIGGER nodes_purged AFTER DELETE ON nodes WHEN NOT {was} BEGIN {drop} END;
    """)


@migrations()
def logins(db: Database) -> None:
    db.table("logins").create(
        {"token_hash": str, "user_id": str, "created_at": int, "expires_at": int},
        pk="token_hash",
        not_null={"user_id", "created_at", "expires_at"},
        foreign_keys=[("user_id", "users", "id")],
        strict=True,
    ).create_index(["user_id"])


@migrations()
def kept_messages(db: Database) -> None:
    db.table("conversation_nodes").add_column("kept_at", int)


@migrations()
def reasons(db: Database) -> None:
    db.table("nodes").add_column("detail", str)
