"""Backends in these tests never change by themselves, as they do while the kernels of a CPU are compiled."""

import pytest

from chatpage.engine import kv_cache
from tests.engine.model_driving import reference_backend


@pytest.fixture(autouse=True)
def steady_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "backend_for", reference_backend)
