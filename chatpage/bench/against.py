"""`chatpage bench --against ...`: starts the engines, measures, and hands the results to the report.

Invariant: engines that are not installed, or cannot serve this model, are named with the reason or the command that helps; the
others are measured. However it ends, no process and no file of it is left but what was asked for.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from chatpage.bench import machine, report
from chatpage.bench.measuring import START, Outcome, Results, measure
from chatpage.bench.peers.interface import CannotError, Setup
from chatpage.bench.peers.process import PeerProcess
from chatpage.bench.peers.registry import ENTRIES, OURS
from chatpage.bench.workloads import Prompts, Sizes
from chatpage.config import EngineConfig
from chatpage.errors import ContextLengthError, EngineStepError, InvalidRequestError

_QUICK_SHARE = 0.1
_ROOM = 200  # tokens for turns and replies beside the longest prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, and where to write it."""

    workloads: tuple[str, ...]
    peers: tuple[str, ...]
    repeat: int
    is_quick: bool = False
    patience_s: float = 0.0
    json_file: Path | None = None
    chart_file: Path | None = None


@dataclass(slots=True)
class _Started:
    engines: list[PeerProcess] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)


def run_against(config: EngineConfig, plan: Plan, console: Console) -> Results:
    """Measure, print a table, write the files.

    Raises:
        ContextLengthError: The longest workload does not fit the engine.
        EngineStepError: chatpage's own engine failed to start.
        InvalidRequestError: A file cannot be written.
    """
    from chatpage.engine.models import architecture
    from chatpage.engine.models.cache_dir import cache_dir
    from chatpage.engine.models.loading import find_model
    from chatpage.engine.models.tokenizer import load_tokenizer

    for file in (plan.json_file, plan.chart_file):
        _check_writable(file)
    sizes = Sizes().scaled(_QUICK_SHARE) if plan.is_quick else Sizes()
    files = find_model(config.model, show_progress=True)
    prompts = Prompts(load_tokenizer(files.settings))
    vocab_size = int(architecture.read_config(files.settings).vocab_size)
    with tempfile.TemporaryDirectory(prefix="chatpage-bench-") as scratch, console.status("starting …") as status:
        settings = config.model_dump(mode="json")
        setup = Setup(settings, files.settings, files.weights, num_threads(config), cache_dir() / "bench", Path(scratch))
        with _starting(plan.peers, setup, sizes, vocab_size, lambda text: status.update(f"{text} …")) as started:
            _check_room(started.engines[0].max_len, sizes, plan.workloads)
            for engine in started.engines:
                engine.warm_up(prompts.material("W1", "a warm-up", sizes))
            facts = _facts(plan, config, setup, started)
            start = {engine.name: _start_outcome(engine) for engine in started.engines}

            def keep(so_far: Results) -> None:
                """Write down what there is, so that a bench that is ended early was not for nothing."""
                so_far.outcomes[START] = so_far.outcomes.pop(START, start)  # the last row
                report.write_files(so_far, facts, json_file=plan.json_file, chart_file=plan.chart_file)

            results = measure(
                started.engines,
                plan.workloads,
                lambda name, seed: prompts.material(name, seed, sizes),
                repeat=plan.repeat,
                patience_s=plan.patience_s,
                report=lambda text: status.update(f"{text} …"),
                checkpoint=keep,
            )
    report.show(results, facts, console)
    return results


def num_threads(config: EngineConfig) -> int:
    """Return the threads that every engine gets: those of `--threads`, else as many as torch would take."""
    if config.threads is not None:
        return config.threads
    import torch

    return torch.get_num_threads()


@contextlib.contextmanager
def _starting(peers: Sequence[str], setup: Setup, sizes: Sizes, vocab_size: int, tell: "report.Tell") -> Iterator[_Started]:
    """Start chatpage and then the peers, one after the other; end them all in the end."""
    started = _Started()
    with contextlib.ExitStack() as stack:
        for name in (OURS, *peers):
            if not ENTRIES[name].is_installed:
                started.absent[name] = f"not installed: {ENTRIES[name].install}"
                continue
            process = PeerProcess(name, setup)
            stack.callback(process.close)
            try:
                tell(f"preparing {name}")
                process.prepare()
                tell(f"starting {name}")
                process.load(sizes, vocab_size)
            except CannotError as reason:
                started.absent[name] = f"it {reason}"
            except EngineStepError as error:
                if name == OURS:
                    raise
                started.absent[name] = f"failed to start: {error}"
            else:
                started.engines.append(process)
        yield started


def _facts(plan: Plan, config: EngineConfig, setup: Setup, started: _Started) -> report.Facts:
    return report.Facts(
        machine=machine.describe() | {"threads": str(setup.threads)},
        model=config.model,
        repeat=plan.repeat,
        is_quick=plan.is_quick,
        engines={engine.name: engine.facts for engine in started.engines},
        absent=started.absent,
    )


def _start_outcome(engine: PeerProcess) -> Outcome:
    outcome = Outcome()
    outcome.take(engine.start)
    return outcome


def _check_room(max_len: int | None, sizes: Sizes, workloads: Sequence[str]) -> None:
    is_long = bool({"W7", "W8"} & set(workloads))
    longest = sizes.fork if is_long else max(sizes.prompt, sizes.system, sizes.decode_in + sizes.decode_out)
    if max_len is not None and longest + _ROOM > max_len:
        raise ContextLengthError(
            f"The longest workload needs {longest + _ROOM} tokens, the engine takes {max_len}: "
            "use --quick, choose others with --workloads, or raise --kv-memory."
        )


def _check_writable(file: Path | None) -> None:
    """Refuse a file that cannot be written before anything takes an hour."""
    if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InvalidRequestError(f"Cannot write {file}: the folder is missing or may not be written.")
