"""Finished runs that are not comparable or not distinct, and the steps of a run until it reaches a loss.

A function that returns at step 50 of 100 has finished, and its last loss is that of step 50. Beside a run of
100 steps it looks worse, whatever the recipe does. Built-in workloads take the steps of their spec.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ablate.results.copies import Copies, Lasts, copies
from ablate.store.judged import FOREIGN
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.training.workloads import abilities


@dataclass(frozen=True)
class Lengths:
    """Finished runs whose last record stands before the last step of their spec, by number of the trial, and
    those with the same values."""

    early: dict[int, tuple[int, int]]
    """Step of the last record, and the spec's steps."""
    uneven: frozenset[int]
    """Those of them with a longer run of the same seed and the same spec's steps beside them."""
    copies: Sequence[Copies] = ()
    """Runs of an arm with the same values."""


def lengths(ledger: Ledger, groups: Mapping[int, Sequence[Member]], lasts: Lasts, metric: str) -> Lengths:
    """Return the runs that ended early, and those with the same values.

    Args:
        ledger: Ledger of the sweep.
        groups: Members of arms that are compared with each other, by number of the arm.
        lasts: Last values by number of the trial, and by metric.
        metric: Metric that is compared.
    """
    early: dict[int, tuple[int, int]] = {}
    beside: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    if ledger.facts.design is not None:  # windows have steps of their own
        return Lengths({}, frozenset())
    for member in itertools.chain.from_iterable(groups.values()):
        spec = member.resolved
        foreign = spec.workload == FOREIGN
        if not abilities(spec.workload).own_code and not foreign:
            break  # a sweep has one workload
        if member.status != "done":
            continue
        steps, last = spec.config["steps"], spec.config["last"] if foreign else ledger.last_step(member.trial)
        beside[-1 if foreign else member.seed, steps][member.trial] = last
        if last < steps:
            early[member.trial] = last, steps
    ends = [(group, max(group.values())) for group in beside.values()]
    uneven = frozenset(trial for group, most in ends for trial, last in group.items() if last < most)
    same = [each for members in groups.values() for each in copies(ledger, members, lasts, metric)]
    return Lengths(early, uneven, same)


def steps_to(losses: Mapping[int, float], target: float) -> float:
    """Return the steps after which a loss is down to a target for the first time; NaN if it never is.

    Between two evaluations the loss is taken to fall with the logarithm of the steps.

    Args:
        losses: loss by step, ascending.
        target: loss to reach.
    """
    earlier: tuple[int, float] | None = None
    for step, loss in losses.items():
        if loss <= target:
            if earlier is None or loss == target:
                return float(step)
            share = (earlier[1] - target) / (earlier[1] - loss)
            return math.exp(math.log(earlier[0]) + share * math.log(step / earlier[0]))
        earlier = (step, loss) if math.isfinite(loss) else earlier
    return math.nan
