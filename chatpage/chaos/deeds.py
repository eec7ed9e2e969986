"""The things that users do, each on one of their conversations.

Invariant: a deed names what it does in the journal before it does it, and tells the ledger what may come of it.
"""

import asyncio
import json
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from chatpage.chaos.findings import Finding
from chatpage.chaos.ledger import Key
from chatpage.chaos.user import User
from chatpage.server.protocol import ResetOp
from chatpage.server.views import NodeView, RunParams, RunRequest
from chatpage.store import EXPORT_FORMATS, FILE_SUFFIXES, IMPORT_FORMATS, NodeStatus, Role, RunKind

WORDS = (
    "tell",
    "me",
    "about",
    "rivers",
    "that",
    "forget",
    "their",
    "way",
    "and",
    "count",
    "stones",
    "until",
    "evening",
    "comes",
)
MAX_CONVERSATIONS, MAX_NODES = 12, 60
SHORT, LONG = 48, 400  # tokens of a reply
Deed = Callable[[User, ResetOp], Awaitable[None]]


async def act(user: User) -> None:
    """Do one random thing."""
    chance = user.chance
    if user.left and chance.random() < 0.3:
        left = user.left.pop(chance.randrange(len(user.left)))
        async with user.attempt(f"resume {left.created.run_id} after {left.seq}"):
            await user.resume(left)
        return
    if not user.conversations or (len(user.conversations) < MAX_CONVERSATIONS and chance.random() < 0.15):
        await make(user)
        return
    name = chance.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
    conversation_id = chance.choice(user.conversations)
    async with user.attempt(f"{name} in {conversation_id}"):
        key: Key = ("deleted", conversation_id)
        if user.ledger.compare_value(key, True) is None:  # the answer to a deletion or its undoing was lost
            with user.ledger.changing(key, False):
                await user.client.restore_conversation(conversation_id)
        tree = await user.read(conversation_id)
        if len(tree.nodes) >= MAX_NODES:
            user.conversations.remove(conversation_id)
        await _DEEDS[name](user, tree)


async def make(user: User) -> None:
    """Make a conversation."""
    title = f"{user.ledger.marker} {secrets.token_hex(3)}"
    prompt = f"{user.ledger.marker} Answer briefly." if user.chance.random() < 0.3 else None
    async with user.attempt(f"make a conversation {title!r}"):
        made = await user.client.create_conversation(title=title, system_prompt=prompt, tags=["new"])
        _adopt(user, made.id, title, ("new",))


def _adopt(user: User, conversation_id: str, title: str, tags: Sequence[str]) -> None:
    user.conversations.append(conversation_id)
    user.ledger.knows(("title", conversation_id), title)
    user.ledger.knows(("tags", conversation_id), tuple(tags))
    user.ledger.knows(("deleted", conversation_id), False)


# -- runs ----------------------------------------------------------------------------------------------------------------


async def send(user: User, tree: ResetOp) -> None:
    parent = _pick(user, tree, Role.ASSISTANT)
    await _run(user, RunRequest(**_common(user, tree), kind=RunKind.REPLY, parent_id=_id(parent), input=_words(user)))


async def regenerate(user: User, tree: ResetOp) -> None:
    if node := _pick(user, tree, Role.ASSISTANT):
        await _run(user, RunRequest(**_common(user, tree, most=6), kind=RunKind.REGENERATE, parent_id=node.id))


async def continue_(user: User, tree: ResetOp) -> None:
    if node := _pick(user, tree, Role.ASSISTANT):
        request = RunRequest(**_common(user, tree, most=1), kind=RunKind.CONTINUE, parent_id=node.id)
        if node.status in (NodeStatus.INTERRUPTED, NodeStatus.ABORTED):
            user.around.counts["cut replies continued"] += 1
        await _run(user, request)


async def fork_at_token(user: User, tree: ResetOp) -> None:
    if node := _pick(user, tree, Role.ASSISTANT):
        kept = user.chance.randrange(node.num_tokens + 1)
        request = RunRequest(**_common(user, tree), kind=RunKind.FORK, parent_id=node.id, branch_at_token=kept)
        await _run(user, request)


