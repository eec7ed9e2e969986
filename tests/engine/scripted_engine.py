"""An engine without a model, for tests of what stands around one: it starts in no time, and says what it is told to.

Every sample says "a", "b", "c", ... one letter a step, until `max_tokens`. Loads neither torch nor transformers.
"""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from chatpage.config import EngineConfig
from chatpage.engine.accounting import BlockInfo, MemoryReport
from chatpage.engine.stats import EngineInfo, EngineStats, PrefixBlocks, PrefixCost
from chatpage.errors import InvalidRequestError, UnknownRequestError
from chatpage.events import (
    Event,
    FinishReason,
    RequestFinished,
    RequestId,
    RequestStarted,
    SampleFinished,
    TokenDelta,
    Usage,
)
from chatpage.sampling_params import SamplingParams

MAX_MODEL_LEN = 100_000


class ScriptedEngine:
    """What a child process runs in place of `Engine`.

    Args:
        step_s: Seconds a step takes.
        dies_at: The step that fails beyond repair.
        is_interim: It may be replaced as soon as nobody uses it.
    """

    def __init__(self, *, step_s: float = 0.0005, dies_at: int | None = None, is_interim: bool = False) -> None:
        self.is_interim = is_interim
        self._step_s = step_s
        self._dies_at = dies_at
        self._num_steps = 0
        self._running: dict[RequestId, tuple[int, SamplingParams, dict[int, str]]] = {}
        self._events: list[Event] = []

    def close(self) -> None:
        self._running.clear()

    def info(self) -> EngineInfo:
        return EngineInfo(
            model="interim" if self.is_interim else "scripted",
            model_id="scripted",
            description="says the alphabet",
            tokenizer_path="",
            vocab_size=1000,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset(),
            max_num_seqs=64,
            max_batched_tokens=64,
            block_size=4,
            num_blocks=8,
            bytes_per_block=1,
            device="none",
            dtype="none",
            backend="none",
            backend_reason="there is no model",
        )

    @property
    def is_replaceable(self) -> bool:
        return self.is_interim and not self.has_work

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._events)

    def add_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        request_id: RequestId | None = None,
        prefill_only: bool = False,
    ) -> RequestId:
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.")
        params = params or SamplingParams()
        assert request_id is not None
        self._events.append(RequestStarted(request_id, len(token_ids), 0, 0, params.seed or 0))
        self._running[request_id] = (len(token_ids), params, {} if prefill_only else dict.fromkeys(range(params.n), ""))
        return request_id

    def fork(self, request_id: RequestId, *_: Any, **options: Any) -> RequestId:
        raise UnknownRequestError(f"There is no request {request_id!r}.")

    def abort(self, request_id: RequestId, sample: int | None = None) -> None:
        if request_id in self._running:
            for index in list(self._running[request_id][2]):
                if sample in (None, index):
                    self._finish(request_id, index, FinishReason.ABORT)

    def step(self) -> list[Event]:
        self._num_steps += 1
        if self._num_steps == self._dies_at:
            raise MemoryError("no memory for a step")
        time.sleep(self._step_s)
        for request_id, (_, params, texts) in list(self._running.items()):
            for sample in list(texts):
                letter = chr(ord("a") + len(texts[sample]) % 26)
                texts[sample] += letter
                self._events.append(TokenDelta(request_id, sample, letter, (ord(letter),)))
                if len(texts[sample]) == params.max_tokens:
                    self._finish(request_id, sample, FinishReason.LENGTH)
            if not texts:
                num_prompt_tokens, _, _ = self._running.pop(request_id)
                self._events.append(RequestFinished(request_id, Usage(num_prompt_tokens, 0, num_prompt_tokens, 0)))
        events, self._events = self._events, []
        return events

    def prefix_cost(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixCost:
        return PrefixCost(len(token_ids), 0, len(token_ids), 0)

    def prefix_blocks(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixBlocks:
        return PrefixBlocks((), 0)

    def pin(self, token_ids: Sequence[int], *, cache_salt: str = "") -> int:
        return 1

    def unpin(self, pin_id: int) -> None:
        raise UnknownRequestError(f"There is no pin {pin_id}.")

    def block_map(self) -> tuple[BlockInfo, ...]:
        return ()

    def stats(self) -> EngineStats:
        memory = MemoryReport(8, 4, 1, 0, 0, 8, 0, 0, 0, 0, 0, 0)
        return EngineStats(self._num_steps, 0, len(self._running), 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, memory)

    def _finish(self, request_id: RequestId, sample: int, reason: FinishReason) -> None:
        text = self._running[request_id][2].pop(sample)
        token_ids = tuple(map(ord, text))
        self._events.append(SampleFinished(request_id, sample, reason, text, token_ids, 0.0, 0.001, 1000.0))


def load(_: EngineConfig | None) -> Any:
    return ScriptedEngine()


def load_slowly(_: EngineConfig | None) -> Any:
    time.sleep(60)
    return ScriptedEngine()


def load_brittle(_: EngineConfig | None) -> Any:
    """Load an engine whose tenth step ends it."""
    return ScriptedEngine(dies_at=10)


_loads = itertools.count()


def load_interim_first(_: EngineConfig | None) -> Any:
    """Load an engine that may be replaced, then others."""
    return ScriptedEngine(step_s=0.005, is_interim=next(_loads) == 0)
