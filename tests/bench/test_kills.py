"""A server that is killed while it streams loses no text that was complete, and what was cut goes on."""

import random
import sys
from pathlib import Path

import pytest

from chatpage.bench.kills import Trial
from tests.tiny_models import tiny_llama_folder


@pytest.mark.skipif(sys.platform != "linux", reason="looks for child processes in /proc")
def test_three_kills_lose_nothing(tmp_path: Path) -> None:
    """`python -m chatpage.bench.kills` does it fifty times."""
    arguments = ["--model", str(tiny_llama_folder()), "--device", "cpu", "--dtype", "float32", "--kv-memory", "4MiB"]
    trial = Trial(tmp_path, arguments, random.Random(4))
    for _ in range(3):
        trial.kill()
    assert trial.num_cut >= 3
    assert any(reply.is_whole for reply in trial.seen)
