"""An experiment back from its ledger: one summary an arm, what turning each knob did, what is to be run next. Reads only."""

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ablate.experiment.arms import label
from ablate.experiment.roles import CONFIRM, Role, role_of
from ablate.experiment.schema import Metric, Published
from ablate.files import Damaged
from ablate.results.ledger import Ledger
from ablate.results.ledger_rows import OVER
from ablate.results.paired_stats import Difference, Interval, Verdict, judge, paired_difference
from ablate.results.trial_store import Store
from ablate.training.metric_names import FIRST_NONFINITE, parse
from ablate.training.workloads import context_free

LOSS = "val/loss"
_SQNR = "sqnr_db"
UNLEARNED = Verdict("unjudged", "nothing_learned")
"""Verdict on a comparison in which no arm learned anything."""
_MOST_NAMED = 8
"""Arms that a sentence names."""


@dataclass(frozen=True)
class ArmSummary:
    """One line of the table: an arm over its seeds."""

    name: str
    baseline: str | None
    knobs: dict[str, Any]
    values: dict[int, float]
    """The metric by seed, finished and finite seeds only."""
    given: tuple[int, ...]
    """The seeds it was given."""
    gap: Difference | None
    margin: float | None
    """The smallest gap that matters, in the metric's unit."""
    interval: Interval
    """How its comparisons are made."""
    verdict: Verdict
    """Corrected for all arms that are judged beside it, with everything about the arm that qualifies it."""
    role: Role
    sqnr_db: float
    tokens_per_s: float
    memory: float
    """Bytes at the most, mean over seeds: allocated on the GPU, or resident in the process where there is none."""
    nans: int
    diverged: tuple[int, ...]
    """Seeds on which the loss ceased to be finite."""
    missing: tuple[int, ...]
    """Seeds that were not run to their end, or failed."""
    pruned: tuple[int, ...] = ()
    """Seeds that were given up by the pruner: they are not run again."""
    reason: str = ""
    """Why a refused arm cannot be run; empty where its ledger does not say."""
    context_free: float | None = None
    """The loss of a model that ignores its input, where the workload knows one and the metric is of validation or training."""
    loss: float = math.nan
    """Mean val/loss over the seeds that have it."""

    @property
    def learned(self) -> bool:
        """False where its mean loss is no better than that of a model that ignores its input; True where no such loss is known."""
        return self.context_free is None or not self.loss >= self.context_free

    @property
    def colour(self) -> str:
        """Word that selects the colour of its line; empty for what a search saw decided, which is no result."""
        if self.gap is None:
            return "baseline" if self.is_baseline and not self.pruned else ""
        if self.diverged:
            return "diverged"
        return "" if self.verdict.kind == "unjudged" or self.verdict.exploratory else self.verdict.kind

    @property
    def seeds(self) -> int:
        """How many seeds it was given."""
        return len(self.given)

    @property
    def unmeasured(self) -> int:
        """Number of seeds that are done without a finite value of the metric."""
        return self.seeds - len(self.values) - len(self.diverged) - len(self.missing) - len(self.pruned)

    @property
    def is_baseline(self) -> bool:
        """True of an arm that is compared with no other though it can be run."""
        return self.baseline is None and self.role != "refused"

    @property
    def mean(self) -> float:
        """Mean of the metric over the seeds that have it."""
        return math.fsum(self.values.values()) / len(self.values) if self.values else math.nan


@dataclass(frozen=True)
class Contrast:
    """Two arms that differ in one knob: the effect of turning it, everything else held."""

    knob: str
    change: str
    held: str
    effect: Difference
    margin: float | None
    """The smallest effect that matters, in the metric's unit."""
    verdict: Verdict
    """Corrected for all contrasts of its table."""


def open_ledger(state: Path, sweep: str) -> Ledger:
    """The ledger of a sweep that has been run; FileNotFoundError where there is none."""
    path = state / "sweeps" / sweep / "ledger.db"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such sweep has been run")
    return Ledger(path, readonly=True)


