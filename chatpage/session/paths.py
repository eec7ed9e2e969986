"""What stands on a path right now: the store's word, with the text of running samples laid over it.

Invariant: a reader of a node that is being written sees at least what the store has, never less.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from chatpage.errors import NotFoundError
from chatpage.events import FinishReason
from chatpage.runs import SampleLog
from chatpage.server.protocol import RunDone, RunMessage, RunSnapshot
from chatpage.server.views import ErrorView, SampleView, UsageView
from chatpage.store import Store
from chatpage.store.records import NewNode, Node, NodeId, NodeStatus, Run, RunId, RunStatus, Sample, UserId, pack_tokens

_ENDED = {  # of samples that ended and that the store refuses to take for now
    FinishReason.STOP: NodeStatus.COMPLETE,
    FinishReason.LENGTH: NodeStatus.COMPLETE,
    FinishReason.ABORT: NodeStatus.ABORTED,
    FinishReason.ERROR: NodeStatus.ERROR,
}


def overlay(node: Node, live: Mapping[NodeId, SampleLog]) -> Node:
    """Return the node with what its sample said up to now; a node that no run writes into stays as it is."""
    log = live.get(node.id)
    if log is None:
        return node
    token_ids = (*log.prefix_token_ids, *log.token_ids)
    written = replace(node, text=log.text, token_bytes=pack_tokens(token_ids))
    if log.unsaved is None or log.done is None:
        return written
    return replace(written, status=_ENDED[FinishReason(log.done.finish_reason)], finish_reason=log.done.finish_reason)


def unsaved(new: NewNode) -> Node:
    """Return a message as if it were stored already, to render it before it is."""
    tokens = pack_tokens(new.token_ids)
    return Node(NodeId(""), None, new.role, new.text, tokens, new.status, created_at=0, model=new.model)


async def stored_messages(store: Store, user_id: UserId, run_id: RunId, seq: int) -> list[RunMessage]:
    """Return what a late reader of a run gets: a snapshot from its nodes, and its end.

    Args:
        store: Knows the run.
        user_id: Whose run it is.
        run_id: The run.
        seq: The last event that the reader has; numbers go on from there, since the store keeps none.

    Raises:
        NotFoundError: No such run, or its conversation was deleted.
    """
    run = await store.get_run.aio(user_id, run_id)
    await store.get_conversation.aio(user_id, run.conversation_id)
    samples = [await _stored_sample(store, run, sample) for sample in run.samples]
    snapshot = RunSnapshot(run_id=run_id, seq=seq, samples=tuple(samples))
    if run.status is RunStatus.RUNNING:  # another process drives it
        return [snapshot]
    error = None
    if run.error_code is not None:
        error = ErrorView(code=run.error_code, message=run.error_message or "")
    return [snapshot, RunDone(run_id=run_id, seq=seq + 1, status=run.status, usage=_usage(run.usage), error=error)]


async def _stored_sample(store: Store, run: Run, sample: Sample) -> SampleView:
    try:
        node = await store.get_node.aio(run.user_id, run.conversation_id, sample.node_id)
    except NotFoundError:  # it failed before it said anything
        return SampleView(sample=sample.sample, node_id=sample.node_id, text="", num_tokens=0, finish_reason="error")
    return SampleView(
        sample=sample.sample,
        node_id=node.id,
        text=node.text,
        num_tokens=max(0, node.num_tokens - sample.num_prefix_tokens),
        num_prefix_tokens=sample.num_prefix_tokens,
        finish_reason=node.finish_reason,
        ttft_ms=node.timing.get("ttft_ms"),
        tok_s=node.timing.get("tok_s"),
        sum_logprob=sample.sum_logprob,
        usage=_usage(node.usage),
    )


def _usage(stored: Mapping[str, Any]) -> UsageView | None:
    return UsageView(**stored) if stored else None
