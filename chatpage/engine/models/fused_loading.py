"""Decides whether the fused runner serves a model, loads it, and proves it.

It takes GGUF files of the llama family on a CPU, whose weights it can read as they are. It needs the C++ kernels: where they
are not built yet, a start with `--quantization auto` leaves the model to transformers, so that the first answer does not wait
for a compiler; a server loads it again once they are built and it is idle. `int4` and `int8` ask for them and wait.

Invariant: a runner that is returned computed the logits of plain torch on its own weights, within what 8-bit activations lose.
"""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from chatpage.config import EngineConfig
from chatpage.engine.models import llama_shape, packed_weights
from chatpage.engine.models.fused_runner import KV_DTYPE, FusedRunner
from chatpage.engine.models.gguf_tensors import GgufTensors
from chatpage.engine.models.guards import paged_logits
from chatpage.engine.models.identity import model_id
from chatpage.engine.models.packed_reference import reference_logits
from chatpage.engine.models.packed_weights import Bits, PackedModel
from chatpage.errors import BrokenModelError
from chatpage_kernels.cpu import build
from chatpage_kernels.cpu.library import Library

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

COMPILING = "the C++ kernels are being compiled"  # why a model is left to transformers for now

_LENGTHS = ((3, 6), (8, 12))  # first and second chunk of the probe's sequences
_MAX_ERROR, _MAX_MEDIAN_ERROR = 0.8, 0.2  # of logit rows, relative to their spread; see `prove`


class FusedProbeError(Exception):
    """The kernels compute something else than torch; internal: the model is left to transformers."""


def why_not(config: EngineConfig, gguf: Path | None, settings: "PreTrainedConfig", device: torch.device) -> str:
    """Say why a model is left to transformers, as far as its settings tell; empty if nothing speaks against the fused runner.

    Args:
        config: As the user gave it.
        gguf: The file of the weights, if they are one.
        settings: The model's own config.
        device: Where it will compute.
    """
    if device.type != "cpu":
        return f"the fused runner is for CPUs, not {device.type}"
    if gguf is None:
        return "the fused runner reads GGUF files, and the weights are none"
    if config.quantization == "none":
        return "quantization is none"
    if config.dtype not in ("auto", "bfloat16"):
        return f"dtype is {config.dtype}, and the fused runner keeps keys and values in bfloat16"
    return llama_shape.why_unsupported(settings)


def why_not_these(config: EngineConfig, tensors: GgufTensors) -> str:
    """Say why the weights of a file are left to transformers; empty if they can be packed.

    Args:
        config: As the user gave it; "auto" quantizes nothing that is not quantized in the file.
        tensors: Of the file.
    """
    names = [f"blk.0.{name}.weight" for name in packed_weights.MATRICES]
    if missing := [name for name in names if name not in tensors]:
        return f"the file has no {missing[0]}, so its layers are others than those of a llama"
    if config.quantization == "auto" and not all(tensors.is_quantized(name) for name in names):
        return "the weights of the file are not quantized (--quantization int8 or int4 would do it)"
    return ""


def get_library(config: EngineConfig, *, show_progress: bool) -> Library | str:
    """Return the C++ kernels, or why there are none now; waits for them only if the user asked for small weights.

    Args:
        config: As the user gave it.
        show_progress: Say on stderr that a compiler runs.
    """
    build.start()
    if config.quantization != "auto" and build.library() is None:
        text = "Compiling the C++ kernels (once) …"
        with Console(stderr=True).status(text) if show_progress else contextlib.nullcontext():
            build.wait()
    if (library := build.library()) is not None:
        return library
    if build.is_running():
        log.info("The model is computed by transformers until the C++ kernels are compiled.")
        return COMPILING
    return build.describe()


def are_kernels_ready() -> bool:
    """Whether the C++ kernels have been built meanwhile."""
    return build.library() is not None


def load(
    tensors: GgufTensors,
    settings: "PreTrainedConfig",
    library: Library,
    *,
    quantization: str,
    weights: str,
    max_len: int,
    eos_token_ids: frozenset[int],
) -> tuple[FusedRunner, str]:
    """Read a model into packed weights, prove it, and return its runner with a description of the weights.

    Args:
        tensors: Of the file.
        settings: The model's own config, without a reason in `why_not`.
        library: The C++ kernels.
        quantization: "auto", "int8" or "int4".
        weights: Digest of the weights.
        max_len: Longest sequence.
        eos_token_ids: Tokens with which the model ends an answer.

    Raises:
        BrokenModelError: A tensor is missing, cannot be read, or has another shape than the config says.
        FusedProbeError: The kernels compute something else than torch.
    """
    bits: Bits = "as in the file" if quantization == "auto" else "int8" if quantization == "int8" else "int4"
    shape = llama_shape.read_shape(settings, max_len=max_len)
    identity = model_id(
        weights=weights, config_json=settings.to_json_string(), dtype=str(KV_DTYPE), quantization=f"packed {bits}"
    )
    try:
        model = packed_weights.read_gguf(tensors, shape, model_type=settings.model_type, bits=bits)
        runner = FusedRunner(model, library, model_id=identity, max_model_len=max_len, eos_token_ids=eos_token_ids)
        prove(runner, model)
    except ValueError as error:
        raise BrokenModelError(f"The tensors of {tensors.file} do not fit together or its config: {error}.") from error
    size = f"{model.num_parameters / 1e6:,.0f} M parameters in {model.num_bytes / 2**20:,.0f} MiB"
    return runner, f"{size} ({model.formats})"


def prove(runner: FusedRunner, model: PackedModel) -> None:
    """Compare the runner with plain torch on the same weights: two sequences side by side, each in two chunks.

    8-bit activations and bfloat16 keys move the logits of SmolLM2-135M by 7 % of their spread (median; 4 % where all of it is
    bfloat16) and single rows by up to 40 %; a wrong kernel, or one that was compiled wrongly, moves a row by 100 %.

    Raises:
        FusedProbeError: They differ by more.
    """
    chunks = [(min(first, runner.max_model_len // 2), min(second, runner.max_model_len // 2)) for first, second in _LENGTHS]
    generator = torch.Generator().manual_seed(0)
    high = min(runner.vocab_size, 1000)
    sequences = [torch.randint(0, high, (sum(pair),), generator=generator) for pair in chunks]
    cuts = [first for first, _ in chunks]
    actual = paged_logits(runner.forward, runner.layer_specs, sequences, cuts=cuts, dtype=KV_DTYPE, device=torch.device("cpu"))
    expected = reference_logits(model, sequences)
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-30)
    error = (torch.cat(actual) - expected).norm(dim=-1) / spread
    if not (error.max() < _MAX_ERROR and error.median() < _MAX_MEDIAN_ERROR):  # a NaN is never below
        raise FusedProbeError(f"the C++ kernels differ from torch by {error.median():.0%} (median; at most {error.max():.0%})")
