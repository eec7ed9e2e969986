"""Loading is held for faster until it was measured to be slower."""

from chatpage.engine.kv_disk.pace import Pace


def _pace() -> tuple[Pace, list[float]]:
    now = [0.0]
    return Pace(lambda: now[0]), now


def test_loading_is_taken_to_be_faster_until_there_is_evidence() -> None:
    pace, _ = _pace()
    pace.note_step(100, 0.1)
    pace.note_load(10, 0.5)
    assert pace.is_loading_faster


def test_a_disk_slower_than_the_model_is_left_alone_for_a_while() -> None:
    pace, now = _pace()
    pace.note_step(100, 0.1)
    pace.note_load(600, 0.6)
    pace.note_load(300, 0.6)
    assert not pace.is_loading_faster
    now[0] = 601.0
    assert pace.is_loading_faster


def test_a_faster_disk_stays_in_use() -> None:
    pace, _ = _pace()
    pace.note_step(100, 0.1)
    for _ in range(10):
        pace.note_load(2000, 1.0)
    assert pace.is_loading_faster


def test_a_step_that_only_decodes_says_nothing_about_prefill() -> None:
    pace, _ = _pace()
    pace.note_step(8, 0.0001)
    pace.note_load(10, 5.0)
    assert pace.is_loading_faster


def test_a_disk_that_hangs_is_left_alone() -> None:
    pace, _ = _pace()
    pace.avoid_loading()
    assert not pace.is_loading_faster
