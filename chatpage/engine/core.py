"""The engine: requests of token ids in, events out, one step at a time.

Owns the model, the KV cache and the block memory, and checks everything that enters. Synchronous, and used by one thread
only; programs with an event loop use `AsyncEngine`. Invariant: a request that was accepted can be served to its end.

    engine = Engine.load(EngineConfig.load())
    request_id = engine.add_request(token_ids, SamplingParams(n=8, max_tokens=64))
    for event in engine.stream(request_id):
        ...
"""

import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NewType

from chatpage.config import EngineConfig
from chatpage.engine.accounting import (
    BlockInfo,
    MemoryReport,
    block_map,
    check_integrity,
    memory_report,
    num_freeable_blocks,
)
from chatpage.engine.block_pool import BlockPool
from chatpage.engine.block_table import BlockTable
from chatpage.engine.executor import Executor
from chatpage.engine.kv_cache import KvCache
from chatpage.engine.kv_disk.disk import SAVE_S, open_kv_disk
from chatpage.engine.models.loading import LoadedModel, load_model
from chatpage.engine.prefix_tree import PrefixTree, RootKey
from chatpage.engine.sequence import Request
from chatpage.engine.stats import EngineInfo, EngineStats, PrefixBlocks, PrefixCost
from chatpage.errors import ContextLengthError, InvalidParameterError, InvalidRequestError, UnknownRequestError
from chatpage.events import Event, RequestFailed, RequestFinished, RequestId
from chatpage.sampling_params import MAX_SEED, SamplingParams

PinId = NewType("PinId", int)
_KEPT_ENDED_REQUESTS = 1024


