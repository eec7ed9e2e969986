"""`/metrics` for Prometheus: what the engine counts, what runs took, and what came over the wire.

Invariants: numbers of the engine are read when they are asked for, never kept twice; a label has few values, so no path or name
of a client becomes one; without an engine the rest is served all the same.
"""

import contextlib
from collections.abc import Iterable, Iterator

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

from chatpage.engine.stats import EngineStats
from chatpage.errors import EngineDeadError
from chatpage.events import SampleFinished
from chatpage.runs import RunLog
from chatpage.server.views import RunRequest
from chatpage.session import Session
from chatpage.store.records import RunStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_COUNTED = {  # field of `EngineStats`: what it means
    "num_steps": ("steps", "Steps of the engine."),
    "step_seconds": ("step_seconds", "Seconds spent in steps."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "cached_tokens": ("cached_prompt_tokens", "Tokens of prompts that were found in the KV cache."),
    "computed_tokens": ("computed_tokens", "Tokens that went through the model."),
    "generated_tokens": ("generated_tokens", "Tokens that were generated."),
    "num_preemptions": ("preemptions", "Sequences that had to give their blocks back for a while."),
    "num_block_copies": ("block_copies", "Blocks that were copied on write."),
    "copied_bytes": ("copied_bytes", "Bytes of those copies."),
}
_COUNTED_ON_DISK = {  # field of `KvDiskStats`: likewise
    "saved_blocks": ("saved_blocks", "Blocks that were saved to disk."),
    "loaded_blocks": ("loaded_blocks", "Blocks that were loaded from disk."),
    "loaded_tokens": ("loaded_tokens", "Tokens in them: so many were not computed again."),
    "damaged_files": ("damaged_files", "Files that were found damaged, and removed."),
    "write_errors": ("write_errors", "Errors of the disk while saving; each pauses it for up to a minute."),
    "evicted_blocks": ("evicted_blocks", "Blocks that were removed to stay under the limit."),
}


class Metrics:
    """The metrics of one application; a watcher of its session's runs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        registry = self._registry = CollectorRegistry()
        self.requests = Counter("chatpage_requests", "HTTP requests.", ["method", "route", "status"], registry=registry)
        self.sockets = Gauge("chatpage_sockets", "Websockets that are open.", registry=registry)
        self._runs = Counter("chatpage_runs", "Runs that ended.", ["kind", "status"], registry=registry)
        self._ttft = Histogram("chatpage_ttft_seconds", "Time to the first token.", buckets=_TTFT_S, registry=registry)
        self._tpot = Histogram("chatpage_tpot_seconds", "Time per output token.", buckets=_TPOT_S, registry=registry)

    def run_started(self, log: RunLog, request: RunRequest) -> None:
        """Nothing is counted before a run ends; how many go on is asked from the session."""

    def run_ended(self, log: RunLog, status: RunStatus) -> None:
        self._runs.labels(str(log.created.kind), str(status)).inc()
        for sample in log.samples:
            if sample.finished is not None:
                self.sample_finished(sample.finished)

    def sample_finished(self, finished: SampleFinished) -> None:
        """Count how long a sample took, whoever asked for it."""
        if finished.ttft_s is not None:
            self._ttft.observe(finished.ttft_s)
        if finished.decode_tok_s:
            self._tpot.observe(1 / finished.decode_tok_s)

    async def render(self) -> bytes:
        """Return everything in the text format of Prometheus."""
        engine: EngineStats | None = None
        with contextlib.suppress(EngineDeadError):
            engine = await self._session.engine.stats()
        now = CollectorRegistry()
        now.register(
            _Snapshot([*_of_session(self._session, is_up=engine is not None), *(_of_engine(engine) if engine else ())])
        )
        return bytes(generate_latest(self._registry) + generate_latest(now))


class _Snapshot:
    """Numbers that were read just now, as a collector."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> list[Metric]:
        return self._metrics


def _of_session(session: Session, *, is_up: bool) -> Iterator[Metric]:
    counts = session.counts()
    yield GaugeMetricFamily("chatpage_engine_up", "1 while the engine computes.", int(is_up))
    yield GaugeMetricFamily("chatpage_runs_live", "Runs that go on or wait.", counts.num_live_runs)
    refused = session.admission.num_refused
    yield CounterMetricFamily("chatpage_runs_refused", "Runs and requests that were told to come again later.", refused)
    unsaved = counts.num_unsaved_runs
    yield GaugeMetricFamily("chatpage_runs_unsaved", "Runs that ended and wait for the disk to take them.", unsaved)
    yield GaugeMetricFamily("chatpage_followers", "Who follows a conversation.", counts.num_followers)
    yield GaugeMetricFamily("chatpage_run_logs", "Logs of runs that are kept in memory.", counts.num_kept_logs)


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    for field, (name, text) in _COUNTED.items():
        yield CounterMetricFamily(f"chatpage_{name}", text, getattr(stats, field))
    yield GaugeMetricFamily("chatpage_hit_rate", "Share of prompt tokens that were cached.", _share(stats))
    queue = GaugeMetricFamily("chatpage_sequences", "Sequences in the engine.", labels=["state"])
    queue.add_metric(["running"], stats.num_running)
    queue.add_metric(["waiting"], stats.num_waiting)
    yield queue
    memory = stats.memory
    blocks = GaugeMetricFamily("chatpage_blocks", "Blocks of the KV cache.", labels=["state"])
    for state in ("used", "cached", "blank"):
        blocks.add_metric([state], getattr(memory, f"blocks_{state}"))
    yield blocks
    yield GaugeMetricFamily("chatpage_blocks_shared", "Blocks that several sequences hold.", memory.blocks_shared)
    yield GaugeMetricFamily("chatpage_rows_held", "Tokens whose keys and values are held.", memory.rows_held)
    yield GaugeMetricFamily("chatpage_rows_without_sharing", "The same if nothing were shared.", memory.rows_without_sharing)
    if disk := stats.disk:
        yield GaugeMetricFamily("chatpage_kv_disk_blocks", "Blocks on disk.", disk.blocks)
        yield GaugeMetricFamily("chatpage_kv_disk_bytes", "Bytes on disk.", disk.bytes)
        yield GaugeMetricFamily(
            "chatpage_kv_disk_saving",
            "1 while blocks are saved, 0 from an error of the disk until it is gone.",
            int(disk.is_saving),
        )
        for field, (name, text) in _COUNTED_ON_DISK.items():
            yield CounterMetricFamily(f"chatpage_kv_disk_{name}", text, getattr(disk, field))


def _share(stats: EngineStats) -> float:
    return stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0


router = APIRouter()


@router.get("/metrics", response_class=Response)
async def get_metrics(request: Request) -> Response:
    """Return metrics in the text format of Prometheus."""
    metrics: Metrics = request.app.state.metrics
    return Response(await metrics.render(), media_type=CONTENT_TYPE)
