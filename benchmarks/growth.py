"""Cost and benefit of repeated looks at an experiment, for several designs of confidence interval.

A simulated experiment is looked at after given numbers of pairs of seeds, and ends as soon as its interval
excludes zero. `python benchmarks/growth.py` prints the table that experiments/LOG.md holds.
"""

from itertools import pairwise

import numpy as np

from ablate.results.intervals import Interval

DEVIATION, EXPERIMENTS, AT_ONCE = 0.006, 1_000_000, 50_000
DESIGNS = {
    "t, once, at 5": (Interval(), range(5, 6)),
    "t, once, at 8": (Interval(), range(8, 9)),
    "t, once, at 12": (Interval(), range(12, 13)),
    "t, at 3, 4, ... 12": (Interval(), range(3, 13)),
    "sequence, at 3, 4, ... 12": (Interval("sequence"), range(3, 13)),
    "sequence, at 3, 6, 9, 12": (Interval("sequence"), range(3, 13, 3)),
    "split, at 3, 4, ... 12": (Interval("split", 10), range(3, 13)),
    "split, at 3, 6, 9, 12": (Interval("split", 4), range(3, 13, 3)),
    "t, at 3, 4, ... 200": (Interval(), range(3, 201)),
    "sequence, at 3, 4, ... 200": (Interval("sequence"), range(3, 201)),
}


def run(interval: Interval, looks: range, effect: float, experiments: int) -> tuple[float, float]:
    """Return the share of experiments that found an effect, and the mean number of pairs that they used."""
    random, effects, used = np.random.default_rng(0), 0, 0
    for _ in range(experiments // AT_ONCE):
        values = random.normal(effect, DEVIATION, (AT_ONCE, looks[-1]))
        going = np.ones(AT_ONCE, bool)
        for before, pairs in pairwise((0, *looks)):
            seen = values[going, :pairs]
            used += (pairs - before) * len(seen)
            going[going] = abs(seen.mean(1)) <= seen.std(1, ddof=1) * interval.half_width(pairs)
        effects += AT_ONCE - going.sum()
    return effects / experiments, used / experiments


def main() -> None:
    """Print one line per design: the share of experiments that find an effect of 0 and two other effects.

    For the two others, the mean number of seeds follows.
    """
    print("| interval | effect 0: found | .004: found, seeds | .01: found, seeds |\n|---|---|---|---|")
    for name, (interval, looks) in DESIGNS.items():
        experiments = EXPERIMENTS if looks[-1] < 100 else EXPERIMENTS // 10
        nothing, small, large = (run(interval, looks, effect, experiments) for effect in (0, 0.004, 0.01))
        print(
            f"| {name} | {nothing[0]:.1%} | {small[0]:.0%}, {small[1]:.1f} "
            f"| {large[0]:.1%}, {large[1]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
