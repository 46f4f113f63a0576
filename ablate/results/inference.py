"""Wilcoxon's signed-rank test, for differences that are far from normal.

It needs scipy.stats, which takes a second to import, so sweeps do not import this file.
"""

from collections.abc import Mapping

from ablate.results.intervals import ALPHA
from ablate.results.paired_stats import common

FEWEST_RANKED = 6
"""Two-sided, Wilcoxon's smallest p-value is 2 / 2^n: .0625 from 5 pairs."""


def wilcoxon(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test on paired differences.

    Args:
        arm: Value of the metric by seed.
        baseline: The same of the other arm.

    Raises:
        ValueError: There are fewer than 6 pairs, so p cannot fall below 5 %.
    """
    seeds = common(arm, baseline)
    if len(seeds) < FEWEST_RANKED:
        raise ValueError(
            f"Wilcoxon's test cannot decide with {len(seeds)} pairs: two-sided its p is at least"
            f" {2 / 2 ** len(seeds):.3g}, above {ALPHA}; it takes {FEWEST_RANKED}"
        )
    from scipy import stats  # takes most of a second, and few reports rank

    return float(stats.wilcoxon([arm[seed] - baseline[seed] for seed in seeds], method="auto").pvalue)