def metric_of(ledger: Ledger) -> Metric:
    """What the sweep compares arms by."""
    return Metric.model_validate_json(ledger.fact("metric") or "{}")


def metrics_of(ledger: Ledger) -> list[Metric]:
    """All that the sweep compares arms by, the main one first."""
    compared = json.loads(ledger.fact("compared") or "[]")
    return [Metric.model_validate(metric) for metric in compared] or [metric_of(ledger)]


def published_of(ledger: Ledger) -> list[Published]:
    """What the sweep's file quotes from papers."""
    return [Published.model_validate(figure) for figure in json.loads(ledger.fact("published") or "[]")]


def interval_of(ledger: Ledger) -> Interval:
    """How the sweep's intervals are made: plain t, where nothing was said when it ran."""
    return Interval.parse(ledger.fact("interval") or "t")


def summaries(ledger: Ledger, metric: Metric | None = None) -> list[ArmSummary]:
    """One summary an arm by a metric (the sweep's main one, where none is given), in the ledger's order.

    Verdicts are corrected by Holm over the arms that are compared; a search's proposals are corrected apart from the others. An arm has no
    verdict if neither it nor its baseline learned anything.
    """
    metric = metric or metric_of(ledger)
    found = _summaries(ledger, metric)
    searched, others = (
        [arm for arm in found if (arm.role == "searched") == of_search] for of_search in (True, False)
    )
    judged = _judged(searched, found, metric) | _judged(others, found, metric)
    return [
        replace(arm, verdict=_qualified(arm, its)) if (its := judged.get(arm.name)) else arm for arm in found
    ]


def _summaries(ledger: Ledger, metric: Metric) -> list[ArmSummary]:
    """One summary an arm, without the verdicts on gaps."""
    arms = {arm["arm"]: arm for arm in ledger.arms()}
    always = {metric.name, LOSS, FIRST_NONFINITE}
    lasts = ledger.finals(lambda name: name.metric == _SQNR or str(name) in always)
    speeds = ledger.rates("throughput/tokens_per_s")
    peaks = ledger.largest("memory/rss") | ledger.largest("memory/peak_allocated")
    members: dict[int, list[Any]] = {number: [] for number in arms}
    for member in ledger.members():
        members[member["arm"]].append(member)
    values = {number: _values(group, lasts, metric.name) for number, group in members.items()}
    how = metric, interval_of(ledger), bool(ledger.fact("search"))
    found = [_summary(arms, number, members[number], lasts, speeds, peaks, values, *how) for number in arms]
    return _with_references(found, ledger, members, metric)


def nothing_learned(arms: Collection[ArmSummary]) -> bool:
    """True where every arm's loss is no better than that of a model that ignores its input: such arms have nothing to compare."""
    measured = [arm for arm in arms if not math.isnan(arm.loss)]
    return bool(measured) and not any(arm.learned for arm in measured)


def judge_learned(
    compared: Sequence[tuple[Difference, float | None, Collection[ArmSummary]]],
    metric: Metric,
    plan: bool = True,
    unseen: int = 0,
) -> list[Verdict]:
    """Return the verdicts on comparisons, each with its margin and the arms in it, corrected over those in which an arm learned.

    All tables and notes judge by this rule: a comparison in which no arm learned anything is `UNLEARNED`, and is no member of the family.
    `unseen` is the number of comparisons of the family that have no result yet; they count in the correction.
    """
    learned = [(difference, margin) for difference, margin, arms in compared if not nothing_learned(arms)]
    verdicts = iter(judge(learned, metric.direction == "minimize", plan, len(learned) + unseen))
    return [UNLEARNED if nothing_learned(arms) else next(verdicts) for _, _, arms in compared]


def _context_free(store: Store, members: Iterable[Any], noted: Mapping[str, float]) -> float | None:
    """The loss that a model reaches which ignores its input, as the first finished run of an arm recorded it, or as MLflow has it."""
    first = next((member for member in members if member["status"] == "done"), None)
    if first is None:
        return None
    found = None
    with suppress(Damaged):  # `status --verify` says so
        found = context_free(store.result(first["id"]))
    return noted.get(first["name"]) if found is None else found