async def _run(user: User, request: RunRequest) -> None:
    way = user.chance.random()
    moment = user.chance.randrange(1, 6)
    if way < 0.6:
        await user.hear(request)
    elif way < 0.75:
        await user.hear(request, stop_after=moment)
    else:
        await user.hear(request, leave_after=moment)
        if way < 0.9 and user.left:
            await asyncio.sleep(user.chance.random())
            await user.resume(user.left.pop())


def _common(user: User, tree: ResetOp, most: int = 3) -> dict[str, Any]:
    longest = user.chance.choices([SHORT, LONG], weights=[5, 1])[0]
    params = RunParams(max_tokens=user.chance.randrange(1, longest), ignore_eos=user.chance.random() < 0.8)
    n = user.chance.choice([1, 1, user.chance.randrange(1, most + 1)])
    return {"conversation_id": tree.conversation.id, "n": n, "params": params}


def _words(user: User) -> str:
    return " ".join([user.ledger.marker, *user.chance.choices(WORDS, k=user.chance.randrange(2, 40))])


def _pick(user: User, tree: ResetOp, role: Role) -> NodeView | None:
    nodes = [node for node in tree.nodes if node.role is role and node.status is not NodeStatus.STREAMING]
    return user.chance.choice(nodes) if nodes else None


def _id(node: NodeView | None) -> str | None:
    return None if node is None else node.id


# -- changes -------------------------------------------------------------------------------------------------------------


async def edit(user: User, tree: ResetOp) -> None:
    if node := _pick(user, tree, user.chance.choice([Role.USER, Role.ASSISTANT])):
        text = _words(user)
        made = await user.client.edit(tree.conversation.id, node.id, text)
        user.ledger.said(tree.conversation.id, made.id, text)


async def edit_and_answer(user: User, tree: ResetOp) -> None:
    if node := _pick(user, tree, Role.USER):
        request = RunRequest(**_common(user, tree), kind=RunKind.REPLY, parent_id=node.parent_id, input=_words(user))
        await _run(user, request)


async def select(user: User, tree: ResetOp) -> None:
    if tree.nodes:
        await user.client.select(tree.conversation.id, user.chance.choice(tree.nodes).id)


async def delete_message(user: User, tree: ResetOp) -> None:
    if not tree.nodes:
        return
    conversation_id, node_id = tree.conversation.id, user.chance.choice(tree.nodes).id
    key: Key = ("hidden", conversation_id, node_id)
    user.ledger.knows(key, False)
    with user.ledger.changing(key, True):
        await user.client.delete_node(conversation_id, node_id)
    if user.chance.random() < 0.8:
        with user.ledger.changing(key, False):
            await user.client.restore_node(conversation_id, node_id)


async def delete_conversation(user: User, tree: ResetOp) -> None:
    key: Key = ("deleted", tree.conversation.id)
    with user.ledger.changing(key, True):
        await user.client.delete_conversation(tree.conversation.id)
    if user.chance.random() < 0.8:
        with user.ledger.changing(key, False):
            await user.client.restore_conversation(tree.conversation.id)
    else:
        user.conversations.remove(tree.conversation.id)


async def fork_conversation(user: User, tree: ResetOp) -> None:
    node_id = user.chance.choice(tree.nodes).id if tree.nodes else None
    title = f"{user.ledger.marker} fork"
    made = await user.client.fork_conversation(tree.conversation.id, node_id=node_id, title=title)
    _adopt(user, made.id, title, sorted(made.tags))


async def rename(user: User, tree: ResetOp) -> None:
    title = f"{user.ledger.marker} {secrets.token_hex(3)}"
    tags = tuple(sorted(user.chance.sample(["one", "two", "three", "four"], 2)))
    conversation_id = tree.conversation.id
    with user.ledger.changing(("title", conversation_id), title), user.ledger.changing(("tags", conversation_id), tags):
        await user.client.update_conversation(conversation_id, title=title, tags=tags)


# -- looking -------------------------------------------------------------------------------------------------------------


