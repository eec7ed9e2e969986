"""The weights of the bench in the forms that other engines need, each made once and kept in the cache folder.

    bench/<digest of the weights>/plain/            float32, as transformers saves it
    bench/<digest of the weights>/onnx-<options>/   int4, by ONNX Runtime GenAI's own model builder

Invariant: all forms come from the same files, and a form that exists is complete.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chatpage.bench.peers.interface import Setup
from chatpage.errors import UnsupportedModelError

ONNX_OPTIONS = ("accuracy_level=4", "block_size=32", "is_symmetric=true", "prune_lm_head=true")
_TOKENIZER_FILES = ("tokenizer*", "special_tokens*", "chat_template*", "vocab*", "merges*")


def folder_of(setup: Setup) -> Path:
    """Return the folder of everything that was made of these weights."""
    from chatpage.engine.models.identity import weights_digest

    return setup.cache / weights_digest(setup.weights)[:32]


def plain_weights(setup: Setup) -> Path:
    """Return a folder with the weights as plain float32, as transformers saves it; made of a GGUF file on first use."""
    if setup.gguf is None:
        return setup.model
    from chatpage.engine.models.cache_dir import publishing

    target = folder_of(setup) / "plain"
    with publishing(target) as folder:
        if folder is not None:
            _save_plain(setup, folder)
    return target


def onnx_model(setup: Setup) -> Path:
    """Return a folder with the int4 model of ONNX Runtime GenAI, exported by its model builder on first use.

    Raises:
        UnsupportedModelError: The model builder failed.
    """
    from chatpage.engine.models.cache_dir import publishing

    target = folder_of(setup) / f"onnx-{'-'.join(option.replace('=', '.') for option in ONNX_OPTIONS)}"
    with publishing(target) as folder:
        if folder is not None:
            _export_onnx(plain_weights(setup), folder)
    return target


def _save_plain(setup: Setup, folder: Path) -> None:
    import torch

    from chatpage.config import EngineConfig
    from chatpage.engine.models import architecture
    from chatpage.engine.models.loading import find_model, load_weights

    files = find_model(EngineConfig(**setup.settings).model, show_progress=False)
    model = load_weights(files, architecture.read_config(files.settings), dtype=torch.float32, device=torch.device("cpu"))
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    for pattern in _TOKENIZER_FILES:
        for path in setup.model.glob(pattern):
            shutil.copy(path, folder)


def _export_onnx(plain: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="chatpage-onnx-") as scratch:
        module = "onnxruntime_genai.models.builder"
        assert importlib.util.find_spec("onnxruntime_genai"), "asked only if it is installed"
        command = [sys.executable, "-m", module, "-i", str(plain), "-o", str(folder), "-p", "int4", "-e", "cpu", "-c", scratch]
        done = subprocess.run(
            [*command, "--extra_options", *ONNX_OPTIONS],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    if done.returncode != 0:
        last = done.stdout.strip().splitlines()[-1:]
        raise UnsupportedModelError(f"ONNX Runtime GenAI's model builder failed: {''.join(last)}")
