"""An error is explained by a fault that can cause it, and by no other."""

import math
import time

from chatpage.chaos.weather import GRACE_S, Spell, Weather


def weather_with(kind: str, *, seconds_ago: float = 0.0) -> Weather:
    end = time.monotonic() - seconds_ago
    return Weather(2.0, [Spell(kind, end - 1, end)])


def test_a_bug_is_explained_by_nothing() -> None:
    for kind in ("kill_server", "full_disk", "cut"):
        assert not weather_with(kind).explains("internal_error", is_retryable=False)


def test_a_full_disk_is_explained_while_it_is_full_and_shortly_after() -> None:
    assert weather_with("full_disk").explains("store_full", is_retryable=False)
    assert not weather_with("full_disk", seconds_ago=GRACE_S + 1).explains("store_full", is_retryable=False)
    assert not weather_with("cut").explains("store_full", is_retryable=False)


def test_a_dead_engine_is_explained_by_a_fault_and_not_by_fair_weather() -> None:
    assert weather_with("kill_engine").explains("engine_dead", is_retryable=True)
    assert not Weather(2.0).explains("engine_dead", is_retryable=True)


def test_only_a_hard_kill_costs_seconds_of_a_reply() -> None:
    assert weather_with("kill_server").most_lost_s(since=-math.inf) == 2.0
    assert weather_with("kill_server").most_lost_s(since=math.inf) == 0.0
    assert weather_with("drain").most_lost_s(since=-math.inf) == 0.0
    assert weather_with("full_disk").most_lost_s(since=-math.inf) == math.inf


def test_a_reply_is_interrupted_by_what_ends_a_server_or_its_engine() -> None:
    assert weather_with("drain").explains_interruption(since=-math.inf)
    assert not weather_with("cut").explains_interruption(since=-math.inf)
