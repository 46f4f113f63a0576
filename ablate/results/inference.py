"""A test of differences that are far from normal, which takes scipy.stats: a second to import, so no sweep
waits for it."""

from collections.abc import Mapping

from scipy import stats as scipy_stats

from ablate.results.intervals import ALPHA
from ablate.results.paired_stats import common

FEWEST_RANKED = 6
"""Two-sided, Wilcoxon's smallest p-value is 2 / 2^n: .0625 from 5 pairs."""


def wilcoxon(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float:
    """p of Wilcoxon's signed-rank test, two-sided, for differences that are far from normal; ValueError where
    it cannot decide."""
    seeds = common(arm, baseline)
    if len(seeds) < FEWEST_RANKED:
        raise ValueError(
            f"Wilcoxon's test cannot decide with {len(seeds)} pairs: two-sided its p is at least"
            f" {2 / 2 ** len(seeds):.3g}, above"
            f" {ALPHA}; it takes {FEWEST_RANKED}"
        )
    return float(scipy_stats.wilcoxon([arm[seed] - baseline[seed] for seed in seeds], method="auto").pvalue)
