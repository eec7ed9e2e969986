"""From a model name to something that computes: resolves the name, loads weights and tokenizer, and checks that they fit.

Invariant: a `LoadedModel` is whole and proved. No weight is missing, every layer goes through paged attention, and its logits
equal those of the model's own attention, or of plain torch on the weights of the fused runner; whatever is wrong is an error
that names the model and the remedy.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from chatpage.config import DEFAULT_MODEL, EngineConfig
from chatpage.engine.attention import IMPLEMENTATION, register
from chatpage.engine.model_runner import ModelRunner
from chatpage.engine.models import architecture, default_model, fused_loading, gguf_files, hub
from chatpage.engine.models.fused_runner import KV_DTYPE
from chatpage.engine.models.gguf_tensors import GgufTensors
from chatpage.engine.models.identity import model_id, weights_digest
from chatpage.engine.models.quantization import quantize_linears
from chatpage.engine.models.tokenizer import eos_token_ids, load_tokenizer
from chatpage.engine.models.transformers_runner import TransformersRunner
from chatpage.errors import BrokenModelError, ConfigError, ModelNotFoundError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHT_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies.

    Args:
        name: As the user gave it.
        settings: Folder of `config.json` and the tokenizer.
        weights: The files of weights; one `.gguf`, or those of the folder.
    """

    name: str
    settings: Path
    weights: tuple[Path, ...]

    @property
    def gguf(self) -> Path | None:
        return self.weights[0] if self.weights[0].suffix == ".gguf" else None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to serve.

    Args:
        name: As the user gave it.
        runner: Computes its steps.
        tokenizer: Text to tokens and back; has the chat template.
        dtype: Of activations and KV cache.
        device: Where it computes.
        description: For people: architecture, size, dtype, quantization.
        computed_by: For people: which runner, and why not the other.
        is_interim: The fused runner would serve it, once the C++ kernels are compiled.
    """

    name: str
    runner: ModelRunner
    tokenizer: "PreTrainedTokenizerBase"
    dtype: torch.dtype
    device: torch.device
    description: str
    computed_by: str
    is_interim: bool = False

    @property
    def is_outdated(self) -> bool:
        """Whether loading it again would make it faster."""
        return self.is_interim and fused_loading.are_kernels_ready()


def load_model(config: EngineConfig, *, show_progress: bool = True) -> LoadedModel:
    """Load the model of `config`, fetching it first if it is the default model or lies on a hub.

    Sets the number of threads of torch if `config.threads` is given.

    Raises:
        ModelNotFoundError: There is no such model here, nor on a reachable hub.
        ModelDownloadError: The default model could not be fetched.
        BrokenModelError: Its files are damaged or incomplete.
        UnsupportedModelError: Its architecture cannot be served by paged attention.
        ConfigError: A setting does not fit the model or the machine.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = resolve_device(config.device)
    resolve_dtype(config, device)  # a setting that cannot be is refused before a model is fetched
    files = find_model(config.model, show_progress=show_progress)
    reason = ""
    if files.gguf is not None:
        fused = _load_fused(
            config, files, architecture.read_written_config(files.settings), device, show_progress=show_progress
        )
        if isinstance(fused, LoadedModel):
            return fused
        reason = fused
    settings = architecture.read_config(files.settings)
    architecture.check_architecture(settings)
    max_len = architecture.max_model_len(settings, config.max_model_len)
    reason = reason or fused_loading.why_not(config, files.gguf, settings, device)
    return _load_with_transformers(config, files, settings, max_len=max_len, reason=reason)


