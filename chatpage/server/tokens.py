"""`/api`, token by token: the tokens of a reply, what could stand in their place, and the blocks that hold them.

Invariant: reading changes nothing, neither a conversation nor how long a block is kept; the mark on a message is the one
change.
"""

from typing import Annotated

from fastapi import APIRouter, Path, Query

from chatpage.sampling_params import MAX_LOGPROBS
from chatpage.server.bodies import Keep, KvLocations, KvPaths, TokenAlternatives, TokenView
from chatpage.server.protocol import TreePatch
from chatpage.server.rest import Caller, Chats
from chatpage.session import tokens
from chatpage.session.views import tree_patch
from chatpage.store import ConversationId, NodeId

router = APIRouter(prefix="/api", tags=["tokens"])
TokenIndex = Annotated[int, Path(ge=0, lt=2**31)]
NumAlternatives = Annotated[int, Query(ge=0, le=MAX_LOGPROBS)]


@router.get("/conversations/{conversation_id}/nodes/{node_id}/tokens")
async def get_tokens(*, user: Caller, session: Chats, conversation_id: str, node_id: str) -> TokenView:
    """Return where in the text of a reply its tokens lie, such as to fork inside it."""
    return await tokens.reply_tokens(session, user, ConversationId(conversation_id), NodeId(node_id))


@router.get("/conversations/{conversation_id}/nodes/{node_id}/tokens/{token_index}/alternatives")
async def get_alternatives(
    *, user: Caller, session: Chats, conversation_id: str, node_id: str, token_index: TokenIndex, k: NumAlternatives = 10
) -> TokenAlternatives:
    """Return what the model would have said in place of a token; the prompt is normally in the KV cache."""
    return await tokens.token_alternatives(
        session, user, ConversationId(conversation_id), NodeId(node_id), token_index, num_alternatives=k
    )


@router.post("/conversations/{conversation_id}/kv")
async def locate(*, user: Caller, session: Chats, conversation_id: str, body: KvPaths) -> KvLocations:
    """Return which blocks hold the paths to some messages now."""
    leaf_ids = [NodeId(leaf_id) for leaf_id in body.leaf_ids]
    return await tokens.locate(session, user, ConversationId(conversation_id), leaf_ids)


@router.post("/conversations/{conversation_id}/nodes/{node_id}/keep", response_model_exclude_none=True)
async def keep_message(*, user: Caller, session: Chats, conversation_id: str, node_id: str, body: Keep) -> TreePatch:
    """Mark a message to be kept, or take the mark away."""
    return tree_patch(await session.keep(user, ConversationId(conversation_id), NodeId(node_id), is_kept=body.keep))
