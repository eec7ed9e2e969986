"""Replies as tokens: where each lies in the text, what the model would have said in its place, and which blocks hold it.

Invariant: nothing is changed. The one thing that is computed is the place that alternatives are asked for, whose prompt is
what the reply itself went on from, so normally no more than one token of it is not in the KV cache.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from chatpage.engine.stats import PrefixBlocks
from chatpage.errors import EngineStepError, InvalidParameterError, InvalidRequestError
from chatpage.events import RequestFailed, RequestFinished, TokenDelta, TokenLogprob, Usage
from chatpage.sampling_params import MAX_LOGPROBS, SamplingParams, TokenBias
from chatpage.server.bodies import (
    KvLocations,
    MessageSpan,
    PathLocation,
    TokenAlternatives,
    TokenChoice,
    TokenSpan,
    TokenUsage,
    TokenView,
)
from chatpage.session.paths import overlay
from chatpage.session.prompts import Rendered, ReplyTokens, Target
from chatpage.store.records import ConversationId, Node, NodeId, Role, UserId

if TYPE_CHECKING:
    from chatpage.session.session import Session

FORCED = 100.0  # added to a logit, beyond what any model gives one


async def reply_tokens(session: "Session", user_id: UserId, conversation_id: ConversationId, node_id: NodeId) -> TokenView:
    """Return where in the text of a reply its tokens lie.

    Raises:
        NotFoundError: No such message.
        InvalidRequestError: It is no reply, or the template refuses the conversation.
    """
    path = await _path(session, user_id, conversation_id, node_id)
    found = await session.prompts.reply_tokens(path)
    return TokenView(tokens=_spans(path[-1].text, found, session.prompts.is_special), ends=found.ends)


async def token_alternatives(
    session: "Session",
    user_id: UserId,
    conversation_id: ConversationId,
    node_id: NodeId,
    token_index: int,
    *,
    num_alternatives: int,
) -> TokenAlternatives:
    """Return what the model thought of a token of a reply, and of others in its place, before temperature and filters.

    Raises:
        NotFoundError: No such message.
        InvalidRequestError: It is no reply, or the template refuses the conversation.
        InvalidParameterError: It has fewer tokens.
        OverloadedError: The user has too much going on.
        EngineDeadError: The engine is gone.
    """
    path = await _path(session, user_id, conversation_id, node_id)
    found = await session.prompts.reply_tokens(path, path[-1].params.get("template_variables", {}))
    if not 0 <= token_index < len(found.token_ids):
        raise InvalidParameterError(f"The reply has the tokens 0 to {len(found.token_ids) - 1}, not {token_index}.")
    before, chosen_id = (*found.before, *found.token_ids[:token_index]), found.token_ids[token_index]
    ticket = session.admission.enter(user_id)
    try:
        await ticket.wait()
        token, usage = await _ask(session, user_id, before, chosen_id)
    finally:
        ticket.leave()
    likeliest = token.alternatives[:num_alternatives]
    chosen_text, *texts = await session.prompts.token_texts([chosen_id, *(token_id for token_id, _ in likeliest)], before)
    logprob = token.logprob if token.token_id == chosen_id else dict(token.alternatives).get(chosen_id)
    return TokenAlternatives(
        token_index=token_index,
        chosen=TokenChoice(token_id=chosen_id, text=chosen_text, logprob=logprob),
        alternatives=tuple(
            TokenChoice(token_id=token_id, text=text, logprob=value)
            for (token_id, value), text in zip(likeliest, texts, strict=True)
        ),
        usage=TokenUsage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens),
    )


async def locate(
    session: "Session", user_id: UserId, conversation_id: ConversationId, leaf_ids: Sequence[NodeId]
) -> KvLocations:
    """Return which blocks hold the paths to some messages now, and which tokens of a path belong to which message.

    A path that makes no prompt, such as one that is too long, is held nowhere.

    Raises:
        NotFoundError: No such conversation or message.
        EngineDeadError: The engine is gone.
    """
    paths = [await _locate(session, user_id, conversation_id, leaf_id) for leaf_id in leaf_ids]
    return KvLocations(block_size=session.engine.info.block_size, paths=tuple(paths))


async def _locate(session: "Session", user_id: UserId, conversation_id: ConversationId, leaf_id: NodeId) -> PathLocation:
    path = await _path(session, user_id, conversation_id, leaf_id)
    try:
        rendered = await _render(session, path)
    except InvalidRequestError:
        return PathLocation(leaf_id=leaf_id, num_tokens=0, num_cached=0, block_ids=(), nodes=())
    # A reply counts up to its own end: what the template puts behind it is computed with the next message.
    is_reply = path[-1].role is Role.ASSISTANT
    token_ids = rendered.prompt.token_ids[: rendered.prompt.spans[-1][1] if is_reply else None]
    found = await session.engine.prefix_blocks(token_ids, cache_salt=user_id) if token_ids else PrefixBlocks((), 0)
    spans = zip(path, rendered.prompt.spans, strict=True)
    return PathLocation(
        leaf_id=leaf_id,
        num_tokens=len(token_ids),
        num_cached=found.num_tokens,
        block_ids=found.block_ids,
        nodes=tuple(MessageSpan(node_id=node.id, start=start, end=end) for node, (start, end) in spans),
    )


async def _render(session: "Session", path: Sequence[Node]) -> Rendered:
    variables = path[-1].params.get("template_variables", {})
    return await session.prompts.render(Target(tuple(path), path[-1].id), None, variables, add_generation_prompt=False)


async def _path(session: "Session", user_id: UserId, conversation_id: ConversationId, node_id: NodeId) -> tuple[Node, ...]:
    before = session.live_samples()  # a sample that is stored meanwhile is in neither of the two otherwise
    path = await session.store.get_path.aio(user_id, conversation_id, leaf_id=node_id)
    live = before | session.live_samples()
    return tuple(overlay(node, live) for node in path)


async def _ask(session: "Session", user_id: UserId, before: Sequence[int], chosen_id: int) -> tuple[TokenLogprob, Usage]:
    """Have the model go on with a token, which is made certain, so that its probability is told even if it is small."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=MAX_LOGPROBS, logit_bias=TokenBias({chosen_id: FORCED})
    )
    request_id = await session.engine.add_request(before, params, cache_salt=user_id)
    token: TokenLogprob | None = None
    async with contextlib.aclosing(session.engine.stream(request_id)) as events:
        async for event in events:
            match event:
                case TokenDelta(logprobs=(first, *_)):
                    token = first
                case RequestFailed():
                    raise EngineStepError(event.message)
                case RequestFinished() if token is not None:
                    return token, event.usage
    raise EngineStepError("The engine ended a request for one token without one.")


def _spans(text: str, found: ReplyTokens, is_special: Callable[[int], bool]) -> tuple[TokenSpan, ...]:
    """Return the places of tokens in UTF-16 code units. Tokens that are parts of one character all have its place.

    tokens   Hi | E2 82 | AC |  !
    ends     2  | 2     | 3  |  4       places   [0, 2) [2, 3) [2, 3) [3, 4)
    """
    units = _units(text)
    # A stop string that was cut from the text has tokens, too.
    ends = [min(end, len(text)) for end in found.ends]
    spans: list[TokenSpan] = []
    whole = len(text)  # where the character ends that the token after this one belongs to
    for index in reversed(range(len(ends))):
        token_id, start, end = found.token_ids[index], ends[index - 1] if index else 0, ends[index]
        if end > start:
            whole = end
        elif not is_special(token_id):
            end = whole
        spans.append(TokenSpan(id=token_id, text=text[start:end], start=units[start], end=units[end]))
    return tuple(reversed(spans))


def _units(text: str) -> list[int]:
    """Return where each character begins in UTF-16, and where the text ends."""
    units = [0]
    for char in text:
        units.append(units[-1] + (2 if char > "\uffff" else 1))
    return units
