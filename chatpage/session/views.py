"""From records of the store to what goes over the wire.

Invariant: nothing is looked up here; a view says what its record says.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from chatpage.engine.accounting import BlockInfo
from chatpage.engine.stats import EngineStats, PrefixCost
from chatpage.prompt import PrefixBreak
from chatpage.runs import RunLog
from chatpage.server.protocol import (
    ChooseOp,
    ConversationOp,
    NodeOp,
    RemoveOp,
    ResetOp,
    RunCreated,
    TreeOp,
    TreePatch,
)
from chatpage.server.views import BlockView, BreakView, ChoiceView, ConversationView, HolderView, KvStats, NodeView, PrefixView
from chatpage.store.records import Conversation, Node, NodeId, Run, RunId, TreeChange
from chatpage.store.tree import Tree

WARM_PREFIX = "warm-"  # of the request ids of a warming


def node_view(node: Node) -> NodeView:
    return NodeView(
        id=node.id,
        parent_id=node.parent_id,
        role=node.role,
        text=node.text,
        status=node.status,
        created_at=node.created_at,
        num_tokens=node.num_tokens,
        finish_reason=node.finish_reason,
        model=node.model,
        params=dict(node.params),
        usage=dict(node.usage),
        timing=dict(node.timing),
        extra=dict(node.extra),
        detail=node.detail,
        is_kept=node.is_kept,
    )


def conversation_view(conversation: Conversation) -> ConversationView:
    return ConversationView(
        id=conversation.id,
        title=conversation.title,
        version=conversation.version,
        created_at=conversation.created_at,
        updated_at=conversation.updated_at,
        is_pinned=conversation.is_pinned,
        tags=conversation.tags,
        params=dict(conversation.params),
        preset_id=conversation.preset_id,
        forked_from=conversation.forked_from,
        source=conversation.source,
        is_deleted=conversation.deleted_at is not None,
    )


def tree_patch(change: TreeChange, hidden: Iterable[NodeId] = ()) -> TreePatch:
    """Return the patch of a change; nodes that are `hidden` in this conversation must not come back through it."""
    gone = set(hidden)
    ops: list[TreeOp] = [NodeOp(node=node_view(node)) for node in change.nodes if node.id not in gone]
    if change.removed:
        ops.append(RemoveOp(node_ids=change.removed))
    ops += [ChooseOp(parent_id=parent, child_id=child) for parent, child in change.choices.items()]
    if not change.nodes and not change.removed and not change.choices:
        ops.append(ConversationOp(conversation=conversation_view(change.conversation)))
    return TreePatch(conversation_id=change.conversation.id, version=change.conversation.version, ops=tuple(ops))


def whole_tree(conversation: Conversation, tree: Tree[Node]) -> TreePatch:
    """Return a patch that replaces whatever a reader has of the conversation; parents are those that count."""
    nodes = (node_view(node).model_copy(update={"parent_id": tree.parents[node.id]}) for node in tree.in_order())
    choices = (ChoiceView(parent_id=parent, child_id=child) for parent, child in tree.choices.items() if child in tree.nodes)
    reset = ResetOp(conversation=conversation_view(conversation), nodes=tuple(nodes), choices=tuple(choices))
    return TreePatch(conversation_id=conversation.id, version=conversation.version, ops=(reset,))


def run_created(run: Run, *, prefix: PrefixView | None = None, prefix_break: BreakView | None = None) -> RunCreated:
    return RunCreated(
        run_id=run.id,
        conversation_id=run.conversation_id,
        kind=run.kind,
        parent_id=run.parent_id,
        input_node_id=run.input_node_id,
        node_ids=tuple(sample.node_id for sample in run.samples),
        client_msg_id=run.client_msg_id,
        seed=run.params.get("seed"),
        prefix=prefix,
        prefix_break=prefix_break,
    )


def prefix_view(cost: PrefixCost) -> PrefixView:
    return PrefixView(
        tokens=cost.prompt_tokens,
        cached=cost.cached_tokens,
        computed=cost.tokens_to_compute,
        blocks_shared=cost.blocks_shared,
    )


def break_view(found: PrefixBreak | None) -> BreakView | None:
    if found is None:
        return None
    return BreakView(
        token_index=found.token_index,
        message_index=found.message_index,
        reason=found.reason,
        num_tokens_lost=max(0, found.num_tokens_lost),
    )


def kv_stats(stats: EngineStats) -> KvStats:
    memory = stats.memory
    numbers: dict[str, Any] = {}
    for name in KvStats.model_fields:
        if name != "type":
            numbers[name] = getattr(stats if hasattr(stats, name) else memory, name)
    return KvStats(**numbers)


def block_views(blocks: Iterable[BlockInfo], own: Mapping[RunId, RunLog]) -> tuple[BlockView, ...]:
    """Return the block map; holders that are samples of `own` runs are named, others are not."""
    return tuple(
        BlockView(
            id=block.block_id,
            state=block.state.name.lower(),
            ref_count=block.ref_count,
            num_rows=block.num_rows,
            holders=tuple(_holder(name, own) for name in block.holders),
        )
        for block in blocks
    )


def _holder(name: str, own: Mapping[RunId, RunLog]) -> HolderView:
    """Read the engine's name of a table: `request/sample` or `pin/number`."""
    request_id, _, index = name.rpartition("/")
    log = own.get(RunId(request_id))
    if log is None:
        kind: Literal["warm", "pin", "other"] = "pin" if request_id == "pin" else "other"
        return HolderView(kind="warm" if request_id.startswith(WARM_PREFIX) else kind)
    sample = log.samples[int(index)]
    return HolderView(
        kind="sample",
        conversation_id=log.conversation_id,
        node_id=sample.node_id,
        run_id=log.run_id,
        sample=sample.sample,
    )
