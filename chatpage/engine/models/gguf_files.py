"""GGUF files, turned once into what transformers loads fast: a config, a tokenizer, and (for small models) plain weights.

transformers rebuilds the tokenizer and the names of the tensors from the file on every start, which takes longer than
everything else together. The result is kept in the cache folder under a digest of the file:

    gguf/<digest>/                config.json, tokenizer.json, chat_template.jinja, ...
    gguf/<digest>/<dtype>/        model.safetensors, for models of at most 1 GiB

Invariant: a changed file, or another transformers, has another digest, so nothing stale is ever loaded.
"""

import contextlib
import hashlib
import io
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chatpage.engine.models.cache_dir import cache_dir, publishing
from chatpage.engine.models.identity import weights_digest
from chatpage.errors import BrokenModelError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_CONVERTED_BYTES = 2**30
_MAGIC = b"GGUF"


def check_gguf(file: Path) -> None:
    """Check that a file is GGUF at all.

    Raises:
        BrokenModelError: It is not, or cannot be read.
    """
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise BrokenModelError(f"{file} cannot be read: {error.strerror}.") from error
    if magic != _MAGIC:
        raise BrokenModelError(f"{file} is not a GGUF file, or is damaged: it does not start with {_MAGIC.decode()}.")


def convert_settings(file: Path) -> Path:
    """Return a folder with the config and the tokenizer of a GGUF file, made on first use.

    Raises:
        BrokenModelError: The file is damaged or truncated.
        UnsupportedModelError: transformers cannot read GGUF files of this architecture.
    """
    check_gguf(file)
    digest = hashlib.sha256(f"{weights_digest([file])}\0{version('transformers')}".encode()).hexdigest()[:32]
    target = cache_dir() / "gguf" / digest
    with publishing(target) as folder:
        if folder is not None:
            from transformers import AutoConfig, AutoTokenizer

            try:
                AutoConfig.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
                AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
            except Exception as error:
                raise _explain(file, error) from error
    return target


def load_weights(file: Path, settings: Path, dtype: torch.dtype, load_options: dict[str, Any]) -> object:
    """Load the weights of a GGUF file as plain tensors of `dtype`; return what `from_pretrained` returns.

    Args:
        file: The GGUF file.
        settings: Its folder from `convert_settings`.
        dtype: Of the weights.
        load_options: For `from_pretrained`.

    Raises:
        BrokenModelError: The file is damaged or truncated.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    converted = settings / _dtype_name(dtype)
    if converted.exists():
        return AutoModelForCausalLM.from_pretrained(converted, **load_options)
    try:
        # transformers draws a progress bar here that none of its settings turns off.
        with contextlib.redirect_stderr(io.StringIO()):
            # Kept packed, as is the default, the weights would be unpacked again for every product.
            loaded: object = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), **load_options
            )
    except Exception as error:
        raise _explain(file, error) from error
    return loaded


def _explain(file: Path, error: Exception) -> BrokenModelError | UnsupportedModelError:
    if "not supported" in str(error):
        return UnsupportedModelError(f"{file.name}: transformers cannot read this GGUF file ({error}).")
    return BrokenModelError(f"{file} is damaged or incomplete ({type(error).__name__}: {error}).")


def keep_weights(model: "PreTrainedModel", settings: Path, dtype: torch.dtype) -> None:
    """Keep the plain weights of a small model for the next start; a large one would fill the disk a second time."""
    num_bytes = sum(parameter.numel() * dtype.itemsize for parameter in model.parameters())
    if num_bytes > MAX_CONVERTED_BYTES:
        return
    with publishing(settings / _dtype_name(dtype)) as folder:
        if folder is not None:
            model.save_pretrained(folder)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
