"""What a report says beyond an interval: corrected p-values, equivalence, power. scipy's and statsmodels' tests, which take seconds to
import: no sweep waits for them.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats
from statsmodels.stats.anova import AnovaRM
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from ablate.stats import ALPHA, Difference, common, sequence_factor

POWER = 0.8
FEWEST_RANKED = 6
"""Two-sided, Wilcoxon's smallest p-value is 2 / 2^n: .0625 from 5 pairs."""
FEWEST_RESAMPLED = 20
"""A bootstrap of few pairs is too narrow: at 3, 5 and 8 its 95 % covers 76, 83 and 90."""
_RESAMPLES = 9999


def p_value(difference: Difference) -> float:
    """Two-sided, of no effect, valid as its interval is: at its one look, at every declared look, or whenever; NaN from one pair."""
    if difference.pairs < 2:
        return math.nan
    if not difference.deviation:
        return math.nan if difference.mean == 0 else 0.0
    t = difference.mean / difference.deviation * math.sqrt(difference.pairs)
    if difference.interval.kind == "sequence":
        return min(1.0, 1 / sequence_factor(t, difference.pairs))
    return min(1.0, difference.interval.looks * 2 * float(scipy_stats.t.sf(abs(t), difference.pairs - 1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's correction: below alpha, the chance of any false one among all is below alpha. NaN stays NaN and counts
    as no comparison."""
    finite = [p for p in p_values if not math.isnan(p)]
    corrected = iter(multipletests(finite, ALPHA, method="holm")[1] if finite else ())
    return [p if math.isnan(p) else float(next(corrected)) for p in p_values]


def equivalence(arm: Mapping[int, float], baseline: Mapping[int, float], margin: float) -> float:
    """p of "they differ by the margin or more": the larger of two one-sided paired t-tests. Below 2.5 % where the 95 % t interval
    lies within the margin. NaN from one pair, or where the differences do not vary."""
    seeds = common(arm, baseline)
    differences = [arm[seed] - baseline[seed] for seed in seeds]
    if len(seeds) < 2 or not np.std(differences):
        return math.nan
    return float(ttost_paired(np.array(differences), np.zeros(len(seeds)), -margin, margin)[0])


def wilcoxon(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float:
    """p of Wilcoxon's signed-rank test, two-sided, for differences that are far from normal; ValueError where it cannot decide."""
    seeds = common(arm, baseline)
    if len(seeds) < FEWEST_RANKED:
        raise ValueError(
            f"Wilcoxon's test cannot decide with {len(seeds)} pairs: two-sided its p is at least {2 / 2 ** len(seeds):.3g}, above"
            f" {ALPHA}; it takes {FEWEST_RANKED}"
        )
    return float(scipy_stats.wilcoxon([arm[seed] - baseline[seed] for seed in seeds], method="auto").pvalue)


def bootstrap(arm: Mapping[int, float], baseline: Mapping[int, float]) -> tuple[float, float]:
    """A 95 % interval (BCa) of the mean difference from resampled pairs; ValueError where there are too few to resample."""
    seeds = common(arm, baseline)
    if len(seeds) < FEWEST_RESAMPLED:
        raise ValueError(f"a bootstrap of {len(seeds)} pairs is too narrow (95 % covers 90 at 8, 76 at 3); it takes {FEWEST_RESAMPLED}")
    differences = np.array([arm[seed] - baseline[seed] for seed in seeds])
    random = np.random.default_rng(0)
    found = scipy_stats.bootstrap((differences,), np.mean, n_resamples=_RESAMPLES, confidence_level=1 - ALPHA, rng=random)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def detectable(deviation: float, pairs: int) -> float:
    """The smallest true effect that so many pairs find 8 times in 10, where differences have this standard deviation."""
    if pairs < 2 or not deviation > 0:
        return math.nan
    return deviation * float(TTestPower().solve_power(nobs=pairs, alpha=ALPHA, power=POWER))


def pairs_to_detect(deviation: float, effect: float) -> int | None:
    """How many pairs find a true effect of this size 8 times in 10; None where the answer is beyond use."""
    if not (deviation > 0 and effect > 0):
        return None
    for pairs in (2, 3, 4):  # where the equation's solver does not settle
        if detectable(deviation, pairs) <= effect:
            return pairs
    found = float(np.max(TTestPower().solve_power(effect_size=effect / deviation, alpha=ALPHA, power=POWER)))
    return math.ceil(found) if found < 1e6 else None


def repeated_measures(cells: Mapping[tuple[int, ...], Mapping[int, float]]) -> dict[tuple[int, ...], float]:
    """p of each factor's F-test, and of each interaction's, by the factors' places: a repeated-measures analysis of variance.

    `cells` are a whole grid: for each factor its level, and there the values by seed, the same seeds everywhere. Each seed is a block,
    so that what seeds have in common is no noise. None from one seed.
    """
    factors = len(next(iter(cells)))
    rows = [(*cell, seed, value) for cell, seeds in cells.items() for seed, value in seeds.items()]
    if len({row[-2] for row in rows}) < 2:
        return {}
    table = pd.DataFrame(rows, columns=[*(f"f{place}" for place in range(factors)), "seed", "value"])
    found = AnovaRM(table, "value", "seed", within=[f"f{place}" for place in range(factors)]).fit().anova_table["Pr > F"]
    return {tuple(int(word.removeprefix("f")) for word in term.split(":")): float(p) for term, p in found.items()}
