"""Placements of a sweep's trials: where a trial goes, what a sweep keeps, and that sweeps on one cluster all end."""

import pytest

from ablate.execution.workers.placement import Need, Place, placements

FITS = {
    "on the fullest node that is large enough": (2, 0, {"a": 4, "b": 2, "c": 1}, {"b": 2}),
    "on the first of equal nodes": (2, 0, {"b": 2, "a": 2}, {"b": 2}),
    "in equal parts where no node is": (4, 0, {"a": 2, "b": 3, "c": 1}, {"a": 2, "b": 2}),
    "on whole nodes where parts cannot be equal": (5, 0, {"a": 3, "b": 2}, {"a": 3, "b": 2}),
    "not at all": (5, 0, {"a": 2, "b": 2}, None),
    "not on a node that has less than nothing": (2, 0, {"a": -1, "b": 1}, None),
    "a quarter of a GPU": (1, 0.25, {"a": 0.2, "b": 0.5}, {"b": 1}),
    "sixteen on two nodes of eight": (16, 1, {"a": 8, "b": 8, "c": 7}, {"a": 8, "b": 8}),
}


@pytest.mark.parametrize("case", FITS)
def test_a_trial_goes_on_one_node_where_it_can_and_else_on_as_few_as_possible(case):
    ranks, gpus, free, expected = FITS[case]
    assert Need(gpus, ranks).fit(free) == expected


COUNTS = {
    "as many as there is room for": (8, {"n": 4}, {"n": 4}, [], 4),
    "as many as are wanted": (3, {"n": 4}, {"n": 4}, [], 3),
    "what others use is not taken": (8, {"n": 4}, {"n": 1}, [], 1),
    "what the sweep has stays, and others' is not taken": (8, {"n": 4}, {"n": 1}, [{"n": 1}] * 2, 3),
    "its own new actors are not yet counted as use": (8, {"n": 4}, {"n": 4}, [{"n": 1}] * 3, 4),
    "what it has on a lost node goes": (8, {"n": 4}, {"n": 4, "lost": 4}, [{"lost": 1}], 4),
    "what it has beyond its wish goes": (1, {"n": 4}, {"n": 1}, [{"n": 1}] * 3, 1),
    "a node that Ray does not list yet has nothing free": (8, {"n": 4, "new": 4}, {"n": 4}, [], 4),
}


@pytest.mark.parametrize("case", COUNTS)
def test_a_sweep_keeps_its_places_and_takes_unused_units(case):
    wants, room, unused, held, expected = COUNTS[case]
    assert len(placements(Need(0, 1), wants, room, unused, held)) == expected


def test_a_gang_that_waits_keeps_its_nodes_from_the_other_trials_of_its_sweep():
    need, two = Need(0, 8), {"a": 4, "b": 4}
    first = placements(need, 9, two, two, [])
    assert first == [{"a": 4, "b": 4}]
    joined = two | {"c": 8, "d": 4}  # others took units of its nodes before it could start
    assert placements(need, 9, joined, {"a": 2, "b": 4, "c": 8, "d": 4}, first) == [*first, {"c": 8}]


def test_a_gang_that_has_waited_for_long_goes_where_units_are_free_and_stays_where_none_are():
    need, lost = Need(0, 2), {"a": 1, "b": 1}
    room = dict.fromkeys("abcd", 1)
    assert placements(need, 1, room, {"a": 0, "b": 1, "c": 1, "d": 1}, [lost], [lost]) == [{"c": 1, "d": 1}]
    assert placements(need, 1, room, {"a": 0, "b": 1, "c": 1, "d": 0}, [lost], [lost]) == [lost]
    assert placements(need, 1, room, {"a": 0, "b": 1, "c": 1, "d": 1}, [lost]) == [lost]


# A cluster in which time is a number


class Cluster:
    """Sweeps that take unused units of simulated nodes and keep them while they have trials: what a pool does, a second at a time."""

    def __init__(self, nodes: dict[str, int], **sweeps: tuple[int, int, int, int]) -> None:
        """`sweeps`: ranks, seconds of one trial, number of trials, and most at once of each."""
        self.nodes, self.sweeps, self.now = nodes, sweeps, 0
        self.held: dict[str, list[Place]] = {name: [] for name in sweeps}
        self.running: dict[str, list[int]] = {name: [] for name in sweeps}
        """Times at which the trials of each sweep end."""
        self.left = {name: trials for name, (_, _, trials, _) in sweeps.items()}
        """Trials that each sweep has not started."""
        self.ended: dict[str, int] = {}

    def unused(self) -> dict[str, int]:
        places = [place for held in self.held.values() for place in held]
        return {
            node: units - sum(place.get(node, 0) for place in places) for node, units in self.nodes.items()
        }

    def second(self, name: str) -> None:
        ranks, seconds, _, most = self.sweeps[name]
        running = self.running[name] = [end for end in self.running[name] if end > self.now]
        wants = min(most, len(running) + self.left[name])
        self.held[name] = placements(Need(0, ranks), wants, self.nodes, self.unused(), self.held[name])
        assert all(units >= 0 for units in self.unused().values())
        starts = min(len(self.held[name]) - len(running), self.left[name])
        running += [self.now + seconds] * starts
        self.left[name] -= starts
        if not wants:
            self.ended.setdefault(name, self.now)

    def run(self, seconds: int) -> dict[str, int]:
        """Return the second at which each sweep ended."""
        while self.now < seconds and len(self.ended) < len(self.sweeps):
            for name in self.sweeps:
                self.second(name)
            self.now += 1
        return self.ended


@pytest.mark.parametrize("nodes", [{"a": 1, "b": 1}, {"a": 2, "b": 2}, {"a": 2}, {"a": 4, "b": 4, "c": 4}])
def test_a_stream_of_small_trials_and_gangs_on_one_cluster_all_end(nodes):
    ranks = min(max(nodes.values()) * 2, sum(nodes.values()))
    cluster = Cluster(nodes, small=(1, 7, 40, 9), gang=(ranks, 20, 3, 9), other=(ranks, 5, 2, 9))
    assert cluster.run(1000).keys() == {"small", "gang", "other"}


def test_an_eight_unit_gang_starts_while_small_trials_flow():
    """Small trials that are fewer at once than the cluster has units fill the smallest node: the others stay whole."""
    cluster = Cluster({"a": 4, "b": 4, "c": 2}, small=(1, 7, 60, 2), gang=(8, 20, 3, 9))
    ended = cluster.run(1000)
    assert ended == {"gang": 60, "small": 210}
