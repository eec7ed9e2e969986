"""What is never computed twice, on a tiny model."""

from pathlib import Path

import pytest

from chatpage.bench.counters import Counter, count_all
from tests.engine.engines import assert_whole, tiny_engine
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> list[Counter]:
    folder: Path = save_tiny_llama(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)
    engine = tiny_engine(
        model=str(folder), kv_memory=2**24, block_size=16, max_batched_tokens=512, check_integrity=False, max_model_len=8192
    )
    counted = count_all(engine)
    assert_whole(engine)
    return counted


def test_nothing_is_computed_copied_or_stored_twice(counters: list[Counter]) -> None:
    assert [counter for counter in counters if not counter.is_ok] == []


def test_the_counts_are_taken_at_full_length(counters: list[Counter]) -> None:
    names = " ".join(counter.name for counter in counters)
    for part in (
        "next turn",
        "regenerating",
        "fork at 4,000 tokens",
        "8 samples of 1,000 tokens",
        "4 equal",
        "editing",
    ):
        assert part in names


def test_a_small_context_shortens_the_prompts_but_not_the_rules(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "short", max_position_embeddings=512)
    engine = tiny_engine(model=str(folder), kv_memory=2**21)
    counted = count_all(engine)
    assert all(counter.is_ok for counter in counted), counted
    assert any("412 tokens" in counter.name for counter in counted)
    assert_whole(engine)


def test_a_count_that_is_off_is_seen() -> None:
    """Without anything kept, regenerating has to compute the last prompt token, and no more than that."""
    engine = tiny_engine(kv_memory=2**21, kept_tips=0)
    counted = {counter.name: counter for counter in count_all(engine)}
    assert counted["regenerating computes prompt tokens"].seen == "1"