def _judged(
    arms: Collection[ArmSummary], everything: Iterable[ArmSummary], metric: Metric, unseen: int = 0
) -> dict[str, Verdict]:
    """Return the verdicts on these arms by name, `everything` being the arms among which their baselines are."""
    by_name = {arm.name: arm for arm in everything}
    compared = [arm for arm in arms if arm.gap is not None and not arm.pruned]
    plan = any(arm.role != "searched" for arm in arms)
    pairs = [(arm.gap, arm.margin, [arm, by_name[arm.baseline]]) for arm in compared]
    return dict(zip([arm.name for arm in compared], judge_learned(pairs, metric, plan, unseen), strict=True))


def _qualified(arm: ArmSummary, verdict: Verdict) -> Verdict:
    """Return the verdict with everything about the arm that qualifies it.

    What was seen in arms that a search chose by the same numbers is no result, and a verdict on the seeds that did not diverge is on
    them alone.
    """
    return replace(
        verdict,
        exploratory=arm.role == "searched" and verdict.decided,
        fresh_seeds=arm.gap.pairs if arm.role == "confirmed" and arm.gap.pairs > 1 else 0,
        reference=None if arm.learned or verdict.reason == "nothing_learned" else arm.context_free,
        **_losses(arm.diverged, arm.seeds),
    )


def _losses(diverged: Collection[int], seeds: int) -> dict[str, int]:
    """Return the fields of a verdict on an arm that was given so many seeds and diverged on these."""
    return {"diverged": len(diverged), "seeds": seeds} if diverged else {}


def gap(ledger: Ledger, arm: int) -> tuple[Difference, Verdict] | None:
    """One arm's gap by the main metric, and its verdict, where its baseline is over too; None otherwise, and for a baseline.

    The verdict stands whatever the arms come to that are not over: they count as comparisons without a result. If all are over, it is that
    of `summaries`, with the same number of seeds. Of a search's proposal no seeds are planned, and there may be thousands: only the
    proposal and its baseline are read, and p is multiplied by the number of proposals.
    """
    members = ledger.members(arm)
    baseline = members[0]["baseline"] if members else None
    others = [] if baseline is None else ledger.members(baseline)
    if not others or any(member["status"] not in OVER for member in others):
        return None
    metric, rows, searches = (
        metric_of(ledger),
        {row["arm"]: row for row in ledger.arms()},
        bool(ledger.fact("search")),
    )
    roles = {number: role_of(row, searches, 1) for number, row in rows.items() if row["baseline"] is not None}
    family = [number for number, role in roles.items() if (role == "searched") == (roles[arm] == "searched")]
    if roles[arm] != "searched":
        arms = dict(zip(rows, _summaries(ledger, metric), strict=True))
        open_ = {member["arm"] for member in ledger.members() if member["status"] not in OVER} - {arm}
        compared = [
            number
            for number in family
            if number not in open_ and arms[number].gap is not None and not arms[number].pruned
        ]
        judged = _judged(
            [arms[number] for number in compared], arms.values(), metric, len(open_.intersection(family))
        )
        its = arms[arm]
    else:
        groups = {arm: members, baseline: others}
        lasts = {
            m["trial"]: {name: ledger.last_value(m["trial"], name) for name in (metric.name, LOSS)}
            for m in (*members, *others)
        }
        values = {number: _values(group, lasts, metric.name) for number, group in groups.items()}
        how = metric, interval_of(ledger), searches
        its, base = _with_references(
            [_summary(rows, number, group, lasts, {}, {}, values, *how) for number, group in groups.items()],
            ledger,
            groups,
            metric,
        )
        judged = _judged([its], [its, base], metric, len(family) - 1)
    return its.gap, _qualified(its, judged[its.name]) if its.name in judged else its.verdict


