"""Error rates and power of rules that keep or discard the changes of a loop of proposals.

`python benchmarks/gate_loops.py` prints the table of experiments/LOG.md: the gate of
`ablate.results.proposals` beside three rules in use, in simulated loops of 50 proposals. Effects and
deviations are in noise floors, the deviation of one run. Each loop measures its floor anew on 16 runs, so
that the floor's own error is part of every rate. The gate's arithmetic is the library's, on arrays.

Each scenario has a seed of its own, computed from its name. Finished scenarios are kept in a JSON file
(`--cache`) and are not run again; the file is valid for one value of `--loops`.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from simulated_truth import Seeded, cached, draw, share

from ablate.results.proposals import FEWEST_RERUNS, Plan, judge_look, spread_of

PROPOSALS = 50
EFFECTS = (0.0, 1.0, 1.5, 2.0, 3.0, 4.0)
_RESAMPLES = np.array(list(product(range(3), repeat=3)))
"""All 27 resamples of three values."""
_WALK = 0.2
"""Deviation of the step that a wandering baseline takes from one run to the next."""


@dataclass(frozen=True)
class Scenario(Seeded):
    """One cell of a table: a rule, a true effect of every proposal, and what is not as the rule assumes."""

    rule: str
    effect: float = 0.0
    shape: str = "normal"
    """Distribution of a run, the floor's too: one of `simulated_truth.draw`, mirrored after a minus."""
    candidate: float = 1.0
    """Deviation of a candidate's runs; 0: drawn for each candidate, log-uniform from 0.5 to 2."""
    floor: float = 1.0
    """Deviation of the floor's reruns; that of the baseline is 1."""
    drift: str = ""
    """Wandering mean of all runs: "" (none), `turns` (runs are made in turns), `blocks` (baseline first)."""


RULES = {
    "gate": "gate, up to 16 runs",
    "gate:8": "gate, up to 8 runs",
    "greedy": "one run each, keep if better",
    "minimum": "one run, keep if better than all before",
    "bootstrap": "3 runs each, 95 % bootstrap interval",
}
"""Rules by name, as the table has them."""
ROBUST: dict[str, dict[str, float | str]] = {
    "as assumed": {},
    "runs: t with 3 degrees of freedom": {"shape": "t3"},
    "runs: one of ten five times as far away": {"shape": "outlier"},
    "runs: lognormal (sigma 1), long tail of bad runs": {"shape": "-lognormal"},
    "runs: lognormal (sigma 1), long tail of good runs": {"shape": "lognormal"},
    "candidates' deviation 0.5 to 2, each its own": {"candidate": 0.0},
    "every candidate's deviation 1.5": {"candidate": 1.5},
    "every candidate's deviation 2": {"candidate": 2.0},
    "every candidate's deviation 3": {"candidate": 3.0},
    "floor measured too small: 0.7": {"floor": 0.7},
    "floor measured too small: 0.5": {"floor": 0.5},
    "floor measured too large: 2": {"floor": 2.0},
    "baseline wanders, runs in turns": {"drift": "turns"},
    "baseline wanders, its runs first": {"drift": "blocks"},
    "every candidate favoured by 0.5": {"effect": 0.5},
}
"""Deviations from what the gate assumes, by their row."""


def scenarios() -> Iterator[Scenario]:
    """Yield every cell of every table."""
    yield from (Scenario(rule, effect) for rule in RULES for effect in EFFECTS)
    for wrong in ROBUST.values():
        yield Scenario("gate", **wrong)
        if "effect" not in wrong:
            yield from (Scenario("gate", effect, **wrong) for effect in (2.0, 4.0))


def noise(random: np.random.Generator, shape: str, size: tuple[int, ...]) -> np.ndarray:
    """Return runs without an effect, of mean 0 and deviation 1; larger is better."""
    return draw(random, shape.removeprefix("-"), size) * (-1 if shape.startswith("-") else 1)


