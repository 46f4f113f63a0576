"""Calibration line: the gap of full runs on the damage of forks, over recipes, from the sweeps of
fork_designs.py.

    python benchmarks/calibration_line.py --state DIR

Forks estimate the harm that a recipe does given a past in high precision. Whether that foretells the gap of
full runs is a question of its own, for each class of recipe. Printed are, for all recipes and for each class:
the line with errors in both variables (least squares of both, weighted by standard errors), a 95 % interval
of its slope and intercept by a parametric bootstrap, the root mean square of the error with which each
recipe's gap is foretold by the others' line, Spearman's rank correlation, and every comparison of two arms in
which forks and full runs have opposite signs.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fork_designs import averaged, readings
from scipy import optimize, stats

from ablate.store.checked_ledger import open_ledger

CLASSES = {
    "noise: stochastic rounding": ("nvfp4", "no_rht", "no_2d", "last_bf16", "headroom", "signs_per_step"),
    "bias: nearest rounding": ("nearest", "no_sr", "no_scale_2d_nearest"),
    "coarser scales": ("mxfp4", "block_32"),
    "forward pass alone": ("forward_only",),
}
"""Recipes by the kind of their error."""
PAIRS = (("annealed", "full"), ("annealed_more", "full_more"))
"""Sweeps of forks, and of full runs of the same arms and seeds."""
_DRAWS = 2000


@dataclass(frozen=True)
class Point:
    """One recipe: what it does in forks and in full runs, by seed, against bf16."""

    name: str
    forks: dict[int, float]
    full: dict[int, float]

    @property
    def estimates(self) -> tuple[float, float, float, float]:
        """Damage, its standard error, gap, its standard error."""
        sides = [np.array(list(side.values())) for side in (self.forks, self.full)]
        (x, sx), (y, sy) = ((float(side.mean()), float(stats.sem(side))) for side in sides)
        return x, sx, y, sy


def points(state: Path) -> list[Point]:
    """Return the recipes of all pairs of sweeps that are there."""
    found = []
    for forked, full in PAIRS:
        if not all((state / "sweeps" / name / "ledger.db").exists() for name in (forked, full)):
            continue
        sides = []
        for name in (forked, full):
            with closing(open_ledger(state, name)) as ledger:
                arms, _ = readings(ledger)
            longest = max(window for _, window in arms["bf16"])
            losses = {arm: averaged(table, longest) for arm, table in arms.items()}
            base = losses.pop("bf16")
            sides.append(
                {
                    arm: {seed: own[seed]["loss"] - base[seed]["loss"] for seed in own.keys() & base.keys()}
                    for arm, own in losses.items()
                }
            )
        found += [Point(name, sides[0][name], sides[1][name]) for name in sides[0] if name in sides[1]]
    return [point for point in found if not point.name.startswith("null")]


def fit(x: np.ndarray, sx: np.ndarray, y: np.ndarray, sy: np.ndarray) -> tuple[float, float]:
    """Return slope and intercept of the line with errors in both variables.

    Args:
        x: damage of each recipe.
        sx: its standard errors.
        y: gap of each recipe.
        sy: its standard errors.
    """

    def badness(slope: float) -> float:
        weights = 1 / (sy**2 + slope**2 * sx**2)
        intercept = np.sum(weights * (y - slope * x)) / np.sum(weights)
        return float(np.sum(weights * (y - slope * x - intercept) ** 2))

    angles = np.linspace(-1.55, 1.55, 621)
    start = min(angles, key=lambda angle: badness(math.tan(angle)))
    found = optimize.minimize_scalar(
        lambda angle: badness(math.tan(angle)), bounds=(start - 0.006, start + 0.006), method="bounded"
    )
    slope = math.tan(found.x)
    weights = 1 / (sy**2 + slope**2 * sx**2)
    return slope, float(np.sum(weights * (y - slope * x)) / np.sum(weights))


def line(chosen: Sequence[Point]) -> str:
    """Return the line over some recipes as a row of a table."""
    x, sx, y, sy = (np.array(column) for column in zip(*(point.estimates for point in chosen), strict=True))
    rank = stats.spearmanr(x, y).statistic if len(chosen) > 2 else math.nan
    if len(chosen) < 4:
        return f"{len(chosen)} | too few recipes | | | {rank:.2f}"
    slope, intercept = fit(x, sx, y, sy)
    random = np.random.default_rng(0)
    drawn = np.array(
        [
            fit(x + sx * random.normal(size=len(x)), sx, y + sy * random.normal(size=len(y)), sy)
            for _ in range(_DRAWS)
        ]
    )
    (low, high), (below, above) = (np.quantile(drawn[:, column], (0.025, 0.975)) for column in (0, 1))
    errors = []
    for left_out in range(len(chosen)):
        rest = np.arange(len(chosen)) != left_out
        own, at_zero = fit(x[rest], sx[rest], y[rest], sy[rest])
        errors.append(y[left_out] - own * x[left_out] - at_zero)
    foretold = float(np.sqrt(np.mean(np.square(errors))))
    return (
        f"{len(chosen)} | {slope:.2f} ({low:.2f} to {high:.2f}) | {intercept:+.4f} ({below:+.4f} to"
        f" {above:+.4f}) | {foretold:.4f} | {rank:.2f}"
    )


def signs(found: Sequence[Point]) -> tuple[int, list[str], list[str]]:
    """Return the number of comparisons of two recipes, or one and bf16, and those whose signs differ.

    Returns:
        Comparisons; those that forks resolve and whose sign in full runs is the other one; and those of them
            that full runs resolve too.
    """
    bf16 = {seed: 0.0 for point in found for seed in point.forks}
    arms = [("bf16", bf16, bf16), *((point.name, point.forks, point.full) for point in found)]
    count, differ, both = 0, [], []
    for (one, fork_a, full_a), (other, fork_b, full_b) in itertools.combinations(arms, 2):
        seeds = sorted(fork_a.keys() & fork_b.keys() & full_a.keys() & full_b.keys())
        if len(seeds) < 3:
            continue
        count += 1
        tests = []
        for a, b in ((fork_a, fork_b), (full_a, full_b)):
            difference = np.array([b[seed] - a[seed] for seed in seeds])
            tests.append((float(difference.mean()), float(stats.ttest_1samp(difference, 0.0).pvalue)))
        (damage, p), (gap, q) = tests
        if p < 0.05 and damage * gap < 0:
            text = f"{other} minus {one}: forks {damage:+.4f} (p {p:.3f}), full runs {gap:+.4f} (p {q:.3f})"
            differ.append(text)
            both += [text] if q < 0.05 else []
    return count, differ, both


def main() -> int:
    """Print the points, the lines and the contradictions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    found = points(parser.parse_args().state)
    print("| recipe | class | seeds | damage, 180 steps | gap, full run |")
    print("|---|---|---|---|---|")
    kinds = {name: kind for kind, names in CLASSES.items() for name in names}
    for point in sorted(found, key=lambda each: each.estimates[0]):
        x, sx, y, sy = point.estimates
        row = f"{x:+.5f} (se {sx:.5f}) | {y:+.4f} (se {sy:.4f})"
        print(f"| {point.name} | {kinds.get(point.name, '')} | {len(point.forks)} | {row} |")
    print("\n| recipes | n | slope | intercept | error left out | Spearman |\n|---|---|---|---|---|---|")
    print(f"| all | {line(found)} |")
    for kind, names in CLASSES.items():
        chosen = [point for point in found if point.name in names]
        if len(chosen) > 2:
            print(f"| {kind} | {line(chosen)} |")
    count, differ, both = signs(found)
    print(
        f"\n{count} comparisons; forks resolve {len(differ)} with the sign opposite to full runs', of which"
    )
    print(f"full runs resolve {len(both)}:")
    print("\n".join(f"- {text}" for text in differ))
    return 0


if __name__ == "__main__":
    sys.exit(main())
