"""Looking into a conversation: what its branches hold in the KV cache.

Invariant: nothing is changed, and nothing is computed by the model; what is held for a moment is let go of.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from chatpage.errors import ChatpageError, InvalidRequestError
from chatpage.server.bodies import ConversationKv
from chatpage.session.prompts import Target
from chatpage.store.records import ConversationId, Node, Role, UserId

if TYPE_CHECKING:
    from chatpage.engine.core import PinId
    from chatpage.session.session import Session

MAX_BRANCHES = 64  # the latest; each is rendered and held


async def conversation_kv(session: "Session", user_id: UserId, conversation_id: ConversationId) -> ConversationKv:
    """Return the block map while every branch of a conversation is held as far as it is cached.

    Raises:
        NotFoundError: No such conversation.
    """
    tree = (await session.store.get_tree.aio(user_id, conversation_id)).tree
    leaves = [node for node in tree.in_order() if not tree.children.get(node.id)][-MAX_BRANCHES:]
    branches = []
    for leaf in leaves:
        with contextlib.suppress(ChatpageError):  # a branch that makes no prompt holds nothing
            path = await session.store.get_path.aio(user_id, conversation_id, leaf_id=leaf.id)
            branches.append(await _token_ids(session, path))
    async with _holding(session, user_id, branches) as num_held:
        view = await session.kv(user_id)
    return ConversationKv(stats=view.stats, blocks=view.blocks, num_branches=num_held)


async def _token_ids(session: "Session", path: Sequence[Node]) -> Sequence[int]:
    """Return the tokens of a path; a reply at its end counts without what the template puts behind it."""
    last = path[-1]
    target = Target(tuple(path), last.id)
    rendered = await session.prompts.render(target, None, {}, add_generation_prompt=False)
    is_reply = last.role is Role.ASSISTANT
    return rendered.prompt.token_ids[: rendered.prompt.spans[-1][1]] if is_reply else rendered.prompt.token_ids


@contextlib.asynccontextmanager
async def _holding(session: "Session", user_id: UserId, branches: Sequence[Sequence[int]]) -> AsyncIterator[int]:
    pins: list[PinId] = []
    try:
        for token_ids in branches:
            found = await session.engine.prefix_blocks(token_ids, cache_salt=user_id)
            if found.num_tokens:
                with contextlib.suppress(InvalidRequestError):  # evicted just now
                    pins.append(await session.engine.pin(token_ids[: found.num_tokens], cache_salt=user_id))
        yield len(pins)
    finally:
        for pin in pins:
            await session.engine.unpin(pin)
