"""The store stands on its own."""

import os
import subprocess
import sys


def test_the_store_knows_neither_the_engine_nor_torch() -> None:
    """Imported by a command that only lists conversations, it must not load a gigabyte of libraries."""
    code = "import sys, chatpage.store; print(*sorted(name for name in sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "chatpage.store.store" in loaded
    assert not [n for n in loaded if n.split(".")[0] in ("torch", "transformers") or n.startswith("chatpage.engine")]