def _with_references(
    arms: list[ArmSummary], ledger: Ledger, members: Mapping[int, list[Any]], metric: Metric
) -> list[ArmSummary]:
    """The arms with the loss of a model that ignores its input, where the metric says nothing of such a model."""
    if not parse(metric.name).of_data:
        return arms
    store, noted = Store(ledger.path.absolute().parents[2]), json.loads(ledger.fact("context_free") or "{}")
    return [
        replace(arm, context_free=_context_free(store, group, noted))
        for arm, group in zip(arms, members.values(), strict=True)
    ]


def _values(members: list[Any], lasts: dict[int, dict[str, float]], name: str) -> dict[int, float]:
    found = {
        member["seed"]: lasts[member["trial"]].get(name, math.nan)
        for member in members
        if member["status"] == "done"
    }
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _summary(
    arms, number, members, lasts, speeds, peaks, values, metric: Metric, interval: Interval, searches: bool
) -> ArmSummary:
    arm = arms[number]
    baseline = arm["baseline"]
    gap = None if baseline is None else paired_difference(values[number], values[baseline], interval)
    done = [member["trial"] for member in members if member["status"] == "done"]
    diverged, pruned = _seeds(members, "diverged"), _seeds(members, "pruned")
    role = role_of(arm, searches, len(members))
    margin = metric.margin(mean_of(list(values[number if baseline is None else baseline].values())))
    unjudged = "refused" if role == "refused" else "pruned" if pruned else "baseline"
    return ArmSummary(
        name=arm["name"],
        baseline=None if baseline is None else arms[baseline]["name"],
        knobs=json.loads(arm["knobs"]),
        values=values[number],
        given=tuple(member["seed"] for member in members),
        gap=gap,
        margin=margin,
        interval=interval,
        verdict=Verdict("unjudged", unjudged, **_losses(diverged if gap is not None else (), len(members))),
        role=role,
        sqnr_db=mean_of([v for trial in done for k, v in lasts[trial].items() if parse(k).metric == _SQNR]),
        tokens_per_s=_rate([speeds.get(trial, math.nan) for trial in done]),
        memory=mean_of([peaks.get(trial, math.nan) for trial in done]),
        nans=sum(FIRST_NONFINITE in lasts[member["trial"]] for member in members),
        diverged=diverged,
        missing=tuple(
            member["seed"] for member in members if member["status"] not in ("done", "diverged", "pruned")
        ),
        pruned=pruned,
        reason=arm["reason"] or "",
        loss=mean_of([loss for trial in done if math.isfinite(loss := lasts[trial].get(LOSS, math.nan))]),
    )


def dropped(arms: Iterable[ArmSummary]) -> Iterator[str]:
    """Yield a sentence on pruned arms of a search, and one on refused arms, if there are any."""
    arms = list(arms)
    pruned = [arm.name for arm in arms if arm.pruned]
    refused = [
        f"{arm.name} ({arm.reason})" if arm.reason else arm.name for arm in arms if arm.role == "refused"
    ]
    for title, names in (
        ("Pruned, so not run to the end", pruned),
        ("Refused, since they cannot be run", refused),
    ):
        if names:
            yield f"**{title}:** {'; '.join(names[:_MOST_NAMED])}{' and others' if len(names) > _MOST_NAMED else ''}."


def _seeds(members: list[Any], status: str) -> tuple[int, ...]:
    return tuple(member["seed"] for member in members if member["status"] == status)


def _rate(rates: list[float]) -> float:
    """The rate of several trials that do equal work: all their work over all their time. NaN values are left out."""
    known = [rate for rate in rates if rate > 0]
    return len(known) / math.fsum(1 / rate for rate in known) if known else math.nan


