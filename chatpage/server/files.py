"""`/api/export` and `/api/import`: conversations as files.

Invariant: a file never stands in memory as a whole; it is written to disk first, in a thread beside the event loop.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import IO, Annotated, BinaryIO, TextIO, cast

from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from chatpage.server.bodies import ImportResult, SkipView
from chatpage.server.problems import TooLargeError
from chatpage.server.rest import Caller, Chats
from chatpage.store import FILE_SUFFIXES, ConversationId, Store, UserId, export_conversations, import_stream

IMPORT_PATH = "/api/import"
MAX_IMPORT_BYTES = 2**30
CHUNK_BYTES = 2**16
MEMORY_BYTES = 2**20  # of a file that is that small, on no disk

router = APIRouter(prefix="/api", tags=["files"])


@router.get("/export", response_class=StreamingResponse)
async def export(
    user: Caller, session: Chats, format: str = "chatpage", id: Annotated[list[str] | None, Query(max_length=1000)] = None
) -> StreamingResponse:
    """Write conversations (without `id`: all) to a file."""
    ids = None if id is None else [ConversationId(one) for one in id]
    file = await asyncio.to_thread(_export, session.store, user, format, ids)
    suffix = FILE_SUFFIXES[format]
    headers = {"Content-Disposition": f'attachment; filename="conversations{suffix}"'}
    return StreamingResponse(_chunks(file), media_type="application/octet-stream", headers=headers)


@router.post("/import")
async def import_(request: Request, user: Caller, session: Chats, format: str | None = None) -> ImportResult:
    """Add the conversations of a file, which is the body of the request; adding it twice adds nothing."""
    with tempfile.SpooledTemporaryFile(MEMORY_BYTES) as file:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_IMPORT_BYTES:
                raise TooLargeError(f"A file to import may have {MAX_IMPORT_BYTES} bytes; split it.")
            await asyncio.to_thread(file.write, chunk)
        file.seek(0)
        report = await asyncio.to_thread(import_stream, session.store, user, cast(BinaryIO, file), format=format)
    return ImportResult(
        conversation_ids=tuple(report.conversation_ids),
        num_added=report.num_added,
        num_grown=report.num_grown,
        num_unchanged=report.num_unchanged,
        num_nodes_added=report.num_nodes_added,
        num_skipped=report.num_skipped,
        skips=tuple(SkipView(where=skip.where, reason=skip.reason) for skip in report.skips),
    )


def _export(store: Store, user_id: UserId, format: str, ids: list[ConversationId] | None) -> IO[str]:
    with contextlib.ExitStack() as on_error:
        file = on_error.enter_context(tempfile.SpooledTemporaryFile(MEMORY_BYTES, "w+", encoding="utf-8", newline=""))
        export_conversations(store, user_id, cast(TextIO, file), format=format, conversation_ids=ids)
        file.seek(0)
        on_error.pop_all()
    return file


async def _chunks(file: IO[str]) -> AsyncIterator[str]:
    with file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
