"""What the rest of the program knows of an engine, wherever it runs: a thread (`AsyncEngine`) or a process (`ProcessEngine`).

Invariant: nothing here loads torch. Every method is called on one event loop and never blocks it; when the engine ends, every
open stream and every call ends with `EngineDeadError`.
"""

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

from chatpage.engine.accounting import BlockInfo
from chatpage.engine.stats import EngineInfo, EngineStats, PrefixBlocks, PrefixCost
from chatpage.events import Event, RequestId
from chatpage.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chatpage.engine.core import PinId

__all__ = ["BlockInfo", "EngineClient", "EngineInfo", "EngineStats", "PrefixBlocks", "PrefixCost"]


class EngineClient(Protocol):
    """An engine, for programs that run on asyncio. `AsyncEngine` documents each method."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def info(self) -> EngineInfo: ...

    async def add_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        request_id: RequestId | None = None,
        prefill_only: bool = False,
    ) -> RequestId: ...

    async def fork(
        self,
        request_id: RequestId,
        params: SamplingParams | None = None,
        *,
        sample: int = 0,
        num_tokens: int | None = None,
        new_request_id: RequestId | None = None,
    ) -> RequestId: ...

    async def abort(self, request_id: RequestId, sample: int | None = None) -> None: ...

    def stream(self, request_id: RequestId) -> AsyncGenerator[Event, None]: ...

    async def prefix_cost(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixCost: ...

    async def prefix_blocks(self, token_ids: Sequence[int], *, cache_salt: str = "") -> PrefixBlocks: ...

    async def pin(self, token_ids: Sequence[int], *, cache_salt: str = "") -> "PinId": ...

    async def unpin(self, pin_id: "PinId") -> None: ...

    async def stats(self) -> EngineStats: ...

    async def block_map(self) -> tuple[BlockInfo, ...]: ...
