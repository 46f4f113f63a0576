"""Summaries of a sweep's arms, read back from its ledger: values, gap to the baseline, verdict. Read-only."""

import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from ablate.experiment.roles import Role
from ablate.experiment.schema import Metric
from ablate.files import Json
from ablate.results.forked import FIFTH, Readings, Views, qualified, readings_of, sharpened, views
from ablate.results.intervals import ALPHA, Interval
from ablate.results.paired_stats import Difference, Reason, Verdict, judge, p_value, paired_difference
from ablate.results.run_lengths import Copies, Lengths, lengths, steps_to
from ablate.results.unpaired import difference_of, unpaired_difference
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import OVER, ArmRow, Member
from ablate.training.metric_names import (
    ARITHMETIC,
    FIRST_NONFINITE,
    PRODUCT_BITS,
    parse,
    reading,
    target_of,
)
from ablate.training.workloads import abilities

LOSS = "val/loss"
_SQNR = "sqnr_db"
UNLEARNED = Verdict("unjudged", "nothing_learned")
"""Verdict on a comparison in which no arm learned anything."""


@dataclass(frozen=True)
class ArmSummary:
    """One arm of a sweep over its seeds: a line of the table of arms."""

    name: str
    baseline: str | None
    knobs: dict[str, Json]
    values: dict[int, float]
    """Last value of the metric by seed; finished seeds with a finite value only."""
    given: tuple[int, ...]
    """Seeds that the arm was given."""
    gap: Difference | None
    margin: float | None
    """Smallest gap that matters, in the metric's unit."""
    interval: Interval
    """Kind of interval of its comparisons."""
    verdict: Verdict
    """Verdict, corrected for all arms that are judged together, with everything about the arm that qualifies
    it."""
    role: Role
    sqnr_db: float
    tokens_per_s: float
    memory: float
    """Peak memory in bytes, mean over seeds: allocated on the GPU, or resident in the process if there is no
    GPU."""
    nans: int
    diverged: tuple[int, ...]
    """Seeds on which the loss became NaN or infinite."""
    missing: tuple[int, ...]
    """Seeds that were not run to the end, or failed."""
    pruned: tuple[int, ...] = ()
    """Seeds that the pruner stopped. They are not run again."""
    censored: tuple[int, ...] = ()
    """Finished seeds that never reach the target of a metric `steps_to`. The arm then has no values: a mean
    over the seeds that reach it would be of the fastest alone."""
    reason: str = ""
    """Reason why a refused arm cannot be run; empty if its ledger has none."""
    context_free: float | None = None
    """Loss of a model that ignores its input, if the workload reports one and the metric is of validation or
    training."""
    early: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step of the last record and steps of the spec by seed, of finished runs that ended early."""
    uneven: tuple[int, ...] = ()
    """Seeds of those that ended before another arm's run. The arm has no values unless the file allows it."""
    copies: tuple[Copies, ...] = ()
    """Groups of its runs with the same values. Those that are surely one count once."""
    floor_unknown: bool = False
    """True if the workload reports that loss, and neither the ledger nor a result has it."""
    loss: float = math.nan
    """Mean val/loss over the seeds that have it."""
    readings: Readings | None = None
    """Values at other horizons and positions; None for full runs."""
    view: Views | None = None
    """Its gap, seen in other ways; None for full runs."""
    sees: bool = True
    """False if the design of the sweep resolves no known-bad arm, so that it cannot tell "equivalent"."""

    def with_values(self, values: Mapping[int, float]) -> Self:
        """Return the arm with other values by seed, as at another horizon."""
        return replace(self, values=dict(values))

    @property
    def learned(self) -> bool:
        """False if its mean loss is no better than that of a model that ignores its input; True if that is
        unknown."""
        return self.context_free is None or not self.loss >= self.context_free

    @property
    def colour(self) -> str:
        """CSS class of its line. Empty if it has no verdict, or if a search chose it by the same numbers."""
        if self.gap is None:
            return "baseline" if self.is_baseline and not self.pruned else ""
        if self.diverged:
            return "diverged"
        return "" if self.verdict.kind == "unjudged" or self.verdict.exploratory else self.verdict.kind

    @property
    def seeds(self) -> int:
        """Number of seeds that the arm was given."""
        return len(self.given)

    @property
    def unmeasured(self) -> int:
        """Number of seeds that are done without a finite value of the metric."""
        without = (self.values, self.diverged, self.missing, self.pruned, *(c.again for c in self.copies))
        return 0 if self.censored or self.uneven else self.seeds - sum(map(len, without))

    @property
    def is_baseline(self) -> bool:
        """True for an arm that can be run and is compared with no other."""
        return self.baseline is None and self.role != "refused"

    @property
    def mean(self) -> float:
        """Mean of the metric over the seeds that have it."""
        return mean_of([*self.values.values()])