def sides(random: np.random.Generator, scenario: Scenario, loops: int, runs: int) -> tuple[np.ndarray, ...]:
    """Return runs of the baseline and of the candidate for one proposal, [loops, runs]; larger is better."""
    base, ours = (noise(random, scenario.shape, (loops, runs)) for _ in range(2))
    deviation = scenario.candidate or np.exp(random.uniform(math.log(0.5), math.log(2), (loops, 1)))
    ours = scenario.effect + deviation * ours
    if scenario.drift:
        walk = np.cumsum(_WALK * random.normal(size=(loops, 2 * runs)), axis=1)
        order = np.arange(2 * runs).reshape(runs, 2).T
        if scenario.drift == "blocks":  # each look adds runs, those of the baseline first
            order = np.empty((2, runs), int)
            edges = [0, *(look.runs for look in Plan().looks)]
            for start, end in pairwise(edges):
                order[0, start:end] = np.arange(start + start, start + end)
                order[1, start:end] = np.arange(start + end, end + end)
        base, ours = base + walk[:, order[0]], ours + walk[:, order[1]]
    return base, ours


def gate(random: np.random.Generator, scenario: Scenario, loops: int, plan: Plan) -> tuple[np.ndarray, ...]:
    """Return which proposals the gate keeps and the runs that they cost, [loops, proposals] each."""
    floor = scenario.floor * noise(random, scenario.shape, (loops, FEWEST_RERUNS))
    measured = (floor.var(axis=1, ddof=1), FEWEST_RERUNS)
    squares, freedom = np.zeros(loops), np.zeros(loops)
    kept, cost = np.zeros((loops, PROPOSALS), bool), np.zeros((loops, PROPOSALS), int)
    for proposal in range(PROPOSALS):
        base, ours = sides(random, scenario, loops, plan.most)
        undecided, added = np.ones(loops, bool), np.zeros(loops)
        for number, look in enumerate(plan.looks):
            seen, runs = base[:, : look.runs], look.runs
            within = (runs - 1) * seen.var(axis=1, ddof=1)
            variance = ours[:, :runs].var(axis=1, ddof=1)
            spread = spread_of(measured, (squares + within, freedom + runs - 1), variance, runs)
            gain = ours[:, :runs].mean(axis=1) - seen.mean(axis=1)
            _, keep, discard = judge_look(gain, spread, plan, number)
            cost[undecided, proposal], added[undecided] = 2 * runs, within[undecided]
            kept[:, proposal] |= undecided & keep
            undecided &= ~keep & ~discard
        squares, freedom = squares + added, freedom + cost[:, proposal] / 2 - 1
    return kept, cost


def greedy(random: np.random.Generator, scenario: Scenario, loops: int) -> tuple[np.ndarray, ...]:
    """Keep a candidate whose run is better than a run of the present baseline."""
    base, ours = sides(random, scenario, loops * PROPOSALS, 1)
    kept = (ours > base).reshape(loops, PROPOSALS)
    return kept, np.full(kept.shape, 2)


def minimum(random: np.random.Generator, scenario: Scenario, loops: int) -> tuple[np.ndarray, ...]:
    """Keep a candidate whose run is better than the best value of all runs before, none of which had an
    effect."""
    runs = noise(random, scenario.shape, (loops, PROPOSALS + 1))
    ours = scenario.effect + noise(random, scenario.shape, (loops, PROPOSALS))
    if not scenario.effect:
        ours = runs[:, 1:]
    kept = ours > np.maximum.accumulate(runs, axis=1)[:, :-1]
    return kept, np.ones(kept.shape, int)


def not_better(base: np.ndarray, ours: np.ndarray) -> np.ndarray:
    """Return the share of all 27 x 27 resamples of 3 runs in which the candidate's mean is not larger."""
    base, ours = base[:, _RESAMPLES].mean(axis=-1), ours[:, _RESAMPLES].mean(axis=-1)
    return (ours[:, :, None] <= base[:, None, :]).mean(axis=(1, 2))