def _load_fused(
    config: EngineConfig, files: ModelFiles, settings: "PreTrainedConfig", device: torch.device, *, show_progress: bool
) -> LoadedModel | str:
    """Load a model into the fused runner; return the reason if it is left to transformers."""
    assert files.gguf is not None, "only GGUF files come here"
    if reason := fused_loading.why_not(config, files.gguf, settings, device):
        return reason
    max_len = architecture.max_model_len(settings, config.max_model_len)
    tensors = GgufTensors(files.gguf, files.settings)
    library = fused_loading.why_not_these(config, tensors) or fused_loading.get_library(config, show_progress=show_progress)
    if isinstance(library, str):
        return library
    tokenizer = load_tokenizer(files.settings)
    try:
        runner, weights = fused_loading.load(
            tensors,
            settings,
            library,
            quantization=config.quantization,
            weights=weights_digest(files.weights),
            max_len=max_len,
            eos_token_ids=_as_ids(settings.get_text_config().eos_token_id) | eos_token_ids(tokenizer),
        )
    except fused_loading.FusedProbeError as error:
        log.warning("The model is computed by transformers: %s.", error)
        return str(error)
    computed_by = f"fused: packed weights and C++ kernels for {library.isa}"
    description = f"{settings.model_type}, {weights}, bfloat16, on cpu"
    return LoadedModel(files.name, runner, tokenizer, KV_DTYPE, torch.device("cpu"), description, computed_by)


def _load_with_transformers(
    config: EngineConfig, files: ModelFiles, settings: "PreTrainedConfig", *, max_len: int, reason: str
) -> LoadedModel:
    device = resolve_device(config.device)
    dtype, bits = resolve_dtype(config, device)
    tokenizer = load_tokenizer(files.settings)
    identity = model_id(
        weights=weights_digest(files.weights), config_json=settings.to_json_string(), dtype=str(dtype), quantization=bits
    )
    model = load_weights(files, settings, dtype=dtype, device=device)
    num_parameters = model.num_parameters()
    quantized = "" if bits == "none" else f", {quantize_linears(model, bits, head=model.get_output_embeddings())}"
    runner = TransformersRunner(
        model,
        model_id=identity,
        max_model_len=max_len,
        eos_token_ids=_eos_of_model(model) | eos_token_ids(tokenizer),
        dtype=dtype,
    )
    dtype_name = str(dtype).removeprefix("torch.")
    description = f"{settings.model_type}, {num_parameters / 1e6:,.0f} M parameters, {dtype_name}{quantized}, on {device}"
    is_interim = reason == fused_loading.COMPILING
    return LoadedModel(files.name, runner, tokenizer, dtype, device, description, f"transformers: {reason}", is_interim)


def find_model(name: str, *, show_progress: bool) -> ModelFiles:
    """Find the files of "default", a folder, a `.gguf` file or a hub id, in this order.

    Raises:
        ModelNotFoundError: It is none of these.
        ModelDownloadError: The default model could not be fetched.
        BrokenModelError: The folder has no weights, or the file is not GGUF.
    """
    if name == DEFAULT_MODEL:
        return _gguf_model(name, default_model.path(show_progress=show_progress))
    if not name.strip():
        raise ModelNotFoundError("The name of the model is empty: give a folder, a .gguf file, a hub id, or 'default'.")
    try:
        place = Path(name).expanduser()
        is_folder, is_file = place.is_dir(), place.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"{name[:80]!r} names no file or folder: {error}.") from error
    if is_folder:
        return _folder_model(name, place)
    if is_file:
        return _gguf_model(name, place)
    if place.suffix == ".gguf" or place.is_absolute() or name.startswith((".", "~")):
        raise ModelNotFoundError(f"There is no file or folder {place}.")
    return _folder_model(name, hub.fetch(name))


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Turn the setting into a device that exists.

    Raises:
        ConfigError: A GPU is asked for and torch sees none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        built = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no usable GPU"
        raise ConfigError(f"device is cuda, but {built}: use --device cpu, or install a torch and a driver that fit.")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(config: EngineConfig, device: torch.device) -> tuple[torch.dtype, Literal["none", "int8", "int4"]]:
    """Return the dtype of activations and KV cache, and how weights are quantized.

    "auto" is bfloat16 on a GPU and on CPUs with instructions for it, else float32; quantized weights need bfloat16.

    Raises:
        ConfigError: Quantization is asked for on a GPU, or with another dtype.
    """
    bits = "none" if config.quantization == "auto" else config.quantization
    if bits != "none":
        if device.type != "cpu":
            raise ConfigError(f"quantization {bits} is not available on {device.type}: use none, or --device cpu.")
        if config.dtype not in ("auto", "bfloat16"):
            raise ConfigError(f"quantization {bits} computes in bfloat16, but dtype is {config.dtype}: use --dtype bfloat16.")
        return torch.bfloat16, bits
    if config.dtype != "auto":
        return _DTYPES[config.dtype], bits
    return (torch.bfloat16 if device.type == "cuda" or _has_bfloat16_instructions() else torch.float32), bits