def mean_of(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


# What is to be run next


def undecided(ledger: Ledger, metric: Metric | None = None) -> list[tuple[str, str]]:
    """Arms that more seeds may decide, each with its baseline's name: of every seed there is a pair, and there is no verdict.

    None if neither the arm nor its baseline learned. An arm with a seed that is not over has to wait; one that failed or diverged on
    a seed, or whose baseline did, is not grown: that seed is no chance draw, and the mean over the others is not the arm's. Numbers
    that are the same need no more.
    """
    metric = metric or metric_of(ledger)
    arms = summaries(ledger, metric)
    grown = [
        arm
        for arm in arms
        if arm.gap and 0 < arm.gap.pairs == arm.seeds and arm.verdict.reason != "nothing_learned"
    ]
    return [(arm.name, arm.baseline) for arm in grown if not arm.verdict.decided]


def winner(ledger: Ledger, metric: Metric | None = None, infeasible: Collection[str] = ()) -> str | None:
    """The name of the searched arm with the best mean, all its seeds done; None where there is none, or where it is its own baseline."""
    metric = metric or metric_of(ledger)
    arms = [arm for arm in summaries(ledger, metric) if arm.role == "searched" and arm.name not in infeasible]
    whole = [arm for arm in arms if 0 < len(arm.values) == arm.seeds]
    best = min(whole, key=lambda arm: arm.mean if metric.direction == "minimize" else -arm.mean, default=None)
    return best.name if best and best.baseline else None


def fresh_seeds(ledger: Ledger, count: int) -> tuple[int, ...]:
    """The first seeds that no arm of the study was ever run on. A winner run again on them owes nothing to having been chosen."""
    used = set(ledger.studied_seeds())
    return tuple(itertools.islice((seed for seed in itertools.count() if seed not in used), count))


# What turning a knob did


def contrasts(arms: list[ArmSummary], metric: Metric, most: int | None = None) -> list[Contrast]:
    """For every two arms that differ in exactly one knob, what turning it did, seeds paired; none where there are more than `most`.

    As in `attribution`, the value that the file lists first is the reference that is subtracted; of true and false alone, false is.
    Verdicts are corrected by Holm over all of them.

    Left out are presets, what an arm's gap to its baseline says already, and, where a recipe's knobs are turned, the workload's:
    those are what they are tried on. So are a search's arms, which were chosen by these numbers, its winner run
    again, and baselines that were added to compare others with.
    """
    arms = [arm for arm in arms if arm.role == "listed"]
    pairs = list(itertools.islice(_pairs(arms), None if most is None else most + 1))
    if most is not None and len(pairs) > most:
        return []
    pairs.sort()
    switches = {knob for knob in {knob for knob, _, _ in pairs} if is_switch(arms, knob)}
    found = [_contrast(arms[first], arms[second], knob, knob in switches) for knob, first, second in pairs]
    compared = [
        (contrast["effect"], contrast["margin"], (arms[first], arms[second]))
        for contrast, (_, first, second) in zip(found, pairs, strict=True)
    ]
    verdicts = judge_learned(compared, metric)
    return [Contrast(**contrast, verdict=verdict) for contrast, verdict in zip(found, verdicts, strict=True)]


def _pairs(arms: list[ArmSummary]) -> Iterator[tuple[str, int, int]]:
    """(knob, arm, arm) by the arms' places, of all that agree in every other knob: as many looks as arms, not as pairs of arms."""
    turned = {knob for arm in arms for knob in arm.knobs}
    about = {knob for knob in turned if not knob.startswith("workload.") and knob != "recipe"}
    for knob in sorted(about or turned):
        alike: dict[str, list[int]] = {}
        for place, arm in enumerate(arms):
            if knob in arm.knobs:
                alike.setdefault(json.dumps(arm.knobs | {knob: None}, sort_keys=True), []).append(place)
        for first, second in itertools.chain.from_iterable(
            itertools.combinations(places, 2) for places in alike.values()
        ):
            one, other = arms[first], arms[second]
            if (
                one.knobs[knob] != other.knobs[knob]
                and other.baseline != one.name != other.name != one.baseline
            ):
                yield knob, first, second


def is_switch(arms: Iterable[ArmSummary], knob: str) -> bool:
    """Return True if the arms that the file lists give a knob no other values than true and false: false is its reference then."""
    return all(type(arm.knobs[knob]) is bool for arm in arms if arm.role == "listed" and knob in arm.knobs)


def _contrast(first: ArmSummary, second: ArmSummary, knob: str, switch: bool) -> dict[str, Any]:
    """Return the fields of the contrast of two arms in the ledger's order, but for its verdict.

    `switch`: false is the reference, wherever it is listed.
    """
    arm, reference = (first, second) if switch and not second.knobs[knob] else (second, first)
    effect = paired_difference(arm.values, reference.values, arm.interval)
    held = label({k: v for k, v in arm.knobs.items() if k != knob})
    change = f"{json.dumps(arm.knobs[knob])} instead of {json.dumps(reference.knobs[knob])}"
    return {"knob": knob, "change": change, "held": held, "effect": effect, "margin": reference.margin}


def foremost(arms: list[ArmSummary], metric: Metric, most: int) -> list[ArmSummary]:
    """As many of the arms as a person reads, in their order: a winner run again, the best by the metric, and the baselines of those."""
    if len(arms) <= most:
        return arms
    sign = 1 if metric.direction == "minimize" else -1
    best = sorted(arms, key=lambda arm: (arm.role != "confirmed", not arm.values, sign * arm.mean))[:most]
    shown = {name for arm in best for name in (arm.name, arm.baseline)}
    return [arm for arm in arms if arm.name in shown]


def number(value: float) -> str:
    """Four decimals of a number like a loss, four digits of a small one."""
    return f"{value:z.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def counted(count: int, what: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def interval(difference: Difference) -> str:
    """`+0.0123 ±0.0023`; without ± where there is no interval, `±∞` where a sequence bounds nothing yet. More decimals where they mean
    something, and no sign on a zero that was rounded to one."""
    if not difference.pairs:
        return "-"
    half = difference.high - difference.mean if difference.has_interval else 0.0
    smallest = half or abs(difference.mean)
    decimals = max(4, 1 - math.floor(math.log10(smallest))) if smallest else 4
    bound = (
        f" ±{half:.{decimals}f}" if difference.has_interval else " ±∞" if math.isinf(difference.low) else ""
    )
    return f"{difference.mean:+z.{decimals}f}{bound}"


def percents(difference: Difference) -> str:
    """A difference of fractions in percent: `+1.23 ±0.45 %`."""
    half = f" ±{100 * (difference.high - difference.mean):.2g}" if difference.has_interval else ""
    return f"{100 * difference.mean:+z.2f}{half} %"


def emulated(ledger: Ledger) -> str:
    """What speed and memory in the tables are not, where the four-bit formats were emulated; nothing where they were not."""
    engines = {json.loads(member["spec"]).get("engine") for member in ledger.members()}
    said = "tokens/s and memory are those of the emulation here, not of hardware that has these formats."
    return said if "emulated" in engines and ledger.rates("throughput/tokens_per_s") else ""


def reading(arms: list[ArmSummary]) -> str:
    """How to read a table of these arms: how they are paired, what ± is, and what a search's gaps are worth."""
    counts = {arm.gap.pairs for arm in arms if arm.gap and arm.gap.pairs}
    over = (
        f"over {counted(counts.pop(), 'seed')}"
        if len(counts) == 1
        else "by seed, each arm over its own, so compare gaps and not means"
    )
    how = arms[0].interval if arms else Interval()
    said = [
        f"Gaps and effects are paired {over}; ± is a {how}, each on its own; verdicts are after Holm's correction over their table."
    ]
    if how.kind == "sequence":
        said.append("It holds at every look, however often seeds are added.")
    open_ = [arm for arm in arms if arm.verdict.kind == "undecided"]
    if any(arm.verdict.needed for arm in open_):
        said.append(
            "Seeds needed: in all, for an 80 % chance of a verdict; in brackets, if the deviation is at either end of its 80 % range."
        )
    elif open_ and any(arm.margin is None for arm in open_):
        said.append(
            "Without metric.min_effect no number of seeds is named: an effect may be as small as one likes."
        )
    roles = {arm.role for arm in arms}
    if "confirmed" in roles:
        said.append(
            f"`{CONFIRM}` is the search's best arm on seeds that took no part in choosing it; the other gaps are exploratory."
        )
    elif "searched" in roles:
        said.append(
            "The arm that won a search was chosen by these numbers: run it again on new seeds before believing its gap."
        )
    return " ".join(said)
