"""Hit, miss and false-alarm rates of the search behind `blame:`, beside bisection and leave-one-out.

`python benchmarks/blame_simulation.py` prints the seed and the tables, and writes `blame_simulation.csv`
beside this file: 70 planted cases, one a line, and rates over many repeats. Sizes are in noise floors: the
standard deviation between seeds of the damage of one unit, measured once. A culprit's damage is its size,
another unit's is 0, or that of the scenario's background. Bisection goes to the half with the larger damage
and names what is left; leave-one-out removes each unit from the recipe and names what improves it with
significance (Bonferroni over units).
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special

from ablate.experiment.blame_design import BlameDesign, GroupRun
from ablate.results.blame import replay, smallest

UNITS, SEEDS, BUDGET = 12, 6, 60
TABLE = Path(__file__).with_suffix(".csv")
HEADER = ("kind", "scenario", "method", "cases", "culprits", "hits", "all_hit", "false_alarms", "runs")
Measure = Callable[[frozenset[int], int], float]
"""Loss of a run: the units that are quantised, and its seed."""


class Scenario(NamedTuple):
    """Planted sizes, and how damage and noise differ from the model that the search assumes."""

    name: str
    sizes: tuple[float, ...]
    units: int = UNITS
    budget: int = BUDGET
    background: float = 0.0
    shape: str = "additive"
    noise: str = "normal"


SCENARIOS = (
    *(Scenario(f"one, {size}", (float(size),)) for size in (1, 2, 5, 10)),
    Scenario("none", ()),
    Scenario("two, 2 and 2", (2.0, 2.0)),
    Scenario("two, 5 and 2", (5.0, 2.0)),
    Scenario("two, 10 and 1", (10.0, 1.0)),
    Scenario("one, 2; others 0.2", (2.0,), background=0.2),
    Scenario("one, 5; saturating at 3", (5.0,), shape="saturating"),
    Scenario("two, 5 and 5; saturating at 3", (5.0, 5.0), shape="saturating"),
    Scenario("two, 2 and 2; half as much again together", (2.0, 2.0), shape="synergy"),
    Scenario("none; t with 3 degrees of freedom", (), noise="heavy"),
    Scenario("one, 2; t with 3 degrees of freedom", (2.0,), noise="heavy"),
    Scenario("none; skewed (lognormal)", (), noise="skewed"),
    Scenario("one, 2; skewed (lognormal)", (2.0,), noise="skewed"),
    Scenario("none of 24", (), 24, 80),
    Scenario("one of 24, 1", (1.0,), 24, 80),
    Scenario("one of 24, 2", (2.0,), 24, 80),
    Scenario("smallest of the plan", (smallest(BlameDesign(UNITS, tuple(range(SEEDS)), BUDGET)),)),
)


def world(scenario: Scenario, random: np.random.Generator) -> tuple[set[int], Measure]:
    """Draw the culprits of a case, and return them with a function that measures sets of units."""
    damage = np.full(scenario.units, scenario.background)
    culprits = random.choice(scenario.units, len(scenario.sizes), replace=False)
    damage[culprits] = scenario.sizes
    seen: dict[tuple[frozenset[int], int], float] = {}

    def measure(units: frozenset[int], seed: int) -> float:
        if (units, seed) not in seen:
            total = float(damage[sorted(units)].sum())
            if scenario.shape == "saturating":
                total = 3 * math.tanh(total / 3)
            if scenario.shape == "synergy" and units.issuperset(culprits.tolist()):
                total *= 1.5
            seen[units, seed] = total + _noise(scenario.noise, random) / math.sqrt(2)
        return seen[units, seed]

    return set(culprits.tolist()), measure


def _noise(kind: str, random: np.random.Generator) -> float:
    """Draw noise of a run with mean 0 and variance 1."""
    if kind == "heavy":
        return float(random.standard_t(3)) / math.sqrt(3)
    if kind == "skewed":
        return (float(random.lognormal(0, 0.75)) - math.exp(0.28125)) / math.sqrt(
            (math.exp(0.5625) - 1) * math.exp(0.5625)
        )
    return float(random.normal())


def blame(scenario: Scenario, measure: Measure) -> tuple[set[int], int]:
    """Return the culprits that the search of `blame:` names, and its runs."""
    design = BlameDesign(scenario.units, tuple(range(SEEDS)), scenario.budget)
    outcomes: dict[GroupRun, float] = {}
    while (search := replay(design, outcomes)).wanted:
        outcomes |= {test: measure(*test) for test in search.wanted}
    return set(search.culprits), search.runs


def bisection(scenario: Scenario, measure: Measure, seeds: int) -> tuple[set[int], int]:
    """Return the unit at which halving ends, and its runs: each half once on each seed."""
    group, runs = list(range(scenario.units)), 0
    while len(group) > 1:
        halves = group[: len(group) // 2], group[len(group) // 2 :]
        means = [np.mean([measure(frozenset(half), seed) for seed in range(seeds)]) for half in halves]
        group, runs = halves[int(np.argmax(means))], runs + 2 * seeds
    return set(group), runs


def leave_one_out(scenario: Scenario, measure: Measure, seeds: int) -> tuple[set[int], int]:
    """Return the units whose removal improves the recipe with significance, and the runs."""
    everything = frozenset(range(scenario.units))
    bound = float(special.stdtrit(seeds - 1, 1 - 0.05 / scenario.units)) if seeds > 1 else math.inf
    named = set()
    for unit in range(scenario.units):
        gains = [measure(everything, seed) - measure(everything - {unit}, seed) for seed in range(seeds)]
        if np.mean(gains) > bound * np.std(gains, ddof=1) / math.sqrt(seeds):
            named.add(unit)
    return named, seeds * (scenario.units + 1)


METHODS: dict[str, Callable[[Scenario, Measure], tuple[set[int], int]]] = {
    "blame": blame,
    "bisection, 1 seed": lambda scenario, measure: bisection(scenario, measure, 1),
    "bisection, 6 seeds": lambda scenario, measure: bisection(scenario, measure, 6),
    "leave one out, 4 seeds": lambda scenario, measure: leave_one_out(scenario, measure, 4),
    "leave one out, 6 seeds": lambda scenario, measure: leave_one_out(scenario, measure, 6),
}


def rates(kind: str, scenario: Scenario, repeats: int, seed: int) -> Iterator[tuple[object, ...]]:
    """Yield a line of the table for each method: counts over the repeats, and the mean number of runs."""
    for method, name in METHODS.items():
        random = np.random.default_rng([seed, len(scenario.name), *scenario.name.encode()])
        hits = whole = false = runs = 0
        for _ in range(repeats):
            culprits, measure = world(scenario, random)
            named, used = name(scenario, measure)
            hits += len(named & culprits)
            whole += named == culprits
            false += bool(named - culprits)
            runs += used
        planted = repeats * len(scenario.sizes)
        yield kind, scenario.name, method, repeats, planted, hits, whole, false, f"{runs / repeats:.1f}"


def planted(seed: int) -> Iterator[Scenario]:
    """Yield the 70 planted cases: 50 with one culprit, 10 with none, 10 with two."""
    random = np.random.default_rng(seed)
    for number in range(50):
        size = (1, 2, 5, 10)[number % 4]
        yield Scenario(f"{number}: one, {size}", (float(size),))
    yield from (Scenario(f"{number}: none", ()) for number in range(50, 60))
    for number in range(60, 70):
        sizes = tuple(float(size) for size in random.choice((1, 2, 5, 10), 2))
        yield Scenario(f"{number}: two, {sizes[0]:g} and {sizes[1]:g}", sizes)


def at_most(false: int, cases: int) -> float:
    """Return the upper end of the exact 95 % interval of a rate."""
    return float(special.betaincinv(false + 1, cases - false, 0.975)) if false < cases else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2000, help="Repeats of each scenario.")
    parser.add_argument("--seed", type=int, default=20261128, help="Seed of all cases.")
    parser.add_argument("--table", type=Path, default=TABLE, help="File that is written.")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}; {chosen.repeats} repeats of each scenario")
    lines: list[tuple[object, ...]] = []
    for scenario in planted(chosen.seed):
        lines += rates("planted", scenario, 1, chosen.seed)
    for scenario in SCENARIOS:
        for line in rates("rates", scenario, chosen.repeats, chosen.seed):
            lines.append(line)
            _, name, method, cases, culprits, hits, _, false, runs = line
            found = f"{int(str(hits)) / int(str(culprits)):.3f}" if culprits else "    -"
            alarm = f"{int(str(false)) / int(str(cases)):.4f}"
            bound = at_most(int(str(false)), int(str(cases)))
            print(
                f"{name:42} {method:23} hit {found}  false alarm {alarm} (at most {bound:.4f})  {runs} runs"
            )
    with chosen.table.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *lines])


if __name__ == "__main__":
    main()
