"""Promises of the group search: its error rate, what it finds, and that it is a function of its outcomes."""

import csv
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from ablate.experiment.blame_design import BlameDesign, BlameNames, GroupRun
from ablate.results.blame import Search, damage, replay, sentences, smallest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = BlameDesign(units=8, seeds=tuple(range(6)), budget=56)


@pytest.fixture
def simulation() -> Iterator[object]:
    sys.path.insert(0, str(BENCHMARKS))
    import blame_simulation

    yield blame_simulation
    sys.path.remove(str(BENCHMARKS))


def searched(design: BlameDesign, harm: Callable[[GroupRun], float]) -> Search:
    """Return the finding of a search whose runs come one at a time, in reverse order."""
    outcomes: dict[GroupRun, float] = {}
    while (search := replay(design, outcomes)).wanted:
        outcomes[search.wanted[-1]] = harm(search.wanted[-1])
    return search


def planted(random: np.random.Generator, *sizes: float, noise: float = 1.0) -> Callable[[GroupRun], float]:
    """Return the harm of a run: units 0, 1, ... do this damage; a paired difference deviates by `noise`."""
    damage = dict(enumerate(sizes))
    return lambda test: (
        sum(damage.get(unit, 0) for unit in test.units) + noise * float(random.normal()) / math.sqrt(2)
    )


def test_a_culprit_is_named_with_an_interval_that_contains_its_damage() -> None:
    search = searched(SMALL, planted(np.random.default_rng(0), 0, 0, 5))
    assert search.culprits == (2,)
    assert search.proofs
    assert search.proofs[2].low < 5 < search.proofs[2].high
    assert search.rest
    assert search.rest.low < 0
    assert search.runs <= SMALL.runs <= SMALL.budget


def test_two_culprits_are_named_the_larger_first() -> None:
    assert searched(SMALL, planted(np.random.default_rng(1), 4, 0, 0, 8)).culprits == (3, 0)


def test_nothing_is_named_more_often_than_stated_without_a_culprit() -> None:
    named = sum(
        bool(searched(SMALL, planted(np.random.default_rng(seed))).culprits) for seed in range(60)
    )  # 8 of 60 or more: probability 0.01 at a rate of 0.05
    assert named < 8