def interval_of(ledger: Ledger) -> Interval:
    """Return the kind of the sweep's intervals; t if the ledger names none."""
    return Interval.parse(ledger.facts.interval)


def summaries(ledger: Ledger, metric: Metric | None = None) -> list[ArmSummary]:
    """Return one summary by a metric (None: the main one) for each arm, in the ledger's order.

    Verdicts are corrected by Holm over the arms that are compared; a search's proposals are corrected apart
    from the others, and so is the baseline's twin. An arm has no verdict if neither it nor its baseline
    learned anything.
    """
    metric = metric or ledger.facts.metric
    with ledger.snapshot():
        arms = _summaries(ledger, metric)
        mixed = _mixed_pairs(ledger, arms)
    judged: dict[str, Verdict] = {}
    for family in {_family(arm.role): None for arm in arms}:
        judged |= _judged([arm for arm in arms if _family(arm.role) == family], arms, metric)
    return [
        replace(arm, verdict=replace(_qualified(arm, verdict), mixed=mixed.get(arm.name, 0)))
        if (verdict := judged.get(arm.name))
        else arm
        for arm in arms
    ]


def compared_rows(ledger: Ledger) -> list[ArmRow]:
    """Return the rows of the arms that are compared: all but the halves, run once, of a search for a
    cause."""
    return [row for row in ledger.arms() if row.role != "half"]


def _mixed_pairs(ledger: Ledger, arms: list[ArmSummary]) -> dict[str, int]:
    """Return, by arm, the number of its pairs that two kinds of processors or versions of torch computed."""
    numbers = [ledger.largest(name) for name in (ARITHMETIC, PRODUCT_BITS)]
    if all(len(set(each.values())) < 2 for each in numbers):
        return {}
    kinds: dict[str, dict[int, list[float | None]]] = {arm.name: {} for arm in arms}
    for member in ledger.members():
        kinds.setdefault(member.name, {})[member.seed] = [each.get(member.trial) for each in numbers]
    values = {arm.name: arm.values for arm in arms}
    return {
        arm.name: sum(
            any(
                one != two and None not in (one, two) for one, two in zip(own[seed], other[seed], strict=True)
            )
            for seed in arm.values.keys() & values[arm.baseline].keys()
        )
        for arm in arms
        if arm.baseline is not None
        for own, other in [(kinds[arm.name], kinds[arm.baseline])]
    }


def _family(role: Role) -> str:
    """Return the name of the family of comparisons that arms with this role are corrected in."""
    return role if role in ("searched", "null", "bad") else "listed"


def _summaries(ledger: Ledger, metric: Metric) -> list[ArmSummary]:
    """Return one summary for each arm, without the verdicts on gaps."""
    arms = {arm.arm: arm for arm in compared_rows(ledger)}
    always = {metric.name, LOSS, FIRST_NONFINITE}
    lasts = ledger.finals(lambda name: name.metric == _SQNR or name.of_window or str(name) in always)
    speeds = ledger.rates("throughput/tokens_per_s")
    peaks = ledger.largest("memory/rss") | ledger.largest("memory/peak_allocated")
    members: dict[int, list[Member]] = {number: [] for number in arms}
    for member in ledger.members():
        if member.arm in members:
            members[member.arm].append(member)
    if (target := target_of(metric.name)) is not None:
        for trial, values_of in lasts.items():
            values_of[metric.name] = steps_to(ledger.series(trial, LOSS), target)
    ends = lengths(ledger, members, lasts, metric.name)
    values = {number: _values(group, lasts, metric, ends) for number, group in members.items()}
    kind, seeds = interval_of(ledger), None
    if Judged.alone(ledger):
        seeds = {number: frozenset(member.seed for member in group) for number, group in members.items()}
    readings = _Readings(arms, lasts, speeds, peaks, values, metric, kind, ends, seeds)
    without_references = [_summary(readings, number, members[number]) for number in arms]
    return _with_references(_in_windows(without_references, ledger, metric), ledger, members, metric)


