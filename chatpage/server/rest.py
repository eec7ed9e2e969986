"""`/api`: conversations, their messages, presets, search and the block map over HTTP.

Invariant: every change goes through the session, so whoever follows the conversation on a socket hears of it. A change with
`expected_version` is refused with 409 and the version now if the conversation has moved on.
"""

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from chatpage.server.bodies import (
    Answer,
    Cancel,
    ConversationChange,
    ConversationKv,
    ConversationList,
    Edit,
    Fork,
    HitList,
    HitView,
    NewConversation,
    NewMessage,
    NewPreset,
    PresetChange,
    PresetList,
    PresetView,
    RunBody,
    TagList,
    TagView,
)
from chatpage.server.protocol import RunCreated, TreePatch
from chatpage.server.security import Auth
from chatpage.server.views import ConversationView, KvView, NodeView
from chatpage.session import Session, inspecting
from chatpage.session.views import conversation_view, node_view, tree_patch
from chatpage.store import ConversationId, NodeId, Preset, PresetId, RunId, UserId

MAX_LISTED = 1000


async def current_user(request: Request) -> UserId:
    """Return whose request it is."""
    auth: Auth = request.app.state.auth
    return (await auth.require_user(request)).id


def _session(request: Request) -> Session:
    session: Session = request.app.state.session
    return session


Caller = Annotated[UserId, Depends(current_user)]
Chats = Annotated[Session, Depends(_session)]
Version = Annotated[int | None, Query(ge=0, lt=2**63, description="refuse if the conversation has another version")]
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]

router = APIRouter(prefix="/api", tags=["conversations"])

# -- conversations -------------------------------------------------------------------------------------------------------


@router.get("/conversations", response_model_exclude_none=True)
async def list_conversations(
    *, user: Caller, session: Chats, tag: str | None = None, deleted: bool = False, limit: Limit = 100, offset: Offset = 0
) -> ConversationList:
    """List conversations."""
    found = await session.store.list_conversations.aio(user, tag=tag, deleted=deleted, limit=limit, offset=offset)
    return ConversationList(conversations=tuple(map(conversation_view, found)))


@router.post("/conversations", status_code=201, response_model_exclude_none=True)
async def create_conversation(*, user: Caller, session: Chats, body: NewConversation) -> ConversationView:
    """Make a conversation."""
    made = await session.create_conversation(
        user,
        title=body.title,
        system_prompt=body.system_prompt,
        preset_id=None if body.preset_id is None else PresetId(body.preset_id),
        params=body.params,
        tags=body.tags,
    )
    return conversation_view(made)


@router.get("/conversations/{conversation_id}", response_model_exclude_none=True)
async def get_conversation(*, user: Caller, session: Chats, conversation_id: str) -> TreePatch:
    """Return a whole conversation, as the patch that makes it; text that is being written is there up to now."""
    return await session.tree(user, ConversationId(conversation_id))


@router.patch("/conversations/{conversation_id}", response_model_exclude_none=True)
async def update_conversation(
    *, user: Caller, session: Chats, conversation_id: str, body: ConversationChange, expected_version: Version = None
) -> ConversationView:
    """Rename, pin, tag, or set parameters."""
    changed = await session.update_conversation(
        user,
        ConversationId(conversation_id),
        title=body.title,
        is_pinned=body.is_pinned,
        tags=body.tags,
        params=body.params,
        preset_id=None if body.preset_id is None else PresetId(body.preset_id),
        without_preset=body.without_preset,
        expected_version=expected_version,
    )
    return conversation_view(changed)


@router.delete("/conversations/{conversation_id}", response_model_exclude_none=True)
async def delete_conversation(
    *, user: Caller, session: Chats, conversation_id: str, expected_version: Version = None
) -> ConversationView:
    """Hide a conversation and stop its runs; `restore` undoes it."""
    gone = await session.delete_conversation(user, ConversationId(conversation_id), expected_version=expected_version)
    return conversation_view(gone)


@router.post("/conversations/{conversation_id}/restore", response_model_exclude_none=True)
async def restore_conversation(*, user: Caller, session: Chats, conversation_id: str) -> ConversationView:
    """Undo a deletion."""
    return conversation_view(await session.restore_conversation(user, ConversationId(conversation_id)))


@router.post("/conversations/{conversation_id}/fork", status_code=201, response_model_exclude_none=True)
async def fork_conversation(*, user: Caller, session: Chats, conversation_id: str, body: Fork) -> ConversationView:
    """Make a conversation that points at the same messages."""
    node_id = None if body.node_id is None else NodeId(body.node_id)
    made = await session.fork_conversation(user, ConversationId(conversation_id), node_id=node_id, title=body.title)
    return conversation_view(made)


# -- messages ------------------------------------------------------------------------------------------------------------


@router.post("/conversations/{conversation_id}/nodes", status_code=201, response_model_exclude_none=True)
async def add_message(
    *, user: Caller, session: Chats, conversation_id: str, body: NewMessage, expected_version: Version = None
) -> NodeView:
    """Add a message that nobody generates."""
    parent_id = None if body.parent_id is None else NodeId(body.parent_id)
    node = await session.add_message(
        user, ConversationId(conversation_id), parent_id, body.role, body.text, expected_version=expected_version
    )
    return node_view(node)


