"""Two arms, of one sweep or of two, side by side: what differs in them, and their difference by seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ablate.recipes.changes import differences
from ablate.results.paired_stats import Difference, paired_difference
from ablate.store.judged import FOREIGN
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member

_IGNORED = ("seed", "id")


@dataclass(frozen=True)
class Side:
    """One arm of a sweep."""

    sweep: str
    arm: str
    metric: str
    values: dict[int, float]
    """Value of the metric by seed."""
    trials: dict[int, str]
    """Id of the trial by seed."""
    spec: dict[str, Any]
    """Resolved specification, without seed."""
    provenance: dict[str, Any]
    """Commit, versions and hardware."""

    @property
    def name(self) -> str:
        """Sweep and arm."""
        return f"{self.sweep}: {self.arm}"


@dataclass(frozen=True)
class Compared:
    """The recipe knobs that differ in two arms, and the difference of their results."""

    parts: dict[str, tuple[object, object]]
    """Values of both by path in the specification."""
    origin: dict[str, tuple[object, object]]
    """The same of commit, versions and hardware."""
    same: int
    """Number of seeds at which both are the same trial."""
    difference: Difference | None
    """The second minus the first, paired by seed; None if that would say nothing."""
    why: str
    """Reason why there is no difference; empty if there is one."""


def arms_of(ledger: Ledger) -> list[str]:
    return [arm.name for arm in ledger.arms()]


def side(ledger: Ledger, arm: str) -> Side:
    """Return one arm of a sweep, which exists."""
    metric = ledger.facts.metric.name
    members: Sequence[Member] = [member for member in ledger.members() if member.name == arm]
    lasts = ledger.finals(lambda name: str(name) == metric)
    done = [member for member in members if member.status == "done" and metric in lasts.get(member.trial, {})]
    spec = members[0].resolved.content if members else {}
    return Side(
        ledger.name,
        arm,
        metric,
        {member.seed: lasts[member.trial][metric] for member in done},
        {member.seed: member.id for member in members},
        {key: value for key, value in spec.items() if key not in _IGNORED},
        ledger.facts.provenance,
    )


def compare(first: Side, second: Side) -> Compared:
    """Compare two arms, of which the first is subtracted. They are paired by seed if they have the same data,
    metric and class of device: the same seed then means the same order of the data, and the same initial
    weights if the models have the same shape."""
    parts = differences(first.spec, second.spec)
    origin = differences(first.provenance, second.provenance)
    shared = first.values.keys() & second.values.keys()
    same = sum(first.trials[seed] == second.trials.get(seed) for seed in first.trials)
    apart = [key for key in ("data", "device") if first.spec.get(key) != second.spec.get(key)]
    why = (
        f"they are compared by different metrics, {first.metric} and {second.metric}"
        if first.metric != second.metric
        else f"they differ in {' and '.join(apart)}, so that a seed means another thing in each"
        if apart
        else "runs from elsewhere have no pairs with those of another sweep; judge their files together"
        if first.sweep != second.sweep and FOREIGN in {*first.spec["workload"], *second.spec["workload"]}
        else "they have no finished seed in common"
        if not shared
        else ""
    )
    difference = None if why else paired_difference(second.values, first.values)
    return Compared(parts, origin, same, difference, why)