def _in_windows(arms: list[ArmSummary], ledger: Ledger, metric: Metric) -> list[ArmSummary]:
    """Return the arms of a forked design with their gaps as other horizons and positions see them; full runs
    as they are.

    A gap's interval then includes the error of the evaluation. Without `min_effect`, a fifth of the known-bad
    arm's damage is the smallest that matters.
    """
    design = ledger.facts.design
    by_name = {arm.name: arm for arm in arms}
    pairs = [arm.name for arm in arms if arm.gap is not None and arm.baseline in by_name]

    def gaps(those: Sequence[ArmSummary]) -> list[Difference]:
        values = {arm.name: arm.values for arm in those}
        return [
            paired_difference(values[name], values[by_name[name].baseline or ""], by_name[name].interval)
            for name in pairs
        ]

    if design is None:
        return arms
    views_by_name = dict(zip(pairs, views(arms, gaps, len(pairs)), strict=True))
    arms = [
        replace(arm, gap=arm.gap and sharpened(arm.gap, view), view=view)
        for arm in arms
        for view in [views_by_name.get(arm.name)]
    ]
    bad = next((arm.gap for arm in arms if arm.name == design.bad), None)
    sees = bad is not None and p_value(bad) < ALPHA and (bad.mean > 0) == (metric.direction == "minimize")
    margin = FIFTH * abs(bad.mean) if sees and bad and metric.min_effect is None else None
    return [replace(arm, sees=sees, margin=margin or arm.margin) for arm in arms]


@dataclass(frozen=True)
class _Readings:
    """Part of a ledger that summaries of arms are computed from."""

    arms: Mapping[int, ArmRow]
    """Arms by number."""
    lasts: Mapping[int, Mapping[str, float]]
    """Last values by number of the trial, and by metric."""
    speeds: Mapping[int, float]
    """Tokens per second by number of the trial."""
    peaks: Mapping[int, float]
    """Peak memory in bytes by number of the trial."""
    values: Mapping[int, dict[int, float]]
    """Last values of the metric by number of the arm, and by seed."""
    metric: Metric
    interval: Interval
    ends: Lengths
    seeds: Mapping[int, frozenset[int]] | None = None
    """Seeds of all runs by arm, of runs from elsewhere, whose arms may lack each other's; None for others."""

    def gap(self, number: int) -> Difference | None:
        """Return an arm minus its baseline; None for a baseline. Runs from elsewhere are no pairs of ours."""
        arm, values = self.arms[number], self.values[number]
        base = self.values.get(-1 if arm.baseline is None else arm.baseline)
        if base is None or arm.baseline is None:  # a baseline, or its own is gone
            return None
        if arm.role == "foreign":
            return unpaired_difference(values, base)
        if self.seeds is None:
            return paired_difference(values, base, self.interval)
        return difference_of(values, base, self.interval, (self.seeds[number], self.seeds[arm.baseline]))


def nothing_learned(arms: Collection[ArmSummary]) -> bool:
    """Return True if no arm's loss is better than that of a model that ignores its input: nothing to
    compare."""
    measured = [arm for arm in arms if not math.isnan(arm.loss)]
    return bool(measured) and not any(arm.learned for arm in measured)


