"""Conversations that outlive the process: trees of messages in SQLite, per user, searchable, importable, exportable.

Imports nothing of the engine. `Store` is the door; records are frozen; see `store.store` for the list of operations.
"""

from chatpage.store.database import database_path
from chatpage.store.exporting import EXPORT_FORMATS, FILE_SUFFIXES, ExportReport, export_conversations
from chatpage.store.importing import IMPORT_FORMATS, ImportReport, import_file, import_stream, summarize
from chatpage.store.purging import Purged
from chatpage.store.records import (
    LOCAL_USER,
    ApiKey,
    ApiKeyId,
    Conversation,
    ConversationId,
    ConversationTree,
    NewNode,
    Node,
    NodeId,
    NodeStatus,
    Preset,
    PresetId,
    Role,
    Run,
    RunId,
    RunKind,
    RunStatus,
    Sample,
    TreeChange,
    User,
    UserId,
)
from chatpage.store.runs import StartedRun
from chatpage.store.search import SearchHit
from chatpage.store.store import Store
from chatpage.store.tree import Tree, build_tree

__all__ = [
    "EXPORT_FORMATS",
    "FILE_SUFFIXES",
    "IMPORT_FORMATS",
    "LOCAL_USER",
    "ApiKey",
    "ApiKeyId",
    "Conversation",
    "ConversationId",
    "ConversationTree",
    "ExportReport",
    "ImportReport",
    "NewNode",
    "Node",
    "NodeId",
    "NodeStatus",
    "Preset",
    "PresetId",
    "Purged",
    "Role",
    "Run",
    "RunId",
    "RunKind",
    "RunStatus",
    "Sample",
    "SearchHit",
    "StartedRun",
    "Store",
    "Tree",
    "TreeChange",
    "User",
    "UserId",
    "build_tree",
    "database_path",
    "export_conversations",
    "import_file",
    "import_stream",
    "summarize",
]
