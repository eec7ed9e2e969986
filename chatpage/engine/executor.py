"""Runs the steps: plan, copies, model, sampling, and the ending of every sequence, however it ends.

Owns the live requests and everything that moves with them. Invariant: whatever ends a sequence (its last token, an abort, a
failed step), its blocks are given back in the same call, and its events say so.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import torch

from chatpage.engine.batch import BatchRow, build_batch
from chatpage.engine.block_pool import BlockPool
from chatpage.engine.detokenizer import Detokenizer
from chatpage.engine.kv_cache import KvCache
from chatpage.engine.kv_disk.disk import KvDisk
from chatpage.engine.models.loading import LoadedModel
from chatpage.engine.prefix_tree import PrefixTree, RootKey
from chatpage.engine.sample_stream import Ending, SampleStream
from chatpage.engine.sampler import InvalidLogitsError, SamplingState, sample
from chatpage.engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from chatpage.engine.sequence import Request, Sequence
from chatpage.engine.stats import StepCounters
from chatpage.engine.tip_cache import TipCache
from chatpage.errors import ChatpageError, ContextLengthError, EngineStepError
from chatpage.events import (
    Event,
    FinishReason,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestStarted,
    TokenDelta,
    TokenLogprob,
    Usage,
)


class Executor:
    """Carries requests from their first step to their last event.

    Args:
        max_model_len: Tokens after which a sequence ends with reason length.
        on_end: Called with each request that ended, whatever the reason.
        disk: Where KV outlives the process; None if it does not.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: KvCache,
        pool: BlockPool,
        tree: PrefixTree,
        *,
        max_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        kept_tips: int,
        on_end: Callable[[Request], None],
        disk: KvDisk | None = None,
    ) -> None:
        self._model = model
        self._runner = model.runner
        self._kv_cache = kv_cache
        self._pool = pool
        self._tree = tree
        self._max_model_len = max_model_len
        self._on_end = on_end
        self._disk = disk
        self._tips = TipCache(kept_tips)
        self.scheduler = Scheduler(
            pool,
            tree,
            max_batched_tokens=max_batched_tokens,
            max_num_seqs=max_num_seqs,
            has_tip=lambda sequence: self._tips.has(sequence.request.root, sequence.token_ids),
            loads=disk,
        )
        self.requests: dict[RequestId, Request] = {}
        self.counters = StepCounters()
        self._streams: dict[Sequence, SampleStream] = {}
        self._events: list[Event] = []

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        for sequence in request.sequences:
            self._open_stream(sequence)
        self.scheduler.add(request)
        if self._disk is not None:
            self._disk.add(request)

    def abort(self, request: Request, sample: int | None) -> None:
        """End one sample, or all of them, now; events follow in the next step."""
        for sequence in request.live_sequences:
            if sample in (None, sequence.sample):
                self._end(sequence, Ending(FinishReason.ABORT))
        self._close_if_finished(request)

    def has_tip(self, root: RootKey, token_ids: SequenceOf[int]) -> bool:
        """Whether the logits after exactly these tokens are kept."""
        return self._tips.has(root, token_ids)

    def clear_tips(self) -> None:
        self._tips.clear()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._events) or (self._disk is not None and self._disk.has_work)

    def step(self) -> list[Event]:
        """Compute one batch and return everything that happened since the last call, aborts included."""
        if self._disk is not None:
            num_spare = self._pool.num_available - self.scheduler.num_promised_blocks
            self._disk.advance(is_busy=bool(self.scheduler.running), num_spare=num_spare)
        plan = self.scheduler.schedule()
        self._announce(plan.admitted)
        for sequence in plan.starved:
            self._starve(sequence)
        if plan.scheduled or plan.ready:
            self._run(plan)
        elif self._disk is not None and not self._events:
            self._disk.wait()
        events, self._events = self._events, []
        return events

    def _run(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        sampling = [s.sequence for s in plan.scheduled if s.wants_logits] + list(plan.ready)
        try:
            logits = self._compute_logits(plan)
        except Exception as error:  # noqa: BLE001 - whatever a step dies of ends its requests, never the engine
            self.scheduler.release_copies(plan)
            affected = [s.sequence for s in plan.scheduled] + list(plan.ready)
            self._fail(dict.fromkeys(s.request for s in affected), error)
            return
        self.scheduler.complete(plan)
        num_generated = self._sample(sampling, logits) if sampling else 0
        seconds = time.perf_counter() - started
        self.counters.record_step(plan, num_generated, seconds)
        if self._disk is not None:
            self._disk.note_step(plan.num_tokens, seconds)

    def _compute_logits(self, plan: StepPlan) -> torch.Tensor:
        """Run copies and model; return `[num_sampling, vocab_size]` float32: scheduled rows first, then kept tips."""
        if plan.copies:
            self._kv_cache.copy(plan.copies)
        tips = [self._tips.get(sequence.request.root, sequence.token_ids) for sequence in plan.ready]
        if not plan.scheduled:
            return torch.stack(tips)
        batch = build_batch([_batch_row(s) for s in plan.scheduled], self._model.device)
        logits = self._runner.forward(batch, self._kv_cache)
        return torch.cat([logits, torch.stack(tips)]) if tips else logits

    def _sample(self, sampling: list[Sequence], logits: torch.Tensor) -> int:
        """Draw the next token of every branch of every row; return how many were drawn."""
        branches: list[Sequence] = []
        rows: list[int] = []
        for row, sequence in enumerate(sampling):
            if sequence.num_output_tokens == 0:
                self._tips.put(sequence.request.root, sequence.token_ids, logits[row])
            for branch in self._branches(sequence):
                branches.append(branch)
                rows.append(row)
        if not branches:
            return 0
        states = [self._streams[branch].sampling for branch in branches]
        failed: dict[Request, list[tuple[Sequence, InvalidLogitsError]]] = {}
        for branch, row, token in zip(
            branches, rows, sample(logits, states, self._runner.eos_token_ids, rows=rows), strict=True
        ):
            if isinstance(token, InvalidLogitsError):
                failed.setdefault(branch.request, []).append((branch, _invalid_logits(branch, logits[row], row)))
            else:
                self._append(branch, token)
        for request, samples in failed.items():
            self._fail_samples(request, samples)
        return len(branches)

    def _fail_samples(self, request: Request, samples: SequenceOf[tuple[Sequence, InvalidLogitsError]]) -> None:
        """End samples that got no token, and the request only if it has no other.

        If the model gave no numbers its KV may be none either, and is not used again; parameters that leave no token harm none.
        """
        if len(samples) == len(request.sequences):
            self._fail([request], samples[0][1])
        else:
            for sequence, error in samples:
                self._end(sequence, Ending(FinishReason.ERROR, detail=str(error)))
            self._close_if_finished(request)
        if any(error.is_of_model for _, error in samples):
            self._tree.forget(request.root)
            self._tips.forget(request.root)

    def _branches(self, sequence: Sequence) -> list[Sequence]:
        """The sequences that continue from this one's logits: itself, or all live samples when the prompt just ended."""
        request = sequence.request
        if request.prefill_only:
            for live in request.live_sequences:
                self.scheduler.finish(live)
            self._close_if_finished(request)
            return []
        if request.is_forked:
            return [sequence]
        self.scheduler.fork_samples(sequence)
        return request.live_sequences

    def _append(self, sequence: Sequence, token: TokenLogprob) -> None:
        delta, ending = self._streams[sequence].append(
            token, eos_token_ids=self._runner.eos_token_ids, max_model_len=self._max_model_len
        )
        self._events.append(delta)
        if ending is not None:
            self._end(sequence, ending, flush=False)
            self._close_if_finished(sequence.request)

    # -- endings ---------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, ending: Ending, *, flush: bool = True) -> None:
        """Finish one sequence, whatever its state, and say so; with `flush`, send the text that was held back."""
        stream = self._streams.pop(sequence)
        if flush and (text := stream.finish_text()):
            self._events.append(TokenDelta(sequence.request.id, sequence.sample, text, ()))
        self.scheduler.finish(sequence)
        self._events.append(stream.finished(ending))

    def _close_if_finished(self, request: Request) -> None:
        if request.live_sequences:
            return
        self._forget(request)
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=request.num_cached_tokens or 0,
            computed_prompt_tokens=request.num_computed_prompt_tokens,
            completion_tokens=request.num_completion_tokens,
            num_preemptions=request.num_preemptions,
        )
        self._events.append(RequestFinished(request.id, usage))

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End requests by an error; their blocks return at once."""
        code = error.code if isinstance(error, ChatpageError) else EngineStepError.code
        message = str(error) if isinstance(error, ChatpageError) else f"The step failed: {type(error).__name__}: {error}"
        for request in requests:
            for sequence in request.live_sequences:
                self.scheduler.finish(sequence)
            self._forget(request)
            self._events.append(RequestFailed(request.id, code, message))

    def _starve(self, sequence: Sequence) -> None:
        """A sequence that is alone and still finds no block: keep what it said, or refuse it with the numbers."""
        total, used = self._pool.num_blocks, self._pool.num_used
        detail = f"the KV cache is full: {used} of {total} blocks are held, pinned prefixes included"
        if sequence.num_output_tokens:
            self._end(sequence, Ending(FinishReason.LENGTH, detail=detail))
            self._close_if_finished(sequence.request)
            return
        needed = -(-(sequence.num_tokens + 1) // self._pool.block_size)
        problem = (
            f"The prompt of {sequence.num_tokens} tokens needs {needed} blocks, but {detail}. Unpin some, or raise --kv-memory."
        )
        self._fail([sequence.request], ContextLengthError(problem))

    def _forget(self, request: Request) -> None:
        for sequence in request.sequences:
            self._streams.pop(sequence, None)
        del self.requests[request.id]
        if self._disk is not None:
            self._disk.end(request)
        self._on_end(request)

    def _announce(self, admitted: SequenceOf[Sequence]) -> None:
        """Report requests that entered for the first time, with what they found in shared blocks."""
        for sequence in admitted:
            request = sequence.request
            if request.is_started:
                continue
            request.is_started = True
            cached = request.num_cached_tokens or 0
            self.counters.record_prompt(len(request.prompt_token_ids), cached)
            shared = -(-cached // self._pool.block_size)
            self._events.append(RequestStarted(request.id, len(request.prompt_token_ids), cached, shared, request.seed))

    def _open_stream(self, sequence: Sequence) -> None:
        request, params = sequence.request, sequence.request.params
        sampling = SamplingState(params, request.seed, sequence.sample, request.prompt_token_ids)
        detokenizer = Detokenizer(
            self._model.tokenizer, request.prompt_token_ids, stop=params.stop, min_tokens=params.min_tokens
        )
        self._streams[sequence] = SampleStream(sequence, sampling, detokenizer)


def _invalid_logits(branch: Sequence, logits: torch.Tensor, row: int) -> InvalidLogitsError:
    """Say at which token a sample got logits that no token can be chosen from, and why."""
    place = f"token {branch.num_output_tokens + 1} of the answer (position {branch.num_tokens})"
    if logits.amax().isfinite():  # before bias, penalties and what min_tokens rules out
        text = f"No token is left for {place}: min_tokens, the stop tokens and logit_bias rule out every one."
        return InvalidLogitsError(text, row, is_of_model=False)
    return InvalidLogitsError(
        f"The model gave logits that are not numbers (NaN or infinity) for {place}: it overflowed in this dtype "
        "(load it with --dtype float32), or its weights are damaged.",
        row,
    )


def _batch_row(scheduled: ScheduledSequence) -> BatchRow:
    sequence, start, stop = scheduled.sequence, scheduled.start, scheduled.start + scheduled.num_tokens
    assert sequence.table is not None
    return BatchRow(
        token_ids=sequence.token_ids[start:stop],
        start=start,
        block_ids=sequence.table.ids,
        slots=sequence.table.slot_mapping(start, stop),
        wants_logits=scheduled.wants_logits,
    )