@router.post("/conversations/{conversation_id}/nodes/{node_id}/edit", status_code=201, response_model_exclude_none=True)
async def edit_message(
    *, user: Caller, session: Chats, conversation_id: str, node_id: str, body: Edit, expected_version: Version = None
) -> NodeView:
    """Put another version beside a message and show it; the original and what is below it stay."""
    node = await session.edit(
        user, ConversationId(conversation_id), NodeId(node_id), body.text, expected_version=expected_version
    )
    return node_view(node)


@router.post("/conversations/{conversation_id}/nodes/{node_id}/answer", status_code=201, response_model_exclude_none=True)
async def edit_and_answer(
    *, user: Caller, session: Chats, conversation_id: str, node_id: str, body: Answer, expected_version: Version = None
) -> RunCreated:
    """Put another version beside a user's message and have it answered."""
    return await session.edit_and_answer(
        user,
        ConversationId(conversation_id),
        NodeId(node_id),
        body.text,
        n=body.n,
        params=body.params,
        client_msg_id=body.client_msg_id,
        expected_version=expected_version,
    )


@router.post("/conversations/{conversation_id}/nodes/{node_id}/select", response_model_exclude_none=True)
async def select_message(
    *, user: Caller, session: Chats, conversation_id: str, node_id: str, expected_version: Version = None
) -> TreePatch:
    """Show the branch that holds a message."""
    return tree_patch(
        await session.select(user, ConversationId(conversation_id), NodeId(node_id), expected_version=expected_version)
    )


@router.delete("/conversations/{conversation_id}/nodes/{node_id}", response_model_exclude_none=True)
async def delete_message(
    *, user: Caller, session: Chats, conversation_id: str, node_id: str, expected_version: Version = None
) -> TreePatch:
    """Hide a message and all below it; `restore` undoes it."""
    return tree_patch(
        await session.delete_node(user, ConversationId(conversation_id), NodeId(node_id), expected_version=expected_version)
    )


@router.post("/conversations/{conversation_id}/nodes/{node_id}/restore", response_model_exclude_none=True)
async def restore_message(*, user: Caller, session: Chats, conversation_id: str, node_id: str) -> TreePatch:
    """Undo the deletion of a message."""
    return tree_patch(await session.restore_node(user, ConversationId(conversation_id), NodeId(node_id)))


# -- runs ----------------------------------------------------------------------------------------------------------------


@router.post("/runs", status_code=201, response_model_exclude_none=True)
async def create_run(*, user: Caller, session: Chats, body: RunBody, expected_version: Version = None) -> RunCreated:
    """Start a run; its text comes over the websocket, and is in the conversation."""
    return await session.create_run(user, body, expected_version=expected_version)


@router.post("/runs/{run_id}/cancel", status_code=204)
async def cancel_run(*, user: Caller, session: Chats, run_id: str, body: Cancel) -> None:
    """Stop a run, or one sample of it; its text stays."""
    await session.cancel_run(user, RunId(run_id), body.sample)


# -- search, tags, presets, memory ---------------------------------------------------------------------------------------


@router.get("/search")
async def search(*, user: Caller, session: Chats, q: str, conversation_id: str | None = None, limit: Limit = 20) -> HitList:
    """Find messages, in whatever branch they are."""
    where = None if conversation_id is None else ConversationId(conversation_id)
    hits = await session.store.search.aio(user, q, conversation_id=where, limit=limit)
    names = HitView.model_fields
    return HitList(hits=tuple(HitView(**{name: getattr(hit, name) for name in names}) for hit in hits))


@router.get("/tags")
async def list_tags(*, user: Caller, session: Chats) -> TagList:
    """List tags."""
    found = await session.store.list_tags.aio(user)
    return TagList(tags=tuple(TagView(name=name, num_conversations=count) for name, count in found))


@router.get("/presets")
async def list_presets(*, user: Caller, session: Chats) -> PresetList:
    """List presets."""
    return PresetList(presets=tuple(map(_preset_view, await session.store.list_presets.aio(user))))


@router.post("/presets", status_code=201)
async def create_preset(*, user: Caller, session: Chats, body: NewPreset) -> PresetView:
    """Make a preset."""
    return _preset_view(await session.create_preset(user, body.name, system_prompt=body.system_prompt, params=body.params))


@router.patch("/presets/{preset_id}")
async def update_preset(*, user: Caller, session: Chats, preset_id: str, body: PresetChange) -> PresetView:
    """Change a preset."""
    return _preset_view(
        await session.update_preset(
            user, PresetId(preset_id), name=body.name, system_prompt=body.system_prompt, params=body.params
        )
    )


@router.delete("/presets/{preset_id}")
async def delete_preset(*, user: Caller, session: Chats, preset_id: str) -> PresetView:
    """Remove a preset; its conversations stay."""
    return _preset_view(await session.delete_preset(user, PresetId(preset_id)))


@router.get("/kv", response_model_exclude_none=True)
async def get_kv(*, user: Caller, session: Chats) -> KvView:
    """Return the block map: totals, and per block its state and who holds it."""
    return await session.kv(user)


@router.get("/conversations/{conversation_id}/kv", response_model_exclude_none=True)
async def get_conversation_kv(*, user: Caller, session: Chats, conversation_id: str) -> ConversationKv:
    """Return the block map while the branches of a conversation are held, so that it shows what they share."""
    return await inspecting.conversation_kv(session, user, ConversationId(conversation_id))


def _preset_view(preset: Preset) -> PresetView:
    return PresetView(
        id=preset.id,
        name=preset.name,
        system_prompt=preset.system_prompt,
        params=dict(preset.params),
        created_at=preset.created_at,
        updated_at=preset.updated_at,
    )
