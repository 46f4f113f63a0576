"""Places of a cluster between sweeps: all are used, none starves, gangs neither, priority decides the rest."""

import pytest

from ablate.execution.cluster_shares import FORGET_SECONDS, LESSER, Claim, Shares, fit

CASES = {
    "one sweep gets all it wants": ([("a", 0, 8)], 8, {"a": 8}),
    "one that wants little leaves the rest": ([("a", 0, 2), ("b", 0, 8)], 8, {"a": 2, "b": 6}),
    "equals share evenly": ([("a", 0, 8), ("b", 0, 8)], 8, {"a": 4, "b": 4}),
    "what does not divide goes to who asked first": (
        [("a", 1, 8), ("b", 1, 8), ("c", 1, 8)],
        8,
        {"a": 3, "b": 3, "c": 2},
    ),
    "the higher priority gets all but one each": (
        [("a", 0, 8), ("b", 0, 8), ("c", 5, 8)],
        8,
        {"a": 1, "b": 1, "c": 6},
    ),
    "what the higher does not want goes on": ([("a", 0, 8), ("b", 5, 3)], 8, {"a": 5, "b": 3}),
    "who has nothing to run is given nothing": ([("a", 0, 0), ("b", 0, 8)], 8, {"a": 0, "b": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_slots_go_by_priority_then_evenly_and_none_starves(case):
    claims, slots, expected = CASES[case]
    shares = Shares()
    for _ in range(2):  # the second time, all are known
        found = {
            name: len(shares.ask(name, Claim(wants, {"n": slots}, priority=priority), 100.0))
            for name, priority, wants in claims
        }
    assert found == expected


def test_a_sweep_that_is_silent_or_leaves_gives_its_places_back():
    shares, claim = Shares(), Claim(8, {"n": 8})
    shares.ask("a", claim, 0.0)
    assert len(shares.ask("b", claim, 20.0)) == 4
    assert len(shares.ask("b", claim, FORGET_SECONDS + 1)) == 8
    shares.ask("a", claim, 32.0)
    shares.leave("a")
    assert len(shares.ask("b", claim, 33.0)) == 8


def test_sweeps_of_cpus_and_of_gpus_are_not_in_each_others_way():
    shares = Shares()
    for _ in range(2):
        cpus = shares.ask("a", Claim(8, {"n": 4}, kind="CPU"), 0.0)
        gpus = shares.ask("b", Claim(8, {"n": 2}, kind="GPU", units=0.25), 0.0)
    assert (len(cpus), len(gpus)) == (4, 8)


FITS = {
    "on the fullest node that is large enough": (2, 1, {"a": 4, "b": 2, "c": 1}, {"b": 2}),
    "in equal parts where no node is": (4, 1, {"a": 2, "b": 3, "c": 1}, {"a": 2, "b": 2}),
    "on whole nodes where parts cannot be equal": (5, 1, {"a": 3, "b": 2}, {"a": 3, "b": 2}),
    "not at all": (5, 1, {"a": 2, "b": 2}, None),
    "a quarter of a GPU": (1, 0.25, {"a": 0.2, "b": 0.5}, {"b": 1}),
    "sixteen on two nodes of eight": (16, 1, {"a": 8, "b": 8, "c": 7}, {"a": 8, "b": 8}),
}


@pytest.mark.parametrize("case", FITS)
def test_a_trial_goes_on_one_node_where_it_can_and_else_on_as_few_as_possible(case):
    ranks, units, free, expected = FITS[case]
    assert fit(Claim(1, free, ranks, units), free) == expected


# A cluster in which time is a number


class Cluster:
    """Sweeps that obey their places on simulated nodes: what a pool does, a second at a time. A trial starts where its place is empty."""

    def __init__(self, nodes: dict[str, int], **sweeps: tuple[int, int, int]) -> None:
        """`sweeps`: ranks, seconds of one trial, and priority of each."""
        self.shares, self.nodes, self.sweeps, self.now = Shares(), nodes, sweeps, 0
        self.running: list[tuple[str, dict[str, int], int]] = []
        """Sweep, place, and when it ends."""
        self.used = dict.fromkeys(sweeps, 0)
        """Unit-seconds."""
        self.starts = {name: [] for name in sweeps}

    def free(self) -> dict[str, int]:
        taken = [place for _, place, _ in self.running]
        return {
            node: units - sum(place.get(node, 0) for place in taken) for node, units in self.nodes.items()
        }

    def second(self, active: list[str]) -> None:
        self.running = [item for item in self.running if item[2] > self.now]
        for name in active:
            ranks, seconds, priority = self.sweeps[name]
            own = [place for who, place, _ in self.running if who == name]
            claim = Claim(100, self.nodes, ranks, 1, priority, holds=ranks * len(own))
            places = self.shares.ask(name, claim, float(self.now))
            for place in own:
                if place in places:
                    places.remove(place)
            for place in places:
                free = self.free()
                if all(free[node] >= units for node, units in place.items()):
                    self.running.append((name, place, self.now + seconds))
                    self.starts[name].append(self.now)
        for name, place, _ in self.running:
            self.used[name] += sum(place.values())
        assert all(units >= 0 for units in self.free().values())
        self.now += 1


@pytest.mark.parametrize("nodes", [{"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 2}, {"a": 4, "b": 4, "c": 4}])
def test_a_gang_gets_its_turn_in_a_stream_of_small_trials(nodes):
    ranks = min(max(nodes.values()) * 2, sum(nodes.values()))
    cluster = Cluster(nodes, small=(1, 7, 0), gang=(ranks, 20, 0))
    for _ in range(60):
        cluster.second(["small"])
    for _ in range(2000):
        cluster.second(["small", "gang"])
    assert cluster.starts["gang"][0] <= 60 + 2 * 7 + 2  # as soon as the small trials in its places are over
    assert cluster.starts["small"][-1] > cluster.now - 200
    ratio = (cluster.used["small"] - 60 * sum(nodes.values())) / cluster.used["gang"]
    assert (
        0.5 < ratio < 2.0
    )  # equals: 1, but for what no gang fits into and what stands empty while places come free


def test_without_shares_the_same_gang_would_never_start():
    """Show what Ray does by itself, which is the reason for shares: as soon as a CPU is free, a small trial takes it."""
    free_at = [1, 4]  # two CPUs whose trials of 7 s end at different moments
    for now in range(1000):
        assert any(moment > now for moment in free_at)  # never both free
        free_at = [now + 7 if moment <= now else moment for moment in free_at]


def test_two_gangs_and_two_streams_all_get_on():
    cluster = Cluster({"a": 2, "b": 2}, s=(1, 3, 0), t=(1, 11, 0), g=(4, 15, 0), h=(2, 15, 0))
    for _ in range(4000):
        cluster.second(["s", "t", "g", "h"])
    assert all(starts[-1] > cluster.now - 400 for starts in cluster.starts.values())
    assert max(cluster.used.values()) < 3 * min(cluster.used.values())


def test_a_sweep_of_lower_priority_that_cannot_run_beside_a_higher_gets_a_lesser_turn():
    cluster = Cluster({"a": 1, "b": 1}, small=(1, 5, 0), gang=(2, 5, 1))
    for _ in range(4000):
        cluster.second(["small", "gang"])
    assert 0.5 * LESSER < cluster.used["gang"] / cluster.used["small"] < 2 * LESSER


def test_a_sweep_is_not_moved_about_while_nothing_changes():
    nodes, shares = {f"n{number}": 4 for number in range(8)}, Shares()
    asked = {
        "a": Claim(100, nodes),
        "b": Claim(100, nodes, ranks=4),
        "c": Claim(3, nodes, ranks=8, priority=2),
    }
    for name, claim in asked.items():
        shares.ask(name, claim, 0.0)
    seen = {
        name: {str(shares.ask(name, claim, float(now))) for now in range(20)} for name, claim in asked.items()
    }
    assert {name: len(found) for name, found in seen.items()} == {"a": 1, "b": 1, "c": 1}


def test_who_comes_late_has_no_more_of_a_right_than_who_was_there():
    cluster = Cluster({"a": 1, "b": 1}, first=(1, 5, 0), second=(2, 5, 0), late=(2, 5, 0))
    for _ in range(1000):
        cluster.second(["first", "second"])
    before = dict(cluster.used)
    for _ in range(300):
        cluster.second(["first", "second", "late"])
    assert all(cluster.used[name] - before[name] > 60 for name in cluster.used)


def test_what_a_sweep_had_while_all_had_room_is_not_held_against_it():
    shares, room = Shares(), {"n": 8}
    few, many = Claim(1, room, holds=1), Claim(7, room, holds=7)
    for now in range(1000):
        shares.ask("few", few, float(now))
        shares.ask("many", many, float(now))
    shares.ask("gang", Claim(1, room, ranks=8), 1000.0)
    shares.leave("few")
    assert not shares.ask("many", Claim(7, room), 1001.0)  # the gang's turn, which it has for a while
    for now in range(1001, 1012):
        shares.ask("gang", Claim(1, room, ranks=8, holds=8), float(now))
    assert len(shares.ask("many", Claim(7, room), 1012.0)) == 7
