"""What this machine has, and what chatpage will use: `chatpage doctor`.

Invariant: what it says of the model and the memory is read from an engine that was loaded, not predicted.
"""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from chatpage.config import EngineConfig
from chatpage.engine.core import Engine
from chatpage.engine.kv_cache import backend_for
from chatpage.engine.memory_limits import available_memory
from chatpage.errors import ChatpageError
from chatpage.terminal.text import count, format_bytes
from chatpage_kernels.cpu import features, toolchain

Row = tuple[str, str]

_PACKAGES = ("torch", "transformers", "triton")
_SHOWN_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def run_doctor(config: EngineConfig, console: Console) -> None:
    """Print the machine, then load the engine of `config` and print what it uses.

    Raises:
        ChatpageError: The engine cannot be loaded; what is known of the machine was printed before.
    """
    _print(console, "this machine", describe_machine())
    with Console(stderr=True).status(f"loading {config.model} …"):
        try:
            engine = Engine.load(config)
        except ChatpageError:
            _print(console, "will not work", describe_settings(config))
            raise
    _print(console, "will be used", describe_engine(engine))


def describe_machine() -> Iterable[Row]:
    """Yield name and value of what can be said without a model."""
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in ("chatpage", *_PACKAGES))
    yield "CPU", f"{_cpu_name()}, {count(os.cpu_count() or 1, 'core')}, torch uses {torch.backends.cpu.get_cpu_capability()}"
    flags = features.cpu_flags()
    yield "CPU features", ", ".join(name for name in _SHOWN_FLAGS if name in flags) or "none that matter here"
    yield "GPU", _gpu()
    yield "C++ compiler", _compiler()
    yield "memory", f"{format_bytes(available_memory(torch.device('cpu')))} available"


def describe_settings(config: EngineConfig) -> Iterable[Row]:
    """Yield the settings that differ from their defaults."""
    for name, value in config.model_dump(exclude_defaults=True).items():
        yield name, str(value)


def describe_engine(engine: Engine) -> Iterable[Row]:
    """Yield what a loaded engine uses."""
    model, config, memory = engine.model, engine.config, engine.memory()
    backend = backend_for(model.runner.layer_specs, model.dtype, model.device)
    yield "model", model.name
    yield "", model.description
    yield "device", str(model.device)
    yield "dtype", str(model.dtype).removeprefix("torch.")
    yield "computed by", model.computed_by
    yield "threads", str(torch.get_num_threads())
    yield "context", f"{count(engine.max_model_len, 'token')} (the model allows {model.runner.max_model_len:,})"
    yield "attention", f"{backend.name}: {backend.reason}"
    blocks, tokens = count(memory.num_blocks, "block"), count(memory.num_blocks * memory.block_size, "token")
    yield "KV cache", f"{blocks} of {memory.block_size} tokens: {tokens}, {format_bytes(memory.bytes_total)}"
    yield "block", f"{format_bytes(memory.bytes_per_block)} over all layers"
    tokens, sequences = count(config.max_batched_tokens, "token"), count(config.max_num_seqs, "sequence")
    yield "step", f"at most {tokens} of {sequences}"


def _print(console: Console, title: str, rows: Iterable[Row]) -> None:
    console.print(Text(title, "bold cyan"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=14)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(value))
    console.print(table)


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "none" if torch.version.cuda else "none (this torch was built without CUDA)"
    index = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(index)
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {format_bytes(free)} of {format_bytes(total)} free"


def _compiler() -> str:
    try:
        compiler = toolchain.find_compiler()
    except toolchain.BuildError as error:
        return str(error)
    return f"{compiler.path} ({compiler.version})"