async def search(user: User, tree: ResetOp) -> None:
    said = any(node.role is Role.USER for node in tree.nodes)
    hits = await user.client.search(user.ledger.marker, conversation_id=tree.conversation.id)
    if said and not hits:
        text = f"a search for {user.ledger.marker} finds nothing in {tree.conversation.id}, where it stands"
        user.around.findings.add(Finding("search", user.who, text))
    for hit in hits:
        user.no_foreign(f"{hit.title} {hit.snippet}", f"the search hit {hit.node_id}")
    other = user.chance.choice(list(user.around.ledgers.values()))
    if other is not user.ledger and (found := await user.client.search(other.marker)):
        text = f"a search finds what {other.who} said: {found[0].snippet!r}"
        user.around.findings.add(Finding("foreign text", user.who, text))


async def move(user: User, tree: ResetOp) -> None:
    """Export a conversation, look at what came, and import it again."""
    format = user.chance.choice(EXPORT_FORMATS)
    with tempfile.TemporaryDirectory(prefix="chatpage-chaos-") as folder:
        path = Path(folder) / f"file{FILE_SUFFIXES[format]}"
        await user.client.export(path, format=format, ids=[tree.conversation.id])
        text = path.read_text()
        user.no_foreign(text, f"an export as {format}")
        if format == "chatpage":
            _compare_export(user, tree, text)
        if format in IMPORT_FORMATS and tree.nodes:
            result = await user.client.import_file(path, format=format)
            user.around.counts["conversations imported"] += result.num_added


def _compare_export(user: User, tree: ResetOp, text: str) -> None:
    strings: set[str] = set()
    stack = [json.loads(text)]
    while stack:
        match stack.pop():
            case str(value):
                strings.add(value)
            case list(items):
                stack.extend(items)
            case dict(fields):
                stack.extend(fields.values())
    for node in tree.nodes:
        if node.status is not NodeStatus.STREAMING and node.text not in strings:
            finding = Finding("text lost", user.who, f"message {node.id} is not in an export: {node.text[:200]!r}")
            user.around.findings.add(finding)


async def probe(user: User, tree: ResetOp) -> None:
    """Ask what the words of another user would cost: no more of them is cached than of words that nobody said.

    The latter is asked before and after: a server that starts again in between has forgotten what this user said, too.
    """
    ledger = user.chance.choice(list(user.around.ledgers.values()))
    said = [told.text for told in ledger.messages.values() if told.text.startswith(ledger.marker) and len(told.text) > 80]
    if ledger is user.ledger or not said:
        return
    words = user.chance.choice(said)
    unsaid = secrets.token_hex(len(ledger.marker) // 2) + words[len(ledger.marker) :]
    costs = []
    for text in (unsaid, words, unsaid):
        request = RunRequest(conversation_id=tree.conversation.id, kind=RunKind.REPLY, input=text)
        costs.append((await user.client.plan(request)).prefix.cached)
    before, foreign, after = costs
    if foreign > max(before, after) + len(ledger.marker):
        text = f"{foreign} tokens of what {ledger.who} said are cached for {user.who}, {max(before, after)} of what nobody said"
        user.around.findings.add(Finding("foreign cache", user.who, text))


_WEIGHTS: dict[str, float] = {
    **{"send": 6, "regenerate": 3, "continue": 3, "fork-token": 2, "edit-answer": 2, "edit": 1, "select": 1},
    **{
        "delete-message": 1,
        "delete-conversation": 0.7,
        "fork-conversation": 0.7,
        "rename": 1,
        "search": 1,
        "move": 1,
        "probe": 0.7,
    },
}
_DEEDS: dict[str, Deed] = {
    **{"send": send, "regenerate": regenerate, "continue": continue_, "fork-token": fork_at_token},
    **{"edit-answer": edit_and_answer, "edit": edit, "select": select, "delete-message": delete_message},
    **{"delete-conversation": delete_conversation, "fork-conversation": fork_conversation, "rename": rename},
    **{"search": search, "move": move, "probe": probe},
}
