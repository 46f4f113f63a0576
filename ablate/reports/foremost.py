"""Choice of the arms that a table or figure shows, if there are too many to read."""

from ablate.experiment.schema import Metric
from ablate.results.summary import ArmSummary


def foremost(arms: list[ArmSummary], metric: Metric, most: int) -> list[ArmSummary]:
    """Return at most about `most` arms, in their order, for a table that a person reads: a search's confirmed
    winner, the best arms by the metric, and beyond that number the baselines of these."""
    if len(arms) <= most:
        return arms
    sign = 1 if metric.direction == "minimize" else -1
    best = sorted(arms, key=lambda arm: (arm.role != "confirmed", not arm.values, sign * arm.mean))[:most]
    shown = {name for arm in best for name in (arm.name, arm.baseline)}
    return [arm for arm in arms if arm.name in shown]
