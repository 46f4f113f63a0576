"""Parts of a gap, damage of the cast and of training, and the worth of pairing by seed: correlation.

The problem. A full-run gap says that an arm ends higher than its baseline, not why: its weights may have
learnt less, or may be as good and only be read through coarse numbers.

The idea. Trials evaluate their last weights twice, in the precision in force (`val/loss`) and in high
precision (`val/loss_bf16`). So the gap splits, seed by seed, into two parts that add up to it exactly:

    direct damage   (loss - loss_bf16) of the arm, minus that of its baseline
    learnt damage   loss_bf16 of the arm, minus that of its baseline

The direct part has little of the noise between runs, which is in both readings of the same weights.

The gap of an arm with experts splits in another way, if a second arm has the same recipe with
`experts.routing: replay`: that arm's gap is of rounding, with routes held during training; the rest is of
flipped routes.

Not given: verdicts on the parts. They are described, and the verdict is on the gap.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy import special

from ablate.recipes.experts import Experts
from ablate.results.forked import sharpened
from ablate.results.paired_stats import Difference, common, paired_difference
from ablate.results.summary import ArmSummary
from ablate.store.ledger import Ledger
from ablate.training.metric_names import FLIPPED, TOKENS_FLIPPED

FEWEST_CORRELATED = 4
"""Fewest pairs of which a correlation has an interval: Fisher's z has the variance 1 / (pairs - 3)."""


@dataclass(frozen=True)
class Damage:
    """The gap of an arm and its two parts, in the metric's unit, over the seeds that have all readings.

    In a forked design the gap's interval has the error of the evaluation in it, as everywhere; those of the
    parts have the spread over seeds alone.
    """

    arm: str
    gap: Difference
    direct: Difference
    learnt: Difference


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation of an arm's values with its baseline's over seeds, with a 95 % interval."""

    value: float
    low: float
    high: float
    """The bounds are NaN with fewer than 4 pairs; all three if the values of one of them do not vary."""
    pairs: int


def damages(ledger: Ledger, arms: Sequence[ArmSummary], metric: str) -> list[Damage]:
    """Return the parts of each arm's gap by a metric such as `val/loss`, whose second reading is
    `val/loss_bf16`; none for a metric without a second reading. The arms include their baselines."""
    names = metric, f"{metric}_bf16"
    lasts = ledger.finals(lambda name: str(name) in names)
    own, high = ({arm.name: dict[int, float]() for arm in arms} for _ in names)
    for member in ledger.members():
        found = [lasts.get(member.trial, {}).get(name, math.nan) for name in names]
        if member.status == "done" and member.name in own and all(map(math.isfinite, found)):
            own[member.name][member.seed], high[member.name][member.seed] = found
    cast = {arm: {seed: value - high[arm][seed] for seed, value in own[arm].items()} for arm in own}
    parts = []
    for arm in arms:
        if arm.baseline in own and common(own[arm.name], own[arm.baseline]):
            gap, direct, learnt = (
                paired_difference(each[arm.name], each[arm.baseline], arm.interval)
                for each in (own, cast, high)
            )
            parts.append(Damage(arm.name, sharpened(gap, arm.view), direct, learnt))
    return parts


@dataclass(frozen=True)
class RoutedDamage:
    """The gap of an arm with experts, over the seeds of it, of the arm that replays routes, and of the
    baseline, and the two parts that add up to it seed by seed."""

    arm: str
    held: str
    """The arm of the same recipe that replays the routes of unquantised training."""
    gap: Difference
    rounding: Difference
    """Gap of the arm that replays routes."""
    flips: Difference
    """Difference of the two arms."""


def routed(ledger: Ledger, arms: Sequence[ArmSummary]) -> list[RoutedDamage]:
    """Return the parts of the gap of each arm that another arm with replayed routes is like."""
    specs = {member.name: member.resolved for member in ledger.members()}
    by_name = {arm.name: arm for arm in arms}
    free: dict[str, ArmSummary] = {}
    held: dict[str, ArmSummary] = {}
    for arm in arms:
        recipe = dict(specs[arm.name].recipe or {}) if arm.name in specs else {}
        experts = Experts.model_validate(recipe.pop("experts", {}))
        alike = recipe, Experts.model_validate(experts.model_dump(exclude={"routing"})).model_dump()
        if recipe and arm.baseline in by_name:
            key = json.dumps([*alike, specs[arm.name].config, arm.baseline], sort_keys=True)
            (held if experts.replays else free).setdefault(key, arm)
    parts = []
    for key in free.keys() & held.keys():
        arm, other = free[key], held[key]
        base = by_name[str(arm.baseline)].values
        seeds = sorted({*arm.values} & {*other.values} & {*base})
        a, h, b = ({seed: values[seed] for seed in seeds} for values in (arm.values, other.values, base))
        pairs = ((a, b), (h, b), (a, h))
        if seeds:
            differences = (paired_difference(x, y, arm.interval) for x, y in pairs)
            parts.append(RoutedDamage(arm.name, other.name, *differences))
    return sorted(parts, key=lambda each: list(by_name).index(each.arm))


def flipped(ledger: Ledger, arms: Sequence[ArmSummary]) -> list[tuple[str, dict[str, float], int]]:
    """Return each arm's shares of what quantisation sends to other experts, by metric, and its seeds. Arms
    without such a record are left out. Shares are means over measured steps, then over finished seeds. Those
    of a trunk, which is of no arm, do not count."""
    names = FLIPPED, TOKENS_FLIPPED
    found: dict[str, list[list[float]]] = {}
    for member in ledger.members() if {*names} <= {*ledger.names().values()} else ():
        trunk = max((member.resolved.forks or {}).get("positions", (0,)))
        each = [
            [value for step, value in ledger.series(member.trial, name).items() if step > trunk]
            for name in names
        ]
        if member.status == "done" and all(each):
            found.setdefault(member.name, []).append([*map(fmean, each)])
    means = {arm: map(fmean, zip(*seeds, strict=True)) for arm, seeds in found.items()}
    return [
        (arm.name, dict(zip(names, means[arm.name], strict=True)), len(found[arm.name]))
        for arm in arms
        if arm.name in found
    ]


def correlation(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Correlation:
    """Return the correlation of two arms over their common seeds, with Fisher's interval (of normal values).

    Pairing by seed makes a gap sharper only where it is positive: the variance of the paired gap is
    var(arm) + var(baseline) - 2 r sd(arm) sd(baseline).
    """
    seeds = common(arm, baseline)
    x, y = (np.array([values[seed] for seed in seeds]) for values in (arm, baseline))
    if len(seeds) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(math.nan, math.nan, math.nan, len(seeds))
    value = float(np.clip(np.corrcoef(x, y)[0, 1], -1, 1))
    if len(seeds) < FEWEST_CORRELATED or abs(value) == 1:
        return Correlation(value, math.nan, math.nan, len(seeds))
    half = special.ndtri(0.975) / math.sqrt(len(seeds) - 3)
    return Correlation(
        value, math.tanh(math.atanh(value) - half), math.tanh(math.atanh(value) + half), len(seeds)
    )