def bootstrap(random: np.random.Generator, scenario: Scenario, loops: int) -> tuple[np.ndarray, ...]:
    """Keep a candidate if the 95 % percentile interval of the difference of means lies above zero."""
    kept = np.zeros((loops, PROPOSALS), bool)
    for proposal in range(PROPOSALS):
        kept[:, proposal] = not_better(*sides(random, scenario, loops, 3)) < 0.025
    return kept, np.full(kept.shape, 6)


KINDS: dict[str, Callable[[np.random.Generator, Scenario, int], tuple[np.ndarray, ...]]] = {
    "gate": partial(gate, plan=Plan()),
    "gate:8": partial(gate, plan=Plan(most=8)),
    "greedy": greedy,
    "minimum": minimum,
    "bootstrap": bootstrap,
}


def measure(scenario: Scenario, loops: int) -> dict[str, float]:
    """Return the counts of a scenario: loops that keep anything, kept proposals, and runs per proposal."""
    kept, cost = KINDS[scenario.rule](scenario.random(), scenario, loops)
    return {
        "loops": loops,
        "any": int(kept.any(axis=1).sum()),
        "kept": int(kept.sum()),
        "first": int(kept[:, 0].sum()),
        "median": float(np.median(cost)),
        "mean": float(cost.mean()),
    }


def run(cache: Path, loops: int) -> dict[str, dict[str, float]]:
    """Return the results of every scenario."""
    return cached(cache, "loops", loops, list(scenarios()), lambda scenario: measure(scenario, loops))


def tables(results: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of both tables."""
    effects = " | ".join(f"{effect:g}" for effect in EFFECTS[1:])
    yield f"| rule | loops that keep anything | keeps an effect of {effects} | runs, median | mean |"
    yield f"|{'---|' * (len(EFFECTS) + 3)}"
    for rule, title in RULES.items():
        cells = [results[Scenario(rule, effect).name] for effect in EFFECTS]
        yield _row(title, cells)
    first = (results[Scenario("gate", effect).name] for effect in EFFECTS[1:])
    powers = " | ".join(f"{100 * cell['first'] / cell['loops']:.0f} %" for cell in first)
    yield f"| gate, first proposal alone | | {powers} | | |"
    costs = (f"{results[Scenario('gate', effect).name]['mean']:.1f}" for effect in EFFECTS[1:])
    yield f"| gate, mean runs | | {' | '.join(costs)} | | |"
    yield ""
    yield "| gate, if | loops that keep anything | keeps an effect of 2 | 4 | runs, median | mean |"
    yield f"|{'---|' * 6}"
    for title, wrong in ROBUST.items():
        effects_of = (0.0,) if "effect" in wrong else (0.0, 2.0, 4.0)
        cells = [results[Scenario("gate", **{"effect": effect} | wrong).name] for effect in effects_of]
        yield _row(title, cells, 3)


def _row(title: str, cells: list[Mapping[str, float]], columns: int = 0) -> str:
    idle = cells[0]
    power = [f"{100 * cell['kept'] / cell['loops'] / PROPOSALS:.0f} %" for cell in cells[1:]]
    power += ["-"] * (columns - len(cells))
    share_of = share(idle["any"], int(idle["loops"]))
    return f"| {title} | {share_of} | {' | '.join(power)} | {idle['median']:g} | {idle['mean']:.1f} |"


def main() -> None:
    """Run what the cache lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cache", type=Path, default=Path("gate_loops.json"), help="Results so far.")
    parser.add_argument("--loops", type=int, default=2000, help="Loops of each scenario.")
    given = parser.parse_args()
    print(f"Loops of {PROPOSALS} proposals; effects and deviations in noise floors; ± is a standard error.\n")
    print("\n".join(tables(run(given.cache, given.loops))))


if __name__ == "__main__":
    main()
