"""Slots of a cluster between sweeps: all are used, none starves, priority decides the rest."""

import pytest

from ablate.shares import Shares

CASES = {
    "one sweep gets all it wants": ([("a", 0, 8)], 8, {"a": 8}),
    "one that wants little leaves the rest": ([("a", 0, 2), ("b", 0, 8)], 8, {"a": 2, "b": 6}),
    "equals share evenly": ([("a", 0, 8), ("b", 0, 8)], 8, {"a": 4, "b": 4}),
    "what does not divide goes to who asked first": ([("a", 1, 8), ("b", 1, 8), ("c", 1, 8)], 8, {"a": 3, "b": 3, "c": 2}),
    "the higher priority gets all but one each": ([("a", 0, 8), ("b", 0, 8), ("c", 5, 8)], 8, {"a": 1, "b": 1, "c": 6}),
    "what the higher does not want goes on": ([("a", 0, 8), ("b", 5, 3)], 8, {"a": 5, "b": 3}),
    "fewer slots than sweeps": ([("a", 0, 8), ("b", 0, 8), ("c", 5, 8)], 2, {"a": 1, "b": 1, "c": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_slots_go_by_priority_then_evenly_and_none_starves(case):
    claims, slots, expected = CASES[case]
    shares = Shares()
    for _ in range(2):  # the second time, all are known
        found = {name: shares.ask(name, priority, wants, slots, 100.0) for name, priority, wants in claims}
    assert found == expected


def test_a_sweep_that_is_silent_or_leaves_gives_its_slots_back():
    shares = Shares()
    shares.ask("a", 0, 8, 8, 0.0)
    assert shares.ask("b", 0, 8, 8, 20.0) == 4
    assert shares.ask("b", 0, 8, 8, 31.0) == 8
    shares.ask("a", 0, 8, 8, 32.0)
    shares.leave("a")
    assert shares.ask("b", 0, 8, 8, 33.0) == 8