def judge_learned(
    compared: Sequence[tuple[Difference, float | None, Collection[ArmSummary]]],
    metric: Metric,
    plan: bool = True,
    unseen: int = 0,
    seen: Sequence[Views | None] | None = None,
) -> list[Verdict]:
    """Return the verdicts on comparisons, corrected over those in which at least one arm learned something.

    All tables and notes use this rule. A comparison, a difference with its margin and the arms in it, in
    which no arm learned anything is `UNLEARNED` and does not count in the correction. One without pairs names
    the runs that cannot be compared, if that is why.

    `plan`: name the seeds that undecided comparisons need; `unseen`: comparisons of the family without a
    result yet, which count in the correction; `seen`: each comparison of a forked design, seen in other ways,
    which may leave it without a winner.
    """
    learned = [(difference, margin) for difference, margin, arms in compared if not nothing_learned(arms)]
    verdicts = iter(judge(learned, metric.direction == "minimize", plan, len(learned) + unseen))
    judged = [
        UNLEARNED if nothing_learned(arms) else qualified(next(verdicts), view, all(arm.sees for arm in arms))
        for (_, _, arms), view in zip(compared, seen or [None] * len(compared), strict=True)
    ]
    return [
        _withheld(difference, verdict, arms) or verdict
        for (difference, _, arms), verdict in zip(compared, judged, strict=True)
    ]


def _judged(
    arms: Collection[ArmSummary], everything: Iterable[ArmSummary], metric: Metric, unseen: int = 0
) -> dict[str, Verdict]:
    """Return the verdicts on these arms by name. `everything`: the arms that include their baselines."""
    by_name = {arm.name: arm for arm in everything}
    compared = {
        arm.name: (arm.gap, arm.margin, [arm, by_name[arm.baseline]])
        for arm in arms
        if arm.gap is not None and arm.baseline is not None and not arm.pruned
    }
    plan = any(arm.role not in ("searched", "null", "bad") for arm in arms)
    views_of = [by_name[name].view for name in compared]
    verdicts = judge_learned(list(compared.values()), metric, plan, unseen, views_of)
    return dict(zip(compared, verdicts, strict=True))


def _withheld(difference: Difference, verdict: Verdict, arms: Collection[ArmSummary]) -> Verdict | None:
    """Return the verdict on arms with too few values since runs are copies, or cannot be compared."""
    if verdict.kind == "unjudged" and any(each.sure for arm in arms for each in arm.copies):
        return Verdict("unjudged", "copies", count=difference.pairs)
    if difference.pairs:
        return None
    censored = {seed for arm in arms for seed in arm.censored}
    uneven = {seed for arm in arms for seed in arm.uneven}
    if uneven:
        return Verdict("unjudged", "length", count=len(uneven))
    return Verdict("unjudged", "censored", count=len(censored)) if censored else None


def _qualified(arm: ArmSummary, verdict: Verdict) -> Verdict:
    """Return the verdict with everything about the arm that qualifies it. A gap of an arm that a search chose
    by the same numbers is exploratory, and a verdict on an arm that diverged on some seeds is on the other
    seeds alone."""
    pairs = arm.gap.pairs if arm.gap else 0
    return replace(
        verdict,
        exploratory=arm.role == "searched" and verdict.decided,
        fresh_seeds=pairs if arm.role == "confirmed" and pairs > 1 else 0,
        reference=None if arm.learned or verdict.reason == "nothing_learned" else arm.context_free,
        diverged=len(arm.diverged),
        seeds=arm.seeds if arm.diverged else 0,
    )


