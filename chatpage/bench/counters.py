"""What is never computed, copied or stored twice, counted on a live engine.

Invariant: nothing here depends on the speed of the machine but the time of a fork, whose bound is far from what it takes.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from chatpage.bench.workloads import NUM_SAMPLES, Prompts
from chatpage.engine.accounting import MemoryReport
from chatpage.engine.core import Engine
from chatpage.errors import EngineStepError
from chatpage.events import Event, RequestFailed, RequestFinished, RequestId, SampleFinished, Usage
from chatpage.sampling_params import SamplingParams

FORK_TOKENS = 4000
PROMPT_TOKENS = 1000
_REPLY_TOKENS = 16
_MAX_FORK_US = 1000.0
_FORK_RUNS = 5


@dataclass(frozen=True, slots=True)
class Counter:
    """One number that was counted, and what it has to be."""

    name: str
    expected: str
    seen: str
    is_ok: bool


def count_all(engine: Engine) -> list[Counter]:
    """Run every check on an engine that serves nothing else; shorter where its context is."""
    counters: list[Counter] = []
    for check in _CHECKS:
        engine.clear_cache()
        counters += check(engine)
    return counters


def _next_turn(engine: Engine) -> Iterator[Counter]:
    prompts = Prompts(engine.tokenizer)
    first = prompts.chat("a next turn", _fitting(engine, PROMPT_TOKENS))
    reply = _outputs(_generate(engine, first, n=1))[0]
    # The last token of the reply was sampled but never fed to the model, so it is new too.
    new = prompts.turn("And then?", 28)
    usage = _usage(_generate(engine, [*first, *reply, *new], n=1))
    yield _equal("a next turn computes its new tokens alone", len(new) + 1, usage.computed_prompt_tokens)


def _regenerate(engine: Engine) -> Iterator[Counter]:
    prompt = Prompts(engine.tokenizer).chat("a reply twice", _fitting(engine, PROMPT_TOKENS))
    _generate(engine, prompt, n=1)
    usage = _usage(_generate(engine, prompt, n=1))
    yield _at_most("regenerating computes prompt tokens", 1, usage.computed_prompt_tokens)


def _fork(engine: Engine) -> Iterator[Counter]:
    num_tokens = _fitting(engine, FORK_TOKENS)
    prompt = Prompts(engine.tokenizer).chat("a long conversation", num_tokens)
    source = engine.add_request(prompt, _params(n=1))
    _run(engine)
    copied, times = engine.stats().copied_bytes, []
    for _ in range(_FORK_RUNS):
        started = time.perf_counter()
        branch = engine.fork(source, _params(n=1), num_tokens=num_tokens)
        times.append((time.perf_counter() - started) * 1e6)
        engine.abort(branch)
    yield _equal(f"a fork at {num_tokens:,} tokens copies bytes", 0, engine.stats().copied_bytes - copied)
    yield _at_most(f"a fork at {num_tokens:,} tokens takes microseconds", int(_MAX_FORK_US), round(statistics.median(times)))
    _run(engine)
    branch = engine.fork(source, _params(n=1), num_tokens=num_tokens)
    computed = _usage(_events_of(_run(engine), branch)).computed_prompt_tokens
    yield _at_most("a fork computes prompt tokens", 1, computed)
    rows = (engine.stats().copied_bytes - copied) * engine.config.block_size // engine.memory().bytes_per_block
    yield _at_most("the first write after a fork copies rows", engine.config.block_size - 1, rows)


def _samples(engine: Engine) -> Iterator[Counter]:
    num_tokens = _fitting(engine, PROMPT_TOKENS)
    prompt = Prompts(engine.tokenizer).chat("eight samples", num_tokens)
    engine.add_request(prompt, _params(n=NUM_SAMPLES))
    reports: list[MemoryReport] = []
    while engine.has_work:
        if not any(isinstance(event, SampleFinished) for event in engine.step()):
            reports.append(engine.memory())
    most = reports[-1]  # after the last step in which all of them ran
    size = most.block_size
    # The last token of the moment has no row yet; all samples but one have the partial tail of the prompt once more.
    rows = num_tokens + NUM_SAMPLES * (_REPLY_TOKENS - 2) + (NUM_SAMPLES - 1) * (num_tokens % size)
    yield _at_most(f"{NUM_SAMPLES} samples of {num_tokens:,} tokens hold rows", rows, most.rows_held)
    yield _at_most("and waste rows, a partial tail each", (NUM_SAMPLES + 1) * (size - 1), most.rows_wasted)


def _posted_together(engine: Engine) -> Iterator[Counter]:
    prompt = Prompts(engine.tokenizer).chat("four at once", _fitting(engine, PROMPT_TOKENS))
    before = engine.stats().computed_tokens
    requests = [engine.add_request(prompt, _params(n=1)) for _ in range(4)]
    events = _run(engine)
    in_prompts = sum(_usage(_events_of(events, request)).computed_prompt_tokens for request in requests)
    # Each of the other three may feed the last prompt token again, to have its logits.
    yield _at_most("4 equal prompts together compute prompt tokens", len(prompt) + 3, in_prompts)
    total = engine.stats().computed_tokens - before
    yield _at_most("and, with their replies, tokens", len(prompt) + 3 + 4 * (_REPLY_TOKENS - 1), total)


def _edit(engine: Engine) -> Iterator[Counter]:
    prompts = Prompts(engine.tokenizer)
    before = prompts.chat("an edited message", _fitting(engine, PROMPT_TOKENS))
    turn = prompts.turn("Which of these is the oldest one?", 28)
    _generate(engine, [*before, *turn], n=1)
    kept = 10
    changed = [*before, *turn[:kept], *prompts.turn("Or which of these is the newest?", 20)]
    first_change = next(i for i, (a, b) in enumerate(zip([*before, *turn], changed, strict=False)) if a != b)
    usage = _usage(_generate(engine, changed, n=1))
    yield _equal("editing the last message computes from there on", len(changed) - first_change, usage.computed_prompt_tokens)


_CHECKS: tuple[Callable[[Engine], Iterator[Counter]], ...] = (
    _next_turn,
    _regenerate,
    _fork,
    _samples,
    _posted_together,
    _edit,
)


def _equal(name: str, expected: int, seen: int) -> Counter:
    return Counter(name, f"{expected:,}", f"{seen:,}", seen == expected)


def _at_most(name: str, limit: int, seen: int) -> Counter:
    return Counter(name, f"at most {limit:,}", f"{seen:,}", seen <= limit)


def _fitting(engine: Engine, num_tokens: int) -> int:
    """The length wanted, or what the context leaves beside a turn and a reply."""
    return min(num_tokens, engine.max_model_len - 100)


def _params(n: int) -> SamplingParams:
    return SamplingParams(n=n, temperature=1.0, seed=0, max_tokens=_REPLY_TOKENS, ignore_eos=True)


def _generate(engine: Engine, token_ids: Sequence[int], *, n: int) -> list[Event]:
    return list(engine.stream(engine.add_request(token_ids, _params(n))))


def _run(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    return events


def _events_of(events: Sequence[Event], request_id: RequestId) -> list[Event]:
    return [event for event in events if event.request_id == request_id]


def _usage(events: Sequence[Event]) -> Usage:
    for event in events:
        if isinstance(event, RequestFailed):
            raise EngineStepError(event.message)
    return next(event.usage for event in events if isinstance(event, RequestFinished))


def _outputs(events: Sequence[Event]) -> list[tuple[int, ...]]:
    return [event.token_ids for event in events if isinstance(event, SampleFinished)]
