"""One prompt, one answer: `chatpage generate`.

Invariant: stdout holds the answer alone (text, or one JSON object); everything else goes to stderr.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from chatpage.engine.core import Engine
from chatpage.errors import EngineStepError, InvalidRequestError
from chatpage.events import Event, TokenDelta
from chatpage.prompt import Message, render_prompt
from chatpage.sampling_params import SamplingParams
from chatpage.terminal.columns import LiveColumns
from chatpage.terminal.reply import Reply, Sample, holding, run_request
from chatpage.terminal.streams import check_stdin
from chatpage.terminal.text import check_unicode, clean, decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompt(prompt: str | None, prompt_file: Path | None, source: str | None) -> str:
    """Return the prompt from the one place that was named.

    Raises:
        InvalidRequestError: None or several were named, the file cannot be read, or the text is not valid UTF-8.
    """
    named = [given for given in (prompt, prompt_file, source) if given is not None]
    if len(named) != 1:
        raise InvalidRequestError(f"Give the prompt in one way, not {len(named)}: --prompt T, --prompt-file F, or - for stdin.")
    if source is not None and source != "-":
        raise InvalidRequestError(f"Unexpected argument {source!r}; write --prompt {source!r}, or - to read stdin.")
    if prompt is not None:
        return check_unicode(prompt, "--prompt")
    if prompt_file is None:
        check_stdin()
        return decode(sys.stdin.buffer.read(), "stdin")
    try:
        return decode(prompt_file.read_bytes(), str(prompt_file))
    except OSError as error:
        raise InvalidRequestError(f"Cannot read {prompt_file}: {error.strerror}.") from error


def render(engine: Engine, text: str, system: str | None, *, raw: bool) -> list[int]:
    """Turn a prompt into token ids, through the chat template unless it is raw."""
    if raw:
        return list(engine.tokenizer.encode(text))
    messages = [] if system is None else [Message("system", system)]
    return list(render_prompt(engine.tokenizer, [*messages, Message("user", text)]).token_ids)


def print_reply(engine: Engine, token_ids: Sequence[int], params: SamplingParams, *, model_name: str, as_json: bool) -> bool:
    """Generate and print; False if Ctrl-C cut it short.

    Raises:
        InvalidRequestError: The engine refuses the prompt or the parameters.
        EngineStepError: The engine failed on the way; what it said until then was printed.
    """
    if as_json:
        reply = run_request(engine, token_ids, params, lambda event, reply: None)
    elif params.n > 1 and sys.stdout.isatty():
        reply = _print_columns(engine, token_ids, params)
    else:
        reply = _print_text(engine, token_ids, params)
    if reply.failure is not None:
        raise EngineStepError(reply.failure.message)
    if as_json:
        print(json.dumps(to_json(engine, token_ids, params, reply, model_name), ensure_ascii=False))
    else:
        if params.logprobs is not None:
            _print_logprobs(engine.tokenizer, reply)
        _print_summary(reply)
    return not reply.was_interrupted


def to_json(engine: Engine, token_ids: Sequence[int], params: SamplingParams, reply: Reply, model_name: str) -> dict[str, Any]:
    """Describe a finished reply; `memory` is what prompt and samples hold together in the KV cache."""
    assert reply.usage is not None
    assert reply.started is not None
    with holding(engine, [[*token_ids, *sample.token_ids] for sample in reply.samples]):
        memory = engine.memory()
    return {
        "model": model_name,
        "seed": reply.started.seed,
        "prompt_tokens": reply.usage.prompt_tokens,
        "cached_tokens": reply.usage.cached_tokens,
        "computed_prompt_tokens": reply.usage.computed_prompt_tokens,
        "samples": [_sample_json(sample, params) for sample in reply.samples],
        "timing": {
            "ttft_ms": _rounded(reply.ttft_s, 1e3),
            "decode_tok_s": _rounded(reply.decode_tok_s),
            "wall_ms": _rounded(reply.wall_s, 1e3),
        },
        "memory": {
            "block_size": memory.block_size,
            "bytes_per_block": memory.bytes_per_block,
            "blocks_used": memory.blocks_used,
            "blocks_shared": memory.blocks_shared,
            "rows_held": memory.rows_held,
            "rows_wasted": memory.rows_wasted,
        },
    }


def _sample_json(sample: Sample, params: SamplingParams) -> dict[str, Any]:
    described: dict[str, Any] = {
        "index": sample.index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "num_tokens": len(sample.token_ids),
        "sum_logprob": sample.finished.sum_logprob if sample.finished else None,
    }
    if params.logprobs is not None:
        described["logprobs"] = [
            {"token_id": t.token_id, "logprob": t.logprob, "alternatives": [list(a) for a in t.alternatives]}
            for t in sample.logprobs
        ]
    return described


def _rounded(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else round(value * factor, 2)


# -- as text ---------------------------------------------------------------------------------------------------------


def _print_columns(engine: Engine, token_ids: Sequence[int], params: SamplingParams) -> Reply:
    with LiveColumns(Console(highlight=False), params.n) as columns:
        reply = run_request(engine, token_ids, params, lambda _, reply: columns.update(reply))
        columns.print_all(reply)
    return reply


def _print_text(engine: Engine, token_ids: Sequence[int], params: SamplingParams) -> Reply:
    printer = _InOrder(params.n)
    reply = run_request(engine, token_ids, params, printer.take)
    printer.finish(reply)
    return reply


class _InOrder:
    """Prints samples one after the other: the first unfinished one as it comes, later ones once it is their turn."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._current = -1
        self._printed = 0

    def take(self, event: Event, reply: Reply) -> None:
        if self._current < 0:
            self._next()
        if isinstance(event, TokenDelta) and event.sample != self._current:
            return
        self._print_current(reply)
        while reply.samples[self._current].finished and self._current + 1 < self._num_samples:
            self._next()
            self._print_current(reply)

    def finish(self, reply: Reply) -> None:
        """Print what is left, if the request failed before every sample had its turn."""
        while self._current + 1 < self._num_samples:
            self._next()
            self._print_current(reply)
        print(flush=True)

    def _next(self) -> None:
        self._current += 1
        self._printed = 0
        if self._num_samples > 1:
            print(f"{'' if self._current == 0 else chr(10) * 2}--- sample {self._current + 1} of {self._num_samples} ---")

    def _print_current(self, reply: Reply) -> None:
        text = reply.samples[self._current].text[self._printed :]
        self._printed += len(text)
        # A terminal gets no control characters from a model; a file or a pipe gets exactly what the model said.
        print(clean(text) if sys.stdout.isatty() else text, end="", flush=True)


def _print_logprobs(tokenizer: "PreTrainedTokenizerBase", reply: Reply) -> None:
    for sample in reply.samples:
        print(f"\nlogprobs of sample {sample.index + 1}:")
        for token in sample.logprobs:
            alternatives = "  ".join(_show_token(tokenizer, *pair) for pair in token.alternatives)
            print(f"  {_show_token(tokenizer, token.token_id, token.logprob):<32}  {alternatives}".rstrip())


def _show_token(tokenizer: "PreTrainedTokenizerBase", token_id: int, logprob: float) -> str:
    return f"{tokenizer.decode([token_id])!r} {logprob:.3f}"


def _print_summary(reply: Reply) -> None:
    """Tell a person at a terminal what it cost; scripts have --json."""
    if sys.stderr is None or not sys.stderr.isatty():
        return
    seed = f" · seed {reply.started.seed}" if reply.started else ""
    Console(stderr=True, highlight=False).print(Text(reply.summary() + seed, "dim"))