class Gaps:
    """Gaps of arms by the main metric with their verdicts, from one state of a ledger. All arms of a grid are
    summarised once, at the first question about one of them: a grid of 1,000 arms would be read 1,000 times
    otherwise."""

    def __init__(self, ledger: Ledger) -> None:
        """Read no arm yet. If the ledger is written to, the gaps are those of before or after that."""
        self._ledger, self._metric = ledger, ledger.facts.metric
        self._judged: dict[tuple[str, int | None], dict[str, Verdict]] = {}

    @cached_property
    def _rows(self) -> dict[int, ArmRow]:
        return {row.arm: row for row in compared_rows(self._ledger)}

    @cached_property
    def _families(self) -> dict[str, list[int]]:
        """Numbers of the arms with a baseline that are corrected together, by the name of the family."""
        families: dict[str, list[int]] = {}
        for number, row in self._rows.items():
            if row.baseline is not None:
                families.setdefault(_family(row.role), []).append(number)
        return families

    @cached_property
    def _open(self) -> set[int]:
        """Numbers of arms of which a run is not over."""
        return {member.arm for member in self._ledger.members() if member.status not in OVER}

    @cached_property
    def _arms(self) -> dict[int, ArmSummary]:
        return dict(zip(self._rows, _summaries(self._ledger, self._metric), strict=True))

    def of(self, arm: int) -> tuple[Difference, Verdict] | None:
        """Return one arm's gap by the main metric with its verdict; None for a baseline, or while a run of
        the baseline is not over.

        The verdict cannot be overturned by arms that are still running: they count as comparisons without a
        result. After all arms are over it is that of `summaries`, with the same number of seeds. No seeds are
        planned for a search's proposal. There may be thousands of proposals, so only this one and its
        baseline are read, and its p-value is multiplied by the number of proposals.
        """
        members = self._ledger.members(arm)
        baseline = members[0].baseline if members else None
        if baseline is None:
            return None
        others = self._ledger.members(baseline)
        if not others or any(member.status not in OVER for member in others):
            return None
        if self._rows[arm].role == "searched":
            summary, verdict = self._of_proposal(arm, members, baseline, others)
        else:
            summary = self._arms[arm]
            verdict = self._verdicts(_family(self._rows[arm].role), arm).get(summary.name)
        if summary.gap is None:
            return None
        return summary.gap, _qualified(summary, verdict) if verdict else summary.verdict

    def _verdicts(self, family: str, arm: int) -> dict[str, Verdict]:
        """Return the verdicts on a family's arms by name. `arm` counts as over even if a run is open."""
        key = (family, arm if arm in self._open else None)
        if key not in self._judged:
            members, open_ = self._families[family], self._open - {arm}
            arms = [self._arms[number] for number in members if number not in open_]
            compared = [summary for summary in arms if summary.gap is not None and not summary.pruned]
            self._judged[key] = _judged(
                compared, self._arms.values(), self._metric, len(open_.intersection(members))
            )
        return self._judged[key]

    def _of_proposal(
        self, arm: int, members: list[Member], baseline: int, others: list[Member]
    ) -> tuple[ArmSummary, Verdict | None]:
        """Return the summary of a search's proposal, and the verdict on it."""
        ledger, metric = self._ledger, self._metric
        groups = {arm: members, baseline: others}
        design = ledger.facts.design
        # Without its known-bad arm a forked design cannot tell "equivalent".
        for number, row in self._rows.items():
            if design and design.bad == row.name and row.baseline is not None:
                groups |= {each: ledger.members(each) for each in (number, row.baseline)}
        names = [metric.name, LOSS]
        names += [text for text in ledger.names().values() if parse(text).of_window]
        lasts = {
            m.trial: {name: ledger.last_value(m.trial, name) for name in names}
            for m in itertools.chain.from_iterable(groups.values())
        }
        ends = lengths(ledger, groups, lasts, metric.name)
        values = {number: _values(group, lasts, metric, ends) for number, group in groups.items()}
        readings = _Readings(self._rows, lasts, {}, {}, values, metric, interval_of(ledger), ends)
        pair = [_summary(readings, number, group) for number, group in groups.items()]
        pair = _in_windows(pair, ledger, metric)
        summary, base, *_ = _with_references(pair, ledger, groups, metric)
        family = self._families[_family(self._rows[arm].role)]
        return summary, _judged([summary], [summary, base], metric, len(family) - 1).get(summary.name)


def _with_references(
    arms: list[ArmSummary], ledger: Ledger, members: Mapping[int, list[Member]], metric: Metric
) -> list[ArmSummary]:
    """Return the arms with the loss of a model that ignores its input, if the metric is one of validation or
    training."""
    if not parse(metric.name).of_data:
        return arms
    recorded, found = ledger.context_free(), []
    for arm, group in zip(arms, members.values(), strict=True):
        first = next((member for member in group if member.status == "done"), None)
        if first and first.trial in recorded:
            arm = replace(arm, context_free=recorded[first.trial])
        elif first:
            arm = replace(arm, floor_unknown=abilities(first.resolved.workload).context_free)
        found.append(arm)
    return found


