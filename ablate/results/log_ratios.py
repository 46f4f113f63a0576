"""Relative changes of positive metrics: ratios of an arm to its baseline, paired by seed, on a log scale.

Errors of quantisation differ by orders of magnitude between kinds of tensors, so their differences have no
common axis. Their ratios have one: the mean over seeds of log(arm / baseline), with its t interval, is a
percentage after exp. Halving an error and doubling it are equally far from no change.

    kind             by seed (log-ratios)       change, 95 % interval
    hot tokens       -0.31, -0.30, -0.30        -26 % (-27 to -25)

A value in dB is a logarithm already. Zero and negative values have no logarithm: such a pair is refused and
counted, and the comparison has no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ablate.experiment.schema import Metric
from ablate.results.paired_stats import Difference, Verdict, common, judge, paired_difference
from ablate.results.summary import ArmSummary, mean_of

_PER_DB = math.log(10) / 10


@dataclass(frozen=True)
class Change:
    """Relative change of one metric, from an arm's baseline to the arm."""

    arm: str
    metric: Metric
    log_ratio: Difference
    """Arm minus baseline, of natural logarithms; without pairs if a value is refused."""
    verdict: Verdict
    """Verdict, corrected by Holm over all arms by this metric."""
    refused: int
    """Number of seeds at which the arm or its baseline has no logarithm."""
    means: tuple[float, float]
    """Means of the metric of the baseline and of the arm."""
    baseline: str
    margin: float | None = None
    """Smallest log-ratio that matters; None if the file names none."""

    @property
    def relative(self) -> Difference:
        """The change as a share of the baseline: 0.5 for a value that is half as large again."""
        mean, low, high = (
            ratio(value) for value in (self.log_ratio.mean, self.log_ratio.low, self.log_ratio.high)
        )
        return replace(self.log_ratio, mean=mean, low=low, high=high)


def ratio(log: float) -> float:
    """Return a log-ratio as a relative change: 0.5 for a value that is half as large again."""
    try:
        return math.expm1(log)
    except OverflowError:
        return math.inf


def changes(arms: Sequence[ArmSummary], metric: Metric, alone: str | None = None) -> list[Change]:
    """Return the relative change of each arm that has a baseline, judged together, in the order of the arms.
    `min_effect` counts as a share of the baseline's mean. `alone`: the arm that the question is about, which
    is judged by itself."""
    values = {arm.name: arm.values for arm in arms}
    compared = [(arm, values[arm.baseline]) for arm in arms if arm.baseline in values]
    compared = [(arm, base) for arm, base in compared if arm.role != "refused"]
    unjudged = [_change(arm, base, metric) for arm, base in compared]
    margins = [_margin(arm, base, metric) for arm, base in compared]
    differences = [change.log_ratio for change in unjudged]
    minimize, judged = metric.direction == "minimize", list(zip(differences, margins, strict=True))
    verdicts = [
        judge([one], minimize)[0] if arm.name == alone else verdict
        for one, (arm, _), verdict in zip(judged, compared, judge(judged, minimize), strict=True)
    ]
    return [
        replace(change, verdict=_of(arm, verdict), margin=margin)
        for change, (arm, _), verdict, margin in zip(unjudged, compared, verdicts, margins, strict=True)
    ]


def _change(arm: ArmSummary, base: Mapping[int, float], metric: Metric) -> Change:
    """Return the change from a baseline's values by seed to an arm, without a verdict."""
    seeds = common(arm.values, base)
    ours, theirs = ({seed: _log(side[seed], metric) for seed in seeds} for side in (arm.values, base))
    refused = sum(math.isnan(ours[seed] + theirs[seed]) for seed in seeds)
    difference = paired_difference({} if refused else ours, theirs, arm.interval)
    difference = replace(difference, whole=bool(arm.gap and arm.gap.whole))
    means = (mean_of([*base.values()]), arm.mean)
    return Change(arm.name, metric, difference, Verdict("unjudged"), refused, means, arm.baseline or "")


def _log(value: float, metric: Metric) -> float:
    if metric.name.endswith("_db"):
        return value * _PER_DB
    return math.log(value) if value > 0 else math.nan


def _margin(arm: ArmSummary, base: Mapping[int, float], metric: Metric) -> float | None:
    """Return the smallest log-ratio that matters; None if the file names none."""
    if arm.margin is not None and metric.name.endswith("_db"):
        return arm.margin * _PER_DB
    level = mean_of([*base.values()])
    return math.log1p(arm.margin / level) if arm.margin is not None and level > 0 else None


def _of(arm: ArmSummary, verdict: Verdict) -> Verdict:
    """Return the verdict with what qualifies the arm: a search chose it, seeds diverged."""
    own = arm.verdict
    exploratory = arm.role == "searched" and verdict.decided
    return replace(verdict, exploratory=exploratory, diverged=own.diverged, seeds=own.seeds, mixed=own.mixed)