class Engine:
    """Runs many requests at once on one model over shared, copy-on-write KV blocks."""

    def __init__(self, config: EngineConfig, model: LoadedModel) -> None:
        """Use `Engine.load` unless the model is already loaded."""
        self.config = config
        self.model = model
        self.tokenizer = model.tokenizer
        self._runner = model.runner
        self._kv_cache = KvCache.for_model(model, config)
        self._pool = BlockPool(self._kv_cache.num_blocks, config.block_size)
        self._tree = PrefixTree(self._pool)
        self._disk = open_kv_disk(config, self._kv_cache, self._pool, self._tree)
        self.max_model_len = min(
            self._runner.max_model_len, config.max_model_len or self._runner.max_model_len, self._num_pool_tokens
        )
        self._executor = Executor(
            model,
            self._kv_cache,
            self._pool,
            self._tree,
            max_batched_tokens=config.max_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.max_model_len,
            kept_tips=config.kept_tips,
            on_end=self._remember,
            disk=self._disk,
        )
        self._ended: OrderedDict[RequestId, tuple[RootKey, list[list[int]]]] = OrderedDict()
        self._unread: dict[RequestId, list[Event]] = {}  # met while the stream of another request was read
        self._pins: dict[PinId, BlockTable] = {}
        self._num_requests = 0
        self._num_pins = 0

    @classmethod
    def load(cls, config: EngineConfig | None = None) -> "Engine":
        """Load the model of `config` and make an engine for it.

        Raises:
            ModelError: The model is missing, damaged, or of an architecture that cannot be served.
            ConfigError: The device or the memory asked for is not there.
        """
        config = config or EngineConfig.load()
        return cls(config, load_model(config))

    def close(self, *, save_s: float = SAVE_S) -> None:
        """End all requests without a word; save what `kv_disk` keeps, most recently used first, for at most `save_s` seconds.

        Nothing but `stats` may be asked of the engine afterwards. Closing twice is fine.
        """
        for request in list(self._executor.requests.values()):
            self._executor.abort(request, None)
        if self._disk is not None:
            self._disk.close(limit_s=save_s)

    @property
    def is_interim(self) -> bool:
        """Whether the model is computed slower than it could be, until the C++ kernels are compiled."""
        return self.model.is_interim

    @property
    def is_replaceable(self) -> bool:
        """Whether loading the model again would make it faster, and nothing of what is held here would be missed."""
        return self.model.is_outdated and not self.has_work and not self._pins

    def info(self) -> EngineInfo:
        """Describe the engine; only `backend` may change, when a better one becomes ready."""
        return EngineInfo(
            model=self.model.name,
            model_id=self._runner.model_id,
            description=self.model.description,
            tokenizer_path=str(self.tokenizer.name_or_path),
            vocab_size=self._runner.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self._runner.eos_token_ids,
            max_num_seqs=self.config.max_num_seqs,
            max_batched_tokens=self.config.max_batched_tokens,
            block_size=self.config.block_size,
            num_blocks=self._pool.num_blocks,
            bytes_per_block=self._kv_cache.bytes_per_block,
            device=str(self.model.device),
            dtype=str(self.model.dtype).removeprefix("torch."),
            backend=self._kv_cache.backend.name,
            backend_reason=self._kv_cache.backend.reason,
        )

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        request_id: RequestId | None = None,
        prefill_only: bool = False,
    ) -> RequestId:
        """Queue a prompt; nothing is computed before `step`.

        Args:
            token_ids: The prompt, at least one token.
            params: How to sample; default: one sample at temperature 1.
            cache_salt: Only requests with the same salt share blocks with this one.
            request_id: A name of the caller's choice, unique among running requests; default: a new one.
            prefill_only: Compute and keep the prompt, generate nothing (warms a prefix).

        Raises:
            InvalidRequestError: The prompt is empty or has ids outside the vocabulary, or the name is taken.
            ContextLengthError: The prompt leaves no room in the model's context or in the KV cache.
        """
        params = params or SamplingParams()
        prompt = self._check_prompt(token_ids)
        self._check_params(params)
        request_id = request_id or RequestId(f"req-{secrets.token_hex(8)}")
        if request_id in self._executor.requests:
            raise InvalidRequestError(f"The request id {request_id!r} is in use; choose another or leave it out.")
        self._num_requests += 1
        request = Request(
            id=request_id,
            prompt_token_ids=prompt,
            params=params,
            root=self._root(cache_salt),
            seed=secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed,
            arrival=self._num_requests,
            added_at=time.perf_counter(),
            prefill_only=prefill_only,
        )
        self._ended.pop(request_id, None)
        self._executor.add(request)
        return request_id

    def fork(
        self,
        request_id: RequestId,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        num_tokens: int | None = None,
        new_request_id: RequestId | None = None,
    ) -> RequestId:
        """Branch off a running or ended sample: a new request that starts from its first `num_tokens` tokens.

        Its blocks are found in the prefix tree, to the token; nothing is copied before the branch writes.

        Args:
            params: How to sample the branch; default as in `add_request`.
            sample: Which of the n samples to branch from.
            num_tokens: How many tokens of prompt + output to keep; default: all there are now.

        Raises:
            UnknownRequestError: No such request or sample, or it ended so long ago that it was forgotten.
            InvalidParameterError: `num_tokens` is outside [1, tokens of the sample].
        """
        root, tokens = self._tokens_of(request_id, sample)
        kept = len(tokens) if num_tokens is None else num_tokens
        if not isinstance(kept, int) or not 1 <= kept <= len(tokens):
            raise InvalidParameterError(
                f"Cannot fork {request_id!r} sample {sample} at token {kept}: it has {len(tokens)} tokens; "
                f"choose a position from 1 to {len(tokens)}."
            )
        return self.add_request(tokens[:kept], params, cache_salt=root.cache_salt, request_id=new_request_id)

    def abort(self, request_id: RequestId, sample: int | None = None) -> None:
        """Stop a request, or one sample of it, now; its text so far is in the `SampleFinished` of the next step.

        A request that already ended is left as it is.

        Raises:
            UnknownRequestError: The engine never had this request, or the sample does not exist.
        """
        self._tokens_of(request_id, sample or 0)
        if request_id in self._executor.requests:
            self._executor.abort(self._executor.requests[request_id], sample)

    @property
    def has_work(self) -> bool:
        return self._executor.has_work

    def step(self) -> list[Event]:
        """Compute one batch and return everything that happened since the last call, aborts included."""
        events = self._executor.step()
        if self.config.check_integrity:
            self.check_integrity()
        return events

    def stream(self, request_id: RequestId) -> Iterator[Event]:
        """Run steps until `request_id` ends and yield its events; those of other requests wait for their own `stream`.

        Stopping the iteration early aborts the request.

        Raises:
            UnknownRequestError: No such request, or its events were given out already.
        """
        if request_id not in self._executor.requests and request_id not in self._unread:
            raise UnknownRequestError(
                f"There are no events of a request {request_id!r}: it never existed, or was read already."
            )
        return self._stream(request_id)

    def _stream(self, request_id: RequestId) -> Iterator[Event]:
        try:
            while request_id in self._executor.requests or request_id in self._unread:
                for event in self._unread.pop(request_id, ()):
                    yield event
                    if isinstance(event, RequestFinished | RequestFailed):
                        return
                for event in self.step():
                    self._unread.setdefault(event.request_id, []).append(event)
        finally:
            if request_id in self._executor.requests:
                self.abort(request_id)

    # -- memory ----------------------------------------------------------------------------------------------------

    def prefix_cost(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixCost:
        """Say what `add_request` with these tokens would find and have to compute now. Changes nothing."""
        prompt = self._check_prompt(token_ids)
        root = self._root(cache_salt)
        limit = len(prompt) if self._executor.has_tip(root, prompt) else len(prompt) - 1
        cached = self._tree.match(root, prompt, limit).num_tokens
        if self._disk is not None:
            cached = max(cached, min(limit, self._disk.num_loadable_tokens(root, prompt)))
        return PrefixCost(len(prompt), cached, len(prompt) - cached, -(-cached // self._pool.block_size))

    def prefix_blocks(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixBlocks:
        """Say which blocks hold the cached beginning of these tokens now. Looking is no use: nothing is kept longer for it.

        Raises:
            InvalidRequestError: There are no tokens, or ids outside the vocabulary.
        """
        match = self._tree.match(self._root(cache_salt), self._check_tokens(token_ids))
        return PrefixBlocks(match.block_ids, match.num_tokens)

    def pin(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PinId:
        """Keep the blocks of a computed prefix from being evicted until `unpin`.

        Raises:
            InvalidRequestError: Part of the prefix is not in the cache; compute it first (`prefill_only`).
        """
        prefix = self._check_prompt(token_ids)
        match = self._tree.match(self._root(cache_salt), prefix)
        if match.num_tokens < len(prefix):
            raise InvalidRequestError(
                f"Only {match.num_tokens} of {len(prefix)} tokens are in the cache; "
                "compute the prefix first with add_request(..., prefill_only=True)."
            )
        table = BlockTable(self._pool, self._tree, self._root(cache_salt))
        table.adopt(match)
        self._num_pins += 1
        self._pins[PinId(self._num_pins)] = table
        return PinId(self._num_pins)

    def unpin(self, pin_id: PinId) -> None:
        """Let go of a pinned prefix; its blocks stay cached until they are evicted.

        Raises:
            UnknownRequestError: No such pin, or it was let go already.
        """
        if pin_id not in self._pins:
            raise UnknownRequestError(f"There is no pin {pin_id}; it never existed or was let go already.")
        self._pins.pop(pin_id).free()

    def clear_cache(self) -> None:
        """Forget every cached prefix that nobody holds, and every kept tip; what lies on disk stays there."""
        self._tree.clear()
        self._executor.clear_tips()

    def poison_free_rows(self) -> None:
        """Fill the KV cache of an idle engine with NaN, so that any read of a row nobody wrote is seen; forgets the cache.

        Raises:
            InvalidRequestError: Blocks are in use.
        """
        if self._pool.num_used:
            raise InvalidRequestError(f"{self._pool.num_used} blocks are in use; let every request end and unpin all first.")
        self.clear_cache()
        self._kv_cache.poison()

    def stats(self) -> EngineStats:
        counters, scheduler = self._executor.counters, self._executor.scheduler
        return EngineStats(
            num_steps=counters.num_steps,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            computed_tokens=counters.computed_tokens,
            generated_tokens=counters.generated_tokens,
            num_block_copies=counters.num_block_copies,
            copied_rows=counters.copied_rows,
            copied_bytes=counters.copied_rows * self._kv_cache.bytes_per_block // self._pool.block_size,
            step_seconds=counters.step_seconds,
            last_step_seconds=counters.last_step_seconds,
            memory=self.memory(),
            disk=None if self._disk is None else self._disk.stats(),
        )

    def memory(self) -> MemoryReport:
        """Count blocks, rows and bytes: held, shared, private and wasted, a shared block once."""
        return memory_report(self._pool, self._tree, self._tables(), self._kv_cache.bytes_per_block)

    def num_freeable_blocks(self, request_id: RequestId, sample: int = 0) -> int:
        """Count the blocks that ending this sample now would make available: those nobody else holds.

        Raises:
            UnknownRequestError: No such request or sample.
        """
        self._tokens_of(request_id, sample)
        table = self._tables().get(f"{request_id}/{sample}")
        return num_freeable_blocks(self._pool, table) if table else 0

    def block_map(self) -> tuple[BlockInfo, ...]:
        """Describe every block: its state, ref count, filled rows and holders."""
        return block_map(self._pool, self._tree, self._tables())

    def check_integrity(self) -> None:
        """Prove that every block is in exactly one state and has as many references as holders.

        Raises:
            AssertionError: A bug of ours; the message names the block.
        """
        check_integrity(self._pool, self._tree, self._tables().values())

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _num_pool_tokens(self) -> int:
        return self._pool.num_blocks * self._pool.block_size

    def _tables(self) -> dict[str, BlockTable]:
        """Every live block table by the name of its holder."""
        running = self._executor.scheduler.running
        tables = {f"{s.request.id}/{s.sample}": s.table for s in running if s.table is not None}
        tables |= {f"pin/{pin_id}": table for pin_id, table in self._pins.items()}
        return tables if self._disk is None else tables | self._disk.tables

    def _remember(self, request: Request) -> None:
        """Keep the token ids of an ended request for a while, so that it can be forked."""
        self._ended[request.id] = (request.root, [sequence.token_ids for sequence in request.sequences])
        while len(self._ended) > _KEPT_ENDED_REQUESTS:
            forgotten, _ = self._ended.popitem(last=False)
            self._unread.pop(forgotten, None)

    def _tokens_of(self, request_id: RequestId, sample: int) -> tuple[RootKey, list[int]]:
        if request_id in self._executor.requests:
            request = self._executor.requests[request_id]
            root, samples = request.root, [sequence.token_ids for sequence in request.sequences]
        elif request_id in self._ended:
            root, samples = self._ended[request_id]
        else:
            raise UnknownRequestError(
                f"There is no request {request_id!r}; it never existed, or ended more than {_KEPT_ENDED_REQUESTS} "
                "requests ago. "
                "Add its token ids as a new request instead: cached blocks are found by tokens."
            )
        if not isinstance(sample, int) or not 0 <= sample < len(samples):
            raise UnknownRequestError(f"{request_id!r} has samples 0 to {len(samples) - 1}, not {sample}.")
        return root, samples[sample]

    def _root(self, cache_salt: str) -> RootKey:
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(f"The cache salt must be text, got {type(cache_salt).__name__}.")
        return RootKey(self._runner.model_id, cache_salt)

    def _check_prompt(self, token_ids: Sequence[int]) -> list[int]:
        prompt = self._check_tokens(token_ids)
        if len(prompt) >= self.max_model_len:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens; at most {self.max_model_len - 1} leave room for an answer "
                f"(model: {self._runner.max_model_len}, KV cache: {self._num_pool_tokens}). "
                "Shorten it, or raise --max-model-len or --kv-memory."
            )
        return prompt

    def _check_tokens(self, token_ids: Sequence[int]) -> list[int]:
        if isinstance(token_ids, str | bytes | bytearray):
            raise InvalidRequestError(
                "The prompt must be token ids, not text or bytes; encode it with `engine.tokenizer` first."
            )
        try:
            prompt = array("q", token_ids).tolist()
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(f"The prompt must be a sequence of token ids (whole numbers): {error}.") from error
        if not prompt:
            raise InvalidRequestError("The prompt is empty; give at least one token (a chat template always does).")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._runner.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequestError(f"Token id {wrong} is outside the vocabulary of {self._runner.vocab_size} tokens.")
        return prompt

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(f"params must be SamplingParams, got {type(params).__name__}.")
        if params.n > self.config.max_num_seqs:
            raise InvalidParameterError(
                f"n is {params.n}, but at most {self.config.max_num_seqs} sequences run at once; "
                "lower n or raise --max-num-seqs."
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", tuple(params.logit_bias))):
            if ids and max(ids) >= self._runner.vocab_size:
                raise InvalidParameterError(
                    f"{name} has token id {max(ids)}, outside the vocabulary of {self._runner.vocab_size} tokens."
                )
