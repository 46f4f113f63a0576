"""Decisions on what a sweep runs next: seeds for undecided arms, and a search's winner on fresh seeds."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ablate.experiment.schema import Constraint, Metric
from ablate.results.paired_stats import MOST_SEEDS, Verdict
from ablate.results.summary import ArmSummary, summaries
from ablate.store.ledger import Ledger

_NORMAL = 1.96
"""Half-width of a 95 % interval in standard errors, with as many seeds as one likes."""
_SETTLED = ("horizon", "position", "windows")
"""Reasons without a verdict that more seeds do not remove."""


def undecided(ledger: Ledger, metric: Metric | None = None) -> list[tuple[str, str]]:
    """Return the arms that more seeds may decide, each with its baseline's name.

    An arm is returned if every seed has a pair and the verdict is still open. Left out are arms with a seed
    that is not over, and arms that failed or diverged on a seed, or whose baseline did: that seed is not
    missing at random, so the mean over the others is not the arm's. Also left out are arms with the same
    numbers as their baseline, and comparisons in which no arm learned. They are compared by `metric`, by
    default the main one.
    """
    return still_open(summaries(ledger, metric or ledger.facts.metric))


def still_open(arms: Iterable[ArmSummary]) -> list[tuple[str, str]]:
    """Return those of a ledger's arms that `undecided` returns."""
    return [
        (arm.name, arm.baseline)
        for arm in arms
        if arm.gap and arm.baseline is not None and arm.role != "null"
        if 0 < arm.gap.pairs == arm.seeds and arm.verdict.reason != "nothing_learned"
        if not arm.verdict.decided and arm.verdict.reason not in _SETTLED
    ]


def violations(constraints: Iterable[Constraint], finals: Mapping[str, float]) -> list[float]:
    """Return the amount by which a member's last values break each constraint. It is at most 0 if the
    constraint is kept, and infinite if there is no value."""
    broken = []
    for constraint in constraints:
        value, excess = finals.get(constraint.metric, math.nan), math.nan
        if constraint.at_most is not None:
            excess = value - constraint.at_most
        elif constraint.at_least is not None:
            excess = constraint.at_least - value
        broken.append(math.inf if math.isnan(excess) else excess)
    return broken


def infeasible(ledger: Ledger) -> set[str]:
    """Return the names of the arms of which a run breaks a constraint of the search, or lacks its metric."""
    limits = ledger.facts.constraints
    lasts = ledger.finals(lambda name: any(limit.metric == str(name) for limit in limits))
    return {one.name for one in ledger.members() if max(violations(limits, lasts[one.trial]), default=0) > 0}


def ranked(ledger: Ledger, arms: Iterable[ArmSummary], metric: Metric) -> list[ArmSummary]:
    """Return the searched arms that may win, the best mean first: all of their seeds are done, since the mean
    over those that did not diverge is not the arm's, and they keep the constraints."""
    broken, sign = infeasible(ledger), 1 if metric.direction == "minimize" else -1
    whole = [arm for arm in arms if arm.role == "searched" and 0 < len(arm.values) == arm.seeds]
    return sorted((arm for arm in whole if arm.name not in broken), key=lambda arm: sign * arm.mean)


def winner(ledger: Ledger, metric: Metric | None = None) -> str | None:
    """Return the name of the best of `ranked` by a metric (None: the main one); None if there is none, or if
    it is its own baseline."""
    metric = metric or ledger.facts.metric
    best = next(iter(ranked(ledger, summaries(ledger, metric), metric)), None)
    return best.name if best and best.baseline else None


def fresh_seeds(ledger: Ledger, count: int) -> tuple[int, ...]:
    """Return the first `count` seeds on which no arm of the study was ever run. A winner rerun on them has an
    unbiased mean: they took no part in choosing it."""
    used = set(ledger.studied_seeds())
    return tuple(itertools.islice((seed for seed in itertools.count() if seed not in used), count))


@dataclass(frozen=True)
class Settling:
    """Seeds that settle a family of comparisons, and what they cost."""

    undecided: int
    """Undecided comparisons."""
    known: int
    """Those of them for which 200 seeds or fewer are enough."""
    seeds: int
    """Seeds in all at which each of those has an 80 % chance of a verdict; 0 if there is none."""
    runs: int
    """Runs that are missing for that."""
    hours: float
    """Hours of one worker that these take."""
    floored: int = 0
    """Undecided comparisons that no number of seeds settles, since all seeds share the error of the
    evaluation."""
    fewest: int = 0
    """Seeds in all for the comparison that needs the fewest."""

    @property
    def time(self) -> str:
        """The hours, or minutes, in words."""
        return f"{self.hours:.1f} h" if self.hours >= 1.5 else f"{60 * self.hours:.0f} min"

    @property
    def text(self) -> str:
        if not self.known and self.floored == self.undecided:
            return (
                "No number of seeds settles this: the error of the evaluation, which all seeds share, is as"
                " large as the effects in question. Evaluate on more validation data (eval_tokens)."
            )
        if not self.known:
            count = "" if self.undecided == 1 else f"each of the {self.undecided} "
            noun = "undecided comparison" + ("" if self.undecided == 1 else "s")
            which = f"{count or 'the '}{noun}"
            return f"{which[0].upper()}{which[1:]} needs over {MOST_SEEDS} seeds."
        rest = self.undecided - self.known
        others = f"; the other {rest} would need over {MOST_SEEDS}" if rest else ""
        first = f", and the cheapest one has it with {self.fewest}" if 0 < self.fewest < self.seeds else ""
        which = (
            f"{self.known} of {self.undecided} undecided ones have"
            if rest
            else "the undecided comparison has"
            if self.undecided == 1
            else "each undecided comparison has"
        )
        cost = f": about {self.time} more of one worker" if self.hours else ""
        return f"With {self.seeds} seeds in all, {which} an 80 % chance of a verdict{first}{cost}{others}."


def seeds_to_settle(ledger: Ledger, verdicts: Sequence[Verdict]) -> Settling | None:
    """Return the seeds that settle a family of comparisons; None if none is undecided or no number is known.
    The sweep's finished trials give the time of a seed."""
    open_ = [verdict for verdict in verdicts if verdict.kind == "undecided"]
    counts = [verdict.needed.count for verdict in open_ if verdict.needed]
    if not open_ or len(counts) < len(open_):
        return None
    known = [count for count in counts if count is not None]
    seconds: dict[str, list[float]] = {}
    for member in ledger.members():
        if member.status == "done" and member.seconds:
            seconds.setdefault(member.name, []).append(member.seconds)
    each = math.fsum(math.fsum(times) / len(times) for times in seconds.values())
    have = max((len(times) for times in seconds.values()), default=0)
    more = max(0, max(known, default=0) - have)
    return Settling(
        len(open_),
        len(known),
        max(known, default=0),
        more * len(seconds),
        more * each / 3600,
        sum(map(_floored, open_)),
        min(known, default=0),
    )


def _floored(verdict: Verdict) -> bool:
    """Return True if a verdict stays undecided without any spread over seeds: by the evaluation's error."""
    if verdict.planned is None:
        return False
    difference, margin, *_ = verdict.planned
    half = _NORMAL * difference.shared_error
    resolved = abs(difference.mean) > half
    return half > 0 and not resolved and (margin is None or abs(difference.mean) + half >= margin)
