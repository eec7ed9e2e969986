"""What a user was told is as certain as it was told, no more and no less."""

import math

import pytest

from chatpage.chaos.ledger import Ledger
from chatpage.client import ServerError


def ledger_with(text: str, *, is_ended: bool = False) -> Ledger:
    """One reply of the run "run", heard letter by letter, one a second."""
    ledger = Ledger("ann", "mark0123")
    ledger.begins("chat", "node", 0.0, "run")
    for length in range(1, len(text) + 1):
        assert ledger.hears("run", "node", text[:length], float(length), 0.0) is None
    if is_ended:
        assert ledger.ends("run", "node", text) is None
    return ledger


def problem(ledger: Ledger, stored: str, max_lost_s: float = math.inf) -> str | None:
    finding = ledger.compare("node", stored, is_ended=True, max_lost_s=max_lost_s)
    return None if finding is None else finding.kind


@pytest.mark.parametrize("stored", ["The cat sa", "The cat sat!", "The dog sat", ""])
def test_a_text_whose_end_was_told_is_there_as_it_was(stored: str) -> None:
    ledger = ledger_with("The cat sat", is_ended=True)
    assert problem(ledger, "The cat sat") is None
    assert problem(ledger, stored) == "text changed"


def test_a_text_that_was_being_written_may_have_gone_on_unheard() -> None:
    assert problem(ledger_with("The cat"), "The cat sat", max_lost_s=0) is None


def test_a_text_that_was_being_written_may_miss_its_last_seconds_and_no_more() -> None:
    ledger = ledger_with("The cat sat")
    assert problem(ledger, "The cat s", max_lost_s=2) is None
    assert problem(ledger, "The cat ", max_lost_s=2) is None
    assert problem(ledger, "The cat", max_lost_s=2) == "text lost"
    assert problem(ledger, "The", max_lost_s=2) == "text lost"


def test_a_text_that_was_being_written_never_becomes_another() -> None:
    assert problem(ledger_with("The cat"), "The dog") == "text changed"


def test_a_snapshot_that_is_shorter_than_what_was_heard_is_a_loss() -> None:
    """A client that comes back after a crash replaces its text; what it had before must not be forgotten unchecked."""
    ledger = ledger_with("The cat sat")
    finding = ledger.hears("run", "node", "The", 12.0, 2.0)
    assert finding is not None
    assert finding.kind == "text lost"


def test_a_run_that_went_on_in_the_message_of_an_older_one_is_not_judged_by_the_older() -> None:
    """The old run, read again later, tells of the text as it was before: taken as news it looked like a text changed."""
    ledger = ledger_with("The cat", is_ended=True)
    ledger.begins("chat", "node", 20.0, "second")
    assert ledger.hears("second", "node", "The cat sat", 21.0, 0.0) is None
    assert ledger.ends("second", "node", "The cat sat") is None
    assert ledger.hears("run", "node", "The cat", 22.0, 0.0) is None
    assert ledger.ends("run", "node", "The cat") is None
    assert problem(ledger, "The cat sat") is None


def test_a_change_whose_answer_was_lost_may_have_happened_or_not() -> None:
    ledger = Ledger("ann", "mark0123")
    ledger.knows(("title", "chat"), "old")
    with pytest.raises(ConnectionError), ledger.changing(("title", "chat"), "new"):
        raise ConnectionError
    for title in ("old", "new"):
        assert ledger.compare_value(("title", "chat"), title) is None
    assert ledger.compare_value(("title", "chat"), "other") is not None


def test_a_change_that_was_refused_has_not_happened() -> None:
    ledger = Ledger("ann", "mark0123")
    ledger.knows(("title", "chat"), "old")
    with pytest.raises(ServerError), ledger.changing(("title", "chat"), "new"):
        raise ServerError("store_full", "the disk is full")
    assert ledger.compare_value(("title", "chat"), "new") is not None


def test_a_change_that_was_answered_has_happened() -> None:
    ledger = Ledger("ann", "mark0123")
    ledger.knows(("title", "chat"), "old")
    with ledger.changing(("title", "chat"), "new"):
        pass
    assert ledger.compare_value(("title", "chat"), "new") is None
    assert ledger.compare_value(("title", "chat"), "old") is not None
