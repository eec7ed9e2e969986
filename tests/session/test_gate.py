"""Who finds no place is told when to come, and finds one then, whatever those do who do not listen."""

import itertools
import random

from chatpage.session.gate import GRACE_S, LONGEST_AGAIN_S, LONGEST_S, MAX_PROMISES, Gate


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def full_gate(num_places: int = 1) -> tuple[Gate, Clock]:
    clock = Clock()
    gate = Gate(num_places, clock=clock)
    for i in range(num_places):
        assert gate.has_place_for(i)
        gate.take(i)
    return gate, clock


def test_a_place_is_kept_for_who_comes_as_told() -> None:
    gate, clock = full_gate()
    wait_s = gate.promise("ann")
    gate.give_back()
    clock.now += wait_s
    assert not gate.has_place_for("bob")
    assert gate.has_place_for("ann")
    gate.take("ann")
    assert gate.num_promises == 0


def test_who_comes_too_early_is_told_the_same_moment_and_moves_nobody() -> None:
    """One that asked ten times a second would else move the others into next week."""
    gate, clock = full_gate()
    moment = clock.now + gate.promise("ann")
    for _ in range(5):
        clock.now += 0.1
        assert abs(clock.now + gate.promise("ann") - moment) < 1e-6
    assert gate.promise("bob") < 2.0
    assert gate.num_promises == 2


def test_a_place_is_not_kept_for_ever() -> None:
    gate, clock = full_gate()
    clock.now += gate.promise("gone")
    gate.give_back()
    assert not gate.has_place_for("bob")
    clock.now += GRACE_S + 0.1
    assert gate.has_place_for("bob")
    gate.take("bob")
    gate.promise("carl")
    assert gate.num_promises == 1


def test_who_comes_as_told_and_still_finds_none_stays_before_the_others() -> None:
    gate, clock = full_gate()
    clock.now += gate.promise("ann")
    for _ in range(20):
        assert not gate.has_place_for("ann")
        clock.now += gate.promise("ann")
    gate.give_back()
    assert not gate.has_place_for("bob")
    assert gate.has_place_for("ann")


def test_a_place_is_not_kept_for_ever_for_who_came_once_and_is_gone() -> None:
    """Where places were given back every four seconds, the next one was idle for more than half a minute."""
    gate, clock = full_gate()
    for _ in range(10):
        clock.now += 4.0
        gate.give_back()
        gate.take("next")
    gone = {f"gone{i}": clock.now + gate.promise(f"gone{i}") for i in range(4)}
    for who, moment in gone.items():
        clock.now = moment
        assert gate.promise(who) <= LONGEST_AGAIN_S
    gate.give_back()
    assert not gate.has_place_for("bob")
    clock.now += LONGEST_AGAIN_S + GRACE_S + 0.1
    assert gate.has_place_for("bob")


def test_who_comes_as_told_is_served_beside_some_who_never_stop_asking() -> None:
    """The only place is always given back while the patient one is away, and the others are there."""
    gate, clock = full_gate()
    wait_s = gate.promise("ann")
    for _ in range(20):
        clock.now += wait_s
        wait_s = gate.promise("ann")
        clock.now += wait_s / 2
        gate.give_back()
        assert not any(gate.has_place_for(f"rude{i}") for i in range(3))
        gate.take("quicker than anybody")
        for i in range(3):
            gate.promise(f"rude{i}")
        clock.now += wait_s / 2
        wait_s = 0.0


def test_who_was_told_the_earlier_moment_goes_first() -> None:
    gate, clock = full_gate()
    gate.promise("ann")
    clock.now += gate.promise("bob")
    gate.give_back()
    assert not gate.has_place_for("bob")
    assert gate.has_place_for("ann")
    clock.now += GRACE_S
    assert gate.has_place_for("bob"), "ann did not come"


def test_who_comes_as_told_while_nothing_moves_is_told_longer_times() -> None:
    """For half a minute the first replies all went on, and each client asked more than a hundred times."""
    gate, clock = full_gate(2)
    for _ in range(10):
        clock.now += 0.05
        gate.give_back()
        gate.take("quick")
    begin, num_told = clock.now, 0
    while clock.now < begin + 30.0:
        clock.now += gate.promise("ann")
        num_told += 1
    assert num_told < 13
    gate.give_back()
    assert gate.has_place_for("ann")


def test_moments_follow_each_other_as_fast_as_places_were_given_back() -> None:
    gate, clock = full_gate(10)
    for _ in range(40):
        clock.now += 0.25
        gate.give_back()
        gate.take("next")
    waits = [gate.promise(i) for i in range(10)]
    steps = [b - a for a, b in itertools.pairwise(waits)]
    assert all(0.2 < step < 0.3 for step in steps), waits


def test_places_that_are_given_back_all_at_once_are_not_taken_for_a_habit() -> None:
    """Replies that began together end together: 64 places in half a second, and then none for ten.

    Whoever asked in between was told to come in an eighth of a second, eighty times.
    """
    gate, clock = full_gate(64)
    for _ in range(3):
        clock.now += 9.5
        for _ in range(64):
            clock.now += 0.5 / 64
            gate.give_back()
            gate.take("next")
    waits = [gate.promise(i) for i in range(10)]
    steps = [b - a for a, b in itertools.pairwise(waits)]
    assert all(0.1 < step < 0.25 for step in steps), waits


def test_nobody_is_told_more_than_a_minute_and_what_is_kept_is_bounded() -> None:
    gate, _ = full_gate()
    assert max(gate.promise(i) for i in range(MAX_PROMISES + 100)) <= LONGEST_S
    assert gate.num_promises == MAX_PROMISES


def test_all_who_listen_are_served_beside_ten_times_as_many_who_do_not() -> None:
    """With places for whoever came first, one that waited as told found the place taken nine times of ten."""
    gate, clock = full_gate(5)
    chance = random.Random(1)
    num_served = 0
    patient = {f"patient{i}": clock.now for i in range(20)}
    ends = [clock.now + i for i in range(5)]
    while clock.now < 1300.0:
        clock.now += 0.1
        while ends and ends[0] <= clock.now:
            ends.pop(0)
            gate.give_back()
        asking = [who for who, moment in patient.items() if moment <= clock.now]
        asking += [f"rude{chance.randrange(200)}" for _ in range(2)]
        for who in chance.sample(asking, len(asking)):
            if gate.has_place_for(who):
                gate.take(who)
                ends.append(clock.now + 5.0)
                num_served += 1
                patient.pop(who, None)
            elif who in patient:
                patient[who] = clock.now + gate.promise(who)
            else:
                gate.promise(who)
    assert not patient, patient
    assert num_served > 100