def _values(
    members: list[Member], lasts: Mapping[int, Mapping[str, float]], metric: Metric, ends: Lengths
) -> dict[int, float]:
    """Return the last finite values of a metric by seed, of finished runs; none if a seed is censored, or
    ended before the runs that it is compared with. Copies count once."""
    if _censored(members, lasts, metric.name) or _uneven(members, metric, ends):
        return {}
    again = {trial for each in ends.copies for trial in each.again}
    values = {
        member.seed: lasts[member.trial].get(metric.name, math.nan)
        for member in members
        if member.status == "done" and member.trial not in again
    }
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _censored(members: list[Member], lasts: Mapping[int, Mapping[str, float]], name: str) -> tuple[int, ...]:
    """Return the finished seeds that never reach the target of a metric `steps_to`; none by other metrics."""
    if target_of(name) is None:
        return ()
    done = (member for member in members if member.status == "done")
    return tuple(member.seed for member in done if math.isnan(lasts[member.trial].get(name, math.nan)))


def _uneven(members: list[Member], metric: Metric, ends: Lengths) -> tuple[int, ...]:
    """Return the seeds that ended before another arm's run; none if the file compares them all the same."""
    return () if metric.any_length else tuple(m.seed for m in members if m.trial in ends.uneven)


def _summary(readings: _Readings, number: int, members: list[Member]) -> ArmSummary:
    """Return the summary of one arm, without the verdict on its gap."""
    arm, values, lasts = readings.arms[number], readings.values[number], readings.lasts
    reference = arm.baseline if arm.baseline in readings.arms else None
    compared = values if reference is None else readings.values[reference]
    gap = readings.gap(number)
    done = [member.trial for member in members if member.status == "done"]
    diverged, pruned = (
        tuple(member.seed for member in members if member.status == status)
        for status in ("diverged", "pruned")
    )
    unjudged: Reason = "refused" if arm.role == "refused" else "pruned" if pruned else "baseline"
    lost = bool(diverged) and gap is not None
    return ArmSummary(
        name=arm.name,
        baseline=None if reference is None else readings.arms[reference].name,
        knobs=json.loads(arm.knobs),
        values=values,
        given=tuple(member.seed for member in members),
        gap=gap,
        margin=readings.metric.margin(mean_of(list(compared.values()))),
        interval=readings.interval,
        verdict=Verdict(
            "unjudged",
            unjudged,
            diverged=len(diverged) if lost else 0,
            seeds=len(members) if lost else 0,
        ),
        role=arm.role,
        sqnr_db=mean_of([v for trial in done for k, v in lasts[trial].items() if parse(k).metric == _SQNR]),
        tokens_per_s=_rate([readings.speeds.get(trial, math.nan) for trial in done]),
        memory=mean_of([readings.peaks.get(trial, math.nan) for trial in done]),
        nans=sum(FIRST_NONFINITE in lasts[member.trial] for member in members),
        diverged=diverged,
        missing=tuple(
            member.seed for member in members if member.status not in ("done", "diverged", "pruned")
        ),
        pruned=pruned,
        early={m.seed: readings.ends.early[m.trial] for m in members if m.trial in readings.ends.early},
        uneven=_uneven(members, readings.metric, readings.ends),
        copies=tuple(each for each in readings.ends.copies if each.members[0].arm == number),
        censored=_censored(members, lasts, readings.metric.name),
        reason=arm.reason or "",
        readings=readings_of(
            ((member.seed, lasts[member.trial]) for member in members if member.status == "done"),
            reading(readings.metric.name),
        ),
        loss=mean_of([loss for trial in done if math.isfinite(loss := lasts[trial].get(LOSS, math.nan))]),
    )


def _rate(rates: list[float]) -> float:
    """Return the joint rate of trials that do equal work: all their work over all their time, NaN left
    out."""
    measured = [rate for rate in rates if rate > 0]
    return len(measured) / math.fsum(1 / rate for rate in measured) if measured else math.nan


def mean_of(values: list[float]) -> float:
    """Return the mean of some values, NaN for none."""
    return math.fsum(values) / len(values) if values else math.nan