def load_weights(
    files: ModelFiles, settings: "PreTrainedConfig", *, dtype: torch.dtype, device: torch.device
) -> "PreTrainedModel":
    """Load a model with our attention, in evaluation mode, on its device.

    Raises:
        BrokenModelError: A file is damaged, or a weight is missing or has another shape.
        UnsupportedModelError: The model cannot be built with another attention than its own.
        ConfigError: It does not fit into the memory of the device.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, object] = {
        "config": settings,
        "dtype": dtype,
        "attn_implementation": register(),
        "local_files_only": True,
        "output_loading_info": True,
        "device_map": {"": device} if device.type != "cpu" else None,
    }
    try:
        with _quiet_transformers():
            if files.gguf is not None:
                loaded = gguf_files.load_weights(files.gguf, files.settings, dtype, options)
            else:
                loaded = AutoModelForCausalLM.from_pretrained(files.settings, trust_remote_code=False, **options)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{files.name} does not fit into the memory of {device}: {error}") from error
    except (BrokenModelError, UnsupportedModelError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (IMPLEMENTATION,):
            raise architecture.refusal(
                settings, "it chooses its attention from a list of its own and ignores the hook"
            ) from error
        raise BrokenModelError(f"The weights of {files.name} cannot be loaded ({type(error).__name__}: {error}).") from error
    model, info = cast("tuple[PreTrainedModel, dict[str, set[str]]]", loaded)
    if missing := sorted(info["missing_keys"]):
        raise BrokenModelError(
            f"{files.name} is incomplete: {len(missing)} weights are missing, such as {', '.join(missing[:3])}. Fetch it again."
        )
    if files.gguf is not None:
        with _quiet_transformers():
            gguf_files.keep_weights(model, files.settings, dtype)
    model.eval()
    return model


def _gguf_model(name: str, file: Path) -> ModelFiles:
    return ModelFiles(name, gguf_files.convert_settings(file), (file,))


def _folder_model(name: str, folder: Path) -> ModelFiles:
    for suffix in _WEIGHT_SUFFIXES:
        if files := tuple(sorted(folder.glob(f"*{suffix}"))):
            return ModelFiles(name, folder, files)
    if (folder / "config.json").is_file():
        raise BrokenModelError(f"{folder} has a config.json, but no weights (*.safetensors or *.bin).")
    ggufs = ", ".join(sorted(file.name for file in folder.glob("*.gguf")))
    hint = f" It has {ggufs}: name one of these files." if ggufs else ""
    raise ModelNotFoundError(f"{folder} holds no model: neither a config.json nor weights are in it.{hint}")


def _eos_of_model(model: "PreTrainedModel") -> frozenset[int]:
    settings = model.generation_config
    return _as_ids(settings.eos_token_id if settings is not None else model.config.get_text_config().eos_token_id)


def _as_ids(ids: int | list[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    return frozenset(int(i) for i in (ids if isinstance(ids, list) else [ids]))


def _has_bfloat16_instructions() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "") if cpuinfo.exists() else ""
    )
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep the progress bars and load reports of transformers off the terminal: what matters in them becomes an error."""
    from transformers.utils import logging

    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