def fit(matrix: np.ndarray, values: np.ndarray, units: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the damage of some units by least squares, and what it leaves of the values."""
    damage = np.linalg.lstsq(matrix[:, units], values, rcond=None)[0]
    return damage, values - matrix[:, units] @ damage


def test_a_search_ends_once_no_other_unit_fits_and_the_candidates_make_up_the_gap() -> None:
    """Each candidate replaced by each other unit leaves an error that is larger by the stated odds."""
    seen = set()
    for seed, sizes in itertools.product(range(4), [(2.0,), (1.5, 0, 1.0), (2.0, *[0.3] * 7)]):
        random, outcomes = np.random.default_rng(seed), dict[GroupRun, float]()
        harm = planted(random, *sizes, noise=0.7)
        while (search := replay(SMALL, outcomes)).wanted:
            outcomes |= {run: harm(run) for run in search.wanted}
        gap, count = search.gap, 0
        assert gap
        for number, each in enumerate(search.rounds, 1):
            count += len(each.tests) // 2
            halves = [SMALL.halves(place) for place in range(count)]
            matrix = np.array([[1.0 if u in one.units else -1.0 for u in range(8)] for one, _ in halves])
            values = np.array([outcomes[one] - outcomes[other] for one, other in halves])
            chosen = [*each.candidates]
            damage, left = fit(matrix, values, chosen)
            variance = left @ left / (count - len(chosen))
            raw = matrix.T @ left / count
            raw[chosen] += damage
            assert each.estimates == pytest.approx(raw * math.sqrt(count / variance))
            replaced = [
                fit(matrix, values, [*(one for one in chosen if one != unit), other])[1]
                for unit in chosen
                for other in {*range(8)} - {*chosen}
            ]
            ahead = min(one @ one for one in replaced) >= left @ left * (20 * 8) ** (2 / count)
            doubt = gap.deviation**2 / gap.pairs + len(chosen) * variance / count
            explained = gap.mean - damage.sum() <= 2 * math.sqrt(doubt)
            if number < len(search.rounds):
                assert not (ahead and explained)
            elif count < SMALL.pairs:
                assert ahead
                assert explained
            seen.add((bool(ahead), bool(explained), number < len(search.rounds)))
    assert {(True, True, False), (True, False, True), (False, True, True)} <= seen


def test_damage_of_all_units_together_has_no_culprit() -> None:
    search = searched(SMALL, planted(np.random.default_rng(3), *[0.5] * 8))
    assert search.gap
    assert search.gap.low > 0
    assert not search.culprits


def test_a_search_without_a_gap_ends_after_the_runs_of_the_gap() -> None:
    search = searched(SMALL, lambda test: float(test.seed) - 0.01 * len(test.units))
    assert search.stage == "over"
    assert search.runs == 12
    assert not search.culprits


@pytest.mark.parametrize("culprits", [{3}, {1, 6}], ids=str)
def test_a_divergence_is_traced_to_the_units_that_cause_it(culprits: set[int]) -> None:
    random = np.random.default_rng(4)
    search = searched(
        SMALL, lambda test: math.inf if culprits & test.units else 3 + 0.1 * float(random.normal())
    )
    assert search.diverges
    assert set(search.culprits) == culprits
    assert search.rest
    assert search.rest.mean == 0


def test_a_divergence_that_no_unit_causes_alone_has_no_culprit() -> None:
    search = searched(SMALL, lambda test: math.inf if len(test.units) > 5 else 3.0)
    assert search.diverges
    assert search.gap
    assert search.gap.mean == 1
    assert not search.culprits


def test_a_damage_below_the_margin_is_no_culprit() -> None:
    design = BlameDesign(units=8, seeds=tuple(range(6)), budget=56, margin=4)
    assert not searched(design, planted(np.random.default_rng(5), 3, noise=0.2)).culprits
    assert searched(design, planted(np.random.default_rng(5), 5, noise=0.2)).culprits == (0,)


def test_the_proof_uses_seeds_that_the_search_has_not_seen() -> None:
    assert not set(SMALL.search_seeds) & set(SMALL.seeds)
    outcomes: dict[GroupRun, float] = {}
    random = np.random.default_rng(6)
    harm = planted(random, 5)
    while (search := replay(SMALL, outcomes)).wanted:
        outcomes |= {test: harm(test) for test in search.wanted}
    before = search.candidates
    proof = {GroupRun(frozenset([unit]), seed) for unit in before for seed in SMALL.seeds}
    assert replay(SMALL, outcomes | dict.fromkeys(proof, -9.0)).candidates == before


def test_failed_runs_are_left_out() -> None:
    harm = planted(np.random.default_rng(7), 0, 6)
    assert searched(SMALL, lambda test: math.nan if test.seed in (0, 7) else harm(test)).culprits == (1,)


@pytest.mark.parametrize(
    ("design", "word"),
    [
        (BlameDesign(1, (0, 1, 2), 60), "finer"),
        (BlameDesign(8, (0, 1), 60), "3 seeds"),
        (BlameDesign(8, (0, 1, 2), 20), "23"),
        (BlameDesign(2, (0, 1, 2), 14), "15"),
    ],
    ids=["one unit", "two seeds", "no pairs", "no proof"],
)
def test_a_search_that_cannot_work_says_what_would(design: BlameDesign, word: str) -> None:
    assert word in str(design.problem)


def test_the_smallest_damage_falls_with_seeds_and_budget() -> None:
    more = BlameDesign(units=8, seeds=tuple(range(12)), budget=120)
    assert smallest(more) < smallest(SMALL) < smallest(BlameDesign(units=8, seeds=(0, 1, 2), budget=24)) < 64


def test_the_smallest_damage_passes_the_proof_with_the_chance_that_is_printed() -> None:
    """The power of a t test, as the mean over draws of the deviation: scipy's noncentral t has holes."""
    quantiles = (np.arange(20_000) + 0.5) / 20_000
    few = [(count, 1e-5) for count in (3, 4)]  # larger than 64 deviations with 3
    for count, alpha in [*few, *((count, 0.05) for count in range(3, 60))]:
        design = BlameDesign(units=2, seeds=tuple(range(count)), budget=400, alpha=alpha)
        deviations = np.sqrt(stats.chi2.ppf(quantiles, count - 1) / (count - 1))
        bound = stats.t.isf(alpha / 2, count - 1)
        power = stats.norm.cdf(smallest(design) * math.sqrt(count) - bound * deviations).mean()
        assert power == pytest.approx(0.8, abs=0.01), (count, alpha)


def test_the_committed_rates_are_reproduced_and_hold(simulation: object) -> None:
    with (BENCHMARKS / "blame_simulation.csv").open() as file:
        lines = list(csv.DictReader(file))
    cases = list(simulation.planted(20261128))  # type: ignore[attr-defined]
    for case in (cases[1], cases[55], cases[65]):
        for line in simulation.rates("planted", case, 1, 20261128):  # type: ignore[attr-defined]
            assert dict(zip(lines[0], map(str, line), strict=True)) in lines
    ours = [line for line in lines if line["kind"] == "rates" and line["method"] == "blame"]
    assert len(ours) == len(simulation.SCENARIOS)  # type: ignore[attr-defined]
    for line in ours:
        cases_, false = int(line["cases"]), int(line["false_alarms"])
        assert false / cases_ < 0.05 + 2 * math.sqrt(0.05 * 0.95 / cases_), line["scenario"]
        if line["scenario"] == "smallest of the plan":
            assert int(line["hits"]) / int(line["culprits"]) >= 0.8


@pytest.mark.parametrize("lost", [1, 2])
def test_seeds_on_which_a_recipe_diverges_count_though_they_are_few(lost: int) -> None:
    """Unit 2 does damage on every seed and diverges on few; without it the recipe diverges on few seeds, too."""
    names = BlameNames(tuple(f"block {number}" for number in range(8)), "bf16", "nvfp4")
    random = np.random.default_rng(9)
    harm = planted(random, 0, 0, 5, noise=0.5)
    search = searched(SMALL, lambda run: math.inf if run.seed < lost and len(run.units) > 6 else harm(run))
    assert not search.diverges
    assert search.gap
    assert (search.gap.diverged, search.gap.pairs) == (lost, 6)
    assert search.culprits == (2,)
    assert search.rest
    assert (search.rest.diverged, search.exceeds(search.rest)) == (lost, False)
    _, text = sentences(search, names, "nats")
    assert text.count(f"diverges on {lost} of 6 seeds") == 2
    assert "no gap is resolved" not in text


def test_a_recipe_that_only_diverges_on_few_seeds_is_searched() -> None:
    random = np.random.default_rng(10)
    search = searched(
        SMALL, lambda run: math.inf if run.seed == 1 and 3 in run.units else float(random.normal()) / 9
    )
    assert search.rounds
    assert search.gap
    assert search.gap.diverged == 1


def test_a_divergence_counts_as_the_largest_difference() -> None:
    pairs = [(1.0, 0.5), (2.0, 1.0), (3.0, 2.7), (math.inf, 1.0), (1.0, math.inf), (math.inf, math.inf)]
    found = damage(pairs, 0.05)
    values = np.array([0.5, 1.0, 0.3, 1.0, -1.0])
    assert (found.pairs, found.diverged) == (5, 1)
    assert (found.mean, found.deviation) == pytest.approx((values.mean(), values.std(ddof=1)))


@pytest.mark.parametrize(("diverges", "seed"), [(False, 0), (False, 1), (True, 2)])
def test_two_units_that_harm_only_together_are_named(diverges: bool, seed: int) -> None:
    names = BlameNames(tuple(f"block {number}" for number in range(8)), "bf16", "nvfp4")
    random = np.random.default_rng(seed)

    def harm(run: GroupRun) -> float:
        both = {1, 4} <= run.units
        return math.inf if both and diverges else 3.0 * both + 0.2 * float(random.normal())

    search = searched(SMALL, harm)
    assert not search.culprits
    assert search.together
    assert search.together[0] == {1, 4}
    assert "block 1 and block 4 harm only together" in sentences(search, names, "nats")[1]


def test_units_that_harm_alone_or_not_at_all_are_not_said_to_harm_together() -> None:
    for seed in range(12):
        for sizes in ((), (0, 3, 0, 3), (0.5,) * 8, (1.5, 1.5)):
            assert not searched(SMALL, planted(np.random.default_rng(seed), *sizes)).together
