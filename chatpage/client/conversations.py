"""What a client does with conversations besides running them; every method is one request.

Invariant: names, arguments and results are those of the server's API, described by its `/openapi.json`.
"""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chatpage.client.http import Http, as_body
from chatpage.server.bodies import (
    ConversationKv,
    ConversationList,
    HitList,
    HitView,
    ImportResult,
    PresetList,
    PresetView,
    TagList,
    TagView,
    TokenView,
)
from chatpage.server.protocol import ResetOp, RunCreated, TreePatch
from chatpage.server.views import ConversationView, KvView, NodeView, RunParams
from chatpage.store import Role

CHUNK_BYTES = 2**16


class Conversations:
    """The part of a client that speaks HTTP. Every method raises `ServerError` where the server refuses, and
    `ConnectionError` where it cannot be reached."""

    def __init__(self, url: str, key: str | None) -> None:
        self._http = Http(url, key)

    # -- conversations ---------------------------------------------------------------------------------------------

    async def create_conversation(
        self,
        *,
        title: str = "",
        system_prompt: str | None = None,
        preset_id: str | None = None,
        params: RunParams | None = None,
        tags: Iterable[str] = (),
    ) -> ConversationView:
        """Make a conversation; a system prompt (given, else the preset's) becomes its root message."""
        fields = {"title": title, "system_prompt": system_prompt, "preset_id": preset_id, "params": params, "tags": list(tags)}
        return await self._http.call(ConversationView, "POST", "/api/conversations", body=as_body(fields))

    async def list_conversations(
        self, *, tag: str | None = None, deleted: bool = False, limit: int = 100, offset: int = 0
    ) -> tuple[ConversationView, ...]:
        """List conversations, pinned ones first, then the last changed first."""
        query = {"tag": tag, "deleted": deleted, "limit": limit, "offset": offset}
        return (await self._http.call(ConversationList, "GET", "/api/conversations", **query)).conversations

    async def tree(self, conversation_id: str) -> ResetOp:
        """Return a conversation with all its messages and which of them are shown."""
        [op] = (await self._http.call(TreePatch, "GET", _conversation(conversation_id))).ops
        assert isinstance(op, ResetOp), "a whole tree comes as one reset"
        return op

    async def update_conversation(
        self,
        conversation_id: str,
        *,
        title: str | None = None,
        is_pinned: bool | None = None,
        tags: Iterable[str] | None = None,
        params: RunParams | None = None,
        preset_id: str | None = None,
        without_preset: bool = False,
        expected_version: int | None = None,
    ) -> ConversationView:
        """Rename, pin, tag or set parameters; None leaves a thing as it is."""
        tag_list = None if tags is None else list(tags)
        fields: dict[str, Any] = {"title": title, "is_pinned": is_pinned, "tags": tag_list, "params": params}
        fields |= {"preset_id": preset_id, "without_preset": without_preset}
        path = _conversation(conversation_id)
        return await self._http.call(ConversationView, "PATCH", path, body=as_body(fields), expected_version=expected_version)

    async def delete_conversation(self, conversation_id: str, *, expected_version: int | None = None) -> ConversationView:
        """Hide a conversation and stop its runs."""
        path = _conversation(conversation_id)
        return await self._http.call(ConversationView, "DELETE", path, expected_version=expected_version)

    async def restore_conversation(self, conversation_id: str) -> ConversationView:
        """Undo `delete_conversation`."""
        return await self._http.call(ConversationView, "POST", _conversation(conversation_id) + "/restore")

    async def fork_conversation(
        self, conversation_id: str, *, node_id: str | None = None, title: str | None = None
    ) -> ConversationView:
        """Make a conversation that points at the same messages: those up to `node_id`, or all."""
        body = as_body({"node_id": node_id, "title": title})
        return await self._http.call(ConversationView, "POST", _conversation(conversation_id) + "/fork", body=body)

    # -- messages --------------------------------------------------------------------------------------------------

    async def add_message(
        self, conversation_id: str, role: Role, text: str, *, parent_id: str | None = None, expected_version: int | None = None
    ) -> NodeView:
        """Add a message that nobody generates, such as a system prompt, and show it."""
        body = as_body({"role": str(role), "text": text, "parent_id": parent_id})
        path = _conversation(conversation_id) + "/nodes"
        return await self._http.call(NodeView, "POST", path, body=body, expected_version=expected_version)

    async def edit(self, conversation_id: str, node_id: str, text: str, *, expected_version: int | None = None) -> NodeView:
        """Put another version beside a message and show it; the original and what is below it stay."""
        path = _node(conversation_id, node_id) + "/edit"
        return await self._http.call(NodeView, "POST", path, body={"text": text}, expected_version=expected_version)

    async def edit_and_answer(
        self,
        conversation_id: str,
        node_id: str,
        text: str,
        *,
        n: int = 1,
        params: RunParams | None = None,
        client_msg_id: str | None = None,
        expected_version: int | None = None,
    ) -> RunCreated:
        """Put another version beside a user's message and have it answered; `follow` reads the answer."""
        body = as_body({"text": text, "n": n, "params": params, "client_msg_id": client_msg_id})
        path = _node(conversation_id, node_id) + "/answer"
        return await self._http.call(RunCreated, "POST", path, body=body, expected_version=expected_version)

    async def select(self, conversation_id: str, node_id: str, *, expected_version: int | None = None) -> TreePatch:
        """Show the branch that holds a message."""
        path = _node(conversation_id, node_id) + "/select"
        return await self._http.call(TreePatch, "POST", path, expected_version=expected_version)

    async def delete_node(self, conversation_id: str, node_id: str, *, expected_version: int | None = None) -> TreePatch:
        """Hide a message and all below it, and stop the runs that write there."""
        return await self._http.call(TreePatch, "DELETE", _node(conversation_id, node_id), expected_version=expected_version)

    async def restore_node(self, conversation_id: str, node_id: str) -> TreePatch:
        """Undo `delete_node`."""
        return await self._http.call(TreePatch, "POST", _node(conversation_id, node_id) + "/restore")

    async def tokens(self, conversation_id: str, node_id: str) -> TokenView:
        """Return where in the text of a message each of its tokens ends, such as to fork inside it."""
        return await self._http.call(TokenView, "GET", _node(conversation_id, node_id) + "/tokens")

    # -- search, tags, presets, memory -----------------------------------------------------------------------------

    async def search(self, text: str, *, conversation_id: str | None = None, limit: int = 20) -> tuple[HitView, ...]:
        """Find messages, in whatever branch they are."""
        query = {"q": text, "conversation_id": conversation_id, "limit": limit}
        return (await self._http.call(HitList, "GET", "/api/search", **query)).hits

    async def list_tags(self) -> tuple[TagView, ...]:
        """List tags by name."""
        return (await self._http.call(TagList, "GET", "/api/tags")).tags

    async def list_presets(self) -> tuple[PresetView, ...]:
        """List presets by name."""
        return (await self._http.call(PresetList, "GET", "/api/presets")).presets

    async def create_preset(self, name: str, *, system_prompt: str = "", params: RunParams | None = None) -> PresetView:
        """Make a preset."""
        body = as_body({"name": name, "system_prompt": system_prompt, "params": params})
        return await self._http.call(PresetView, "POST", "/api/presets", body=body)

    async def update_preset(
        self, preset_id: str, *, name: str | None = None, system_prompt: str | None = None, params: RunParams | None = None
    ) -> PresetView:
        """Change a preset; None leaves a thing as it is."""
        body = as_body({"name": name, "system_prompt": system_prompt, "params": params})
        return await self._http.call(PresetView, "PATCH", f"/api/presets/{quote(preset_id, safe='')}", body=body)

    async def delete_preset(self, preset_id: str) -> PresetView:
        """Remove a preset; its conversations stay."""
        return await self._http.call(PresetView, "DELETE", f"/api/presets/{quote(preset_id, safe='')}")

    async def kv(self) -> KvView:
        """Return the block map: totals, and per block its state and who holds it."""
        return await self._http.call(KvView, "GET", "/api/kv")

    async def conversation_kv(self, conversation_id: str) -> ConversationKv:
        """Return the block map while the branches of a conversation are held, so that it shows what they share."""
        return await self._http.call(ConversationKv, "GET", _conversation(conversation_id) + "/kv")

    # -- files -----------------------------------------------------------------------------------------------------

    async def export(self, path: Path, *, format: str = "chatpage", ids: Iterable[str] | None = None) -> None:
        """Write conversations (without `ids`: all) to a file."""
        query = {"format": format, "id": None if ids is None else list(ids)}
        async with self._http.stream("GET", "/api/export", **query) as answer:
            with path.open("wb") as file:
                async for chunk in answer.aiter_bytes():
                    file.write(chunk)

    async def import_file(self, path: Path, *, format: str | None = None) -> ImportResult:
        """Add the conversations of a file; adding it twice adds nothing."""
        return await self._http.call(ImportResult, "POST", "/api/import", content=_chunks(path), format=format)


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _conversation(conversation_id: str) -> str:
    return f"/api/conversations/{quote(conversation_id, safe='')}"


def _node(conversation_id: str, node_id: str) -> str:
    return f"{_conversation(conversation_id)}/nodes/{quote(node_id, safe='')}"
