"""An experiment back from its ledger: one summary an arm, what turning each knob did, what is to be run next. Reads only."""

import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ablate.arms import CONFIRM, label
from ablate.ledger import OVER, Ledger
from ablate.stats import Difference, Interval, decided, paired_difference, verdict
from ablate.surface import Metric, Published

_MOST_LINES = 40
"""Of the description in MLflow, which holds 8,000 characters."""


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
    verdict: str
    role: Literal["listed", "searched", "confirmed"]
    """Named by the file, proposed by a sampler, or its winner run again."""
    sqnr_db: float
    tokens_per_s: float
    memory: float
    """Bytes at the most, mean over seeds: allocated on the GPU, or resident in the process where there is none."""
    nans: int
    diverged: tuple[int, ...]
    """Seeds on which the loss ceased to be finite."""
    missing: tuple[int, ...]
    """Seeds that were not run to their end, or failed."""

    @property
    def seeds(self) -> int:
        """How many seeds it was given."""
        return len(self.given)

    @property
    def mean(self) -> float:
        """Mean of the metric over the seeds that have it."""
        return math.fsum(self.values.values()) / len(self.values) if self.values else math.nan


@dataclass(frozen=True)
class Replication:
    """A published figure beside the measured one."""

    figure: Published
    measured: Difference
    """The mean over seeds with its interval: of the arm alone, of the arm minus the other, or of that as a share of the other."""
    verdict: str

    @property
    def subject(self) -> str:
        """The arm, or `arm minus other`."""
        return self.figure.arm if self.figure.against is None else f"{self.figure.arm} minus {self.figure.against}"

    @property
    def metric(self) -> str:
        """What is compared, and at which step."""
        return self.figure.metric + ("" if self.figure.step is None else f" at {self.figure.step}")

    @property
    def published(self) -> str:
        """What the paper says: a number with its unit, or an ordering."""
        if self.figure.amount is None:
            return self.figure.value
        return f"{self.figure.amount:.4g}" if self.figure.against is None else _signed(self.figure, self.figure.amount)

    @property
    def found(self) -> str:
        """What was measured, with its interval; `-` where nothing was."""
        if not self.measured.pairs:
            return "-"
        half = self.measured.high - self.measured.mean
        if self.figure.against is None:
            return f"{self.measured.mean:.4g}" + (f" ±{half:.2g}" if self.measured.has_interval else "")
        return percents(self.measured) if self.figure.relative else interval(self.measured)


@dataclass(frozen=True)
class Contrast:
    """Two arms that differ in one knob: the effect of turning it, everything else held."""

    knob: str
    change: str
    held: str
    effect: Difference
    verdict: str
    margin: float | None = None
    """The smallest effect that matters, in the metric's unit."""


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
    """One summary an arm by a metric (the sweep's main one, where none is given), in the ledger's order."""
    metric, arms = metric or metric_of(ledger), {arm["arm"]: arm for arm in ledger.arms()}
    lasts, speeds = ledger.finals(metric.name, "nan/first_step", "*/sqnr_db"), ledger.averages("throughput/tokens_per_s")
    peaks = ledger.largest("memory/rss") | ledger.largest("memory/peak_allocated")
    members: dict[int, list[Any]] = {number: [] for number in arms}
    for member in ledger.members():
        members[member["arm"]].append(member)
    values = {number: _values(group, lasts, metric.name) for number, group in members.items()}
    how = metric, interval_of(ledger), bool(ledger.fact("search"))
    return [_summary(arms, number, members[number], lasts, speeds, peaks, values, *how) for number in arms]


def gap(ledger: Ledger, arm: int) -> tuple[Difference, str] | None:
    """What `summaries` says of one arm's gap by the main metric, and its verdict, where its baseline is over too; None otherwise, and
    for a baseline. It reads two arms, not all."""
    members = ledger.members(arm)
    baseline = members[0]["baseline"] if members else None
    others = [] if baseline is None else ledger.members(baseline)
    if not others or any(member["status"] not in OVER for member in others):
        return None
    metric = metric_of(ledger)
    lasts = {member["trial"]: {metric.name: ledger.last_value(member["trial"], metric.name)} for member in (*members, *others)}
    values, reference = (_values(group, lasts, metric.name) for group in (members, others))
    found = paired_difference(values, reference, interval_of(ledger))
    said = _verdict(found, metric, metric.margin(_mean(list(reference.values()))), _role(members[0], bool(ledger.fact("search"))))
    return found, _with_losses(said, tuple(member["seed"] for member in members if member["status"] == "diverged"), len(members))


def _values(members: list[Any], lasts: dict[int, dict[str, float]], name: str) -> dict[int, float]:
    found = {member["seed"]: lasts[member["trial"]].get(name, math.nan) for member in members if member["status"] == "done"}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _summary(arms, number, members, lasts, speeds, peaks, values, metric: Metric, interval: Interval, searches: bool) -> ArmSummary:
    arm = arms[number]
    baseline = arm["baseline"]
    gap = None if baseline is None else paired_difference(values[number], values[baseline], interval)
    done = [member["trial"] for member in members if member["status"] == "done"]
    diverged = tuple(member["seed"] for member in members if member["status"] == "diverged")
    role = _role(arm, searches)
    margin = metric.margin(_mean(list(values[number if baseline is None else baseline].values())))
    return ArmSummary(
        name=arm["name"],
        baseline=None if baseline is None else arms[baseline]["name"],
        knobs=json.loads(arm["knobs"]),
        values=values[number],
        given=tuple(member["seed"] for member in members),
        gap=gap,
        margin=margin,
        interval=interval,
        verdict="baseline" if gap is None else _with_losses(_verdict(gap, metric, margin, role), diverged, len(members)),
        role=role,
        sqnr_db=_mean([v for trial in done for k, v in lasts[trial].items() if k.endswith("/sqnr_db")]),
        tokens_per_s=_mean([speeds.get(trial, math.nan) for trial in done]),
        memory=_mean([peaks.get(trial, math.nan) for trial in done]),
        nans=sum("nan/first_step" in lasts[member["trial"]] for member in members),
        diverged=diverged,
        missing=tuple(member["seed"] for member in members if member["status"] not in ("done", "diverged")),
    )


def _role(arm, searches: bool) -> Literal["listed", "searched", "confirmed"]:
    if not searches:
        return "listed"
    if arm["optuna"] is not None:
        return "searched"
    return "confirmed" if arm["name"].startswith(CONFIRM) else "listed"


def _verdict(gap: Difference, metric: Metric, margin: float | None, role: str) -> str:
    """In a search, what was seen in arms chosen by the same numbers is no result, and what was seen on fresh seeds says so."""
    said = verdict(gap, metric.direction == "minimize", margin)
    if role == "searched" and decided(gap, margin):
        return f"{said} (exploratory)"
    return f"{said} (on {gap.pairs} fresh seeds)" if role == "confirmed" and gap.pairs > 1 else said


def _with_losses(said: str, diverged: Collection[int], given: int) -> str:
    """A verdict on the seeds that are left speaks for them alone: that an arm diverged on others is the first thing to be said of it."""
    if not diverged:
        return said
    lost = f"diverged on {len(diverged)} of {given} seeds"
    return lost if len(diverged) == given else f"{lost}; on the others: {said}"


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


# What is to be run next


def undecided(ledger: Ledger, metric: Metric | None = None) -> list[tuple[str, str]]:
    """Arms that more seeds may decide, each with its baseline's name: of every seed there is a pair, and the interval is too wide.

    An arm with a seed that is not over has to wait; one that failed or diverged on a seed, or whose baseline did, is not grown:
    that seed is no chance draw, and the mean over the others is not the arm's. Numbers that are the same need no more.
    """
    metric = metric or metric_of(ledger)
    grown = [arm for arm in summaries(ledger, metric) if arm.gap and 0 < arm.gap.pairs == arm.seeds]
    return [(arm.name, arm.baseline) for arm in grown if not decided(arm.gap, arm.margin)]


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
    """For every two arms that differ in exactly one knob, what turning it did: first value minus second, seeds paired; none where
    there are more than `most`.

    Left out are presets, what an arm's gap to its baseline says already, and, where a recipe's knobs are turned, the workload's:
    those are what they are tried on. So are a search's arms, which were chosen by these numbers, and its winner run again.
    """
    arms = [arm for arm in arms if arm.role == "listed"]
    pairs = list(itertools.islice(_pairs(arms), None if most is None else most + 1))
    if most is not None and len(pairs) > most:
        return []
    return [_contrast(arms[first], arms[second], knob, metric) for knob, first, second in sorted(pairs)]


def _pairs(arms: list[ArmSummary]) -> Iterator[tuple[str, int, int]]:
    """(knob, arm, arm) by the arms' places, of all that agree in every other knob: as many looks as arms, not as pairs of arms."""
    turned = {knob for arm in arms for knob in arm.knobs}
    about = {knob for knob in turned if not knob.startswith("workload.") and knob != "recipe"}
    for knob in sorted(about or turned):
        alike: dict[str, list[int]] = {}
        for place, arm in enumerate(arms):
            if knob in arm.knobs:
                alike.setdefault(json.dumps(arm.knobs | {knob: None}, sort_keys=True), []).append(place)
        for first, second in itertools.chain.from_iterable(itertools.combinations(places, 2) for places in alike.values()):
            one, other = arms[first], arms[second]
            if one.knobs[knob] != other.knobs[knob] and other.baseline != one.name != other.name != one.baseline:
                yield knob, first, second


def _contrast(first: ArmSummary, second: ArmSummary, knob: str, metric: Metric) -> Contrast:
    effect = paired_difference(first.values, second.values, first.interval)
    held = label({k: v for k, v in first.knobs.items() if k != knob})
    change = f"{json.dumps(first.knobs[knob])} instead of {json.dumps(second.knobs[knob])}"
    return Contrast(knob, change, held, effect, verdict(effect, metric.direction == "minimize", first.margin), first.margin)


def replications(ledger: Ledger, published: Iterable[Published]) -> list[Replication]:
    """Every published figure beside what this sweep measured of it."""
    metrics = {metric.name: metric for metric in metrics_of(ledger)}
    return [_replication(ledger, figure, metrics.get(figure.metric, Metric(name=figure.metric))) for figure in published]


def _replication(ledger: Ledger, figure: Published, metric: Metric) -> Replication:
    values, how = _measured(ledger, figure, figure.arm), interval_of(ledger)
    if figure.against is None:
        measured = paired_difference(values, dict.fromkeys(values, 0.0), how)
        return Replication(figure, measured, _alike(figure, measured))
    other = _measured(ledger, figure, figure.against)
    level = _mean(list(other.values()))
    margin = metric.margin(level)
    if figure.relative:
        values = {seed: value / other[seed] - 1 for seed, value in values.items() if other.get(seed)}
        other, margin = dict.fromkeys(values, 0.0), margin and margin / abs(level)
    measured = paired_difference(values, other, how)
    members = [member for member in ledger.members() if member["name"] in (figure.arm, figure.against)]
    diverged = {member["seed"] for member in members if member["status"] == "diverged"}
    return Replication(figure, measured, _with_losses(_same_way(figure, measured, margin), diverged, len({m["seed"] for m in members})))


def _measured(ledger: Ledger, figure: Published, arm: str) -> dict[int, float]:
    """The figure's metric by seed in one arm, at its step."""
    found = {}
    for member in ledger.members():
        if member["name"] == arm and member["status"] == "done":
            series = ledger.series(member["trial"], figure.metric)
            step = max(series, default=0) if figure.step is None else figure.step
            if math.isfinite(series.get(step, math.nan)):
                found[member["seed"]] = series[step]
    return found


def _alike(figure: Published, measured: Difference) -> str:
    """Whether a figure of one arm is what was measured, within its tolerance."""
    if not measured.pairs:
        return "not measured"
    tolerance = 0.02 if figure.tolerance is None else figure.tolerance
    apart = measured.mean - figure.amount
    if abs(apart) <= tolerance * abs(figure.amount):
        return f"agrees within {tolerance:.0%}" if figure.amount else "agrees"
    return f"differs by {apart / abs(figure.amount):+.1%}" if figure.amount else "differs"


def _same_way(figure: Published, measured: Difference, margin: float | None) -> str:
    """Whether two arms differ as published: the direction decides, by the interval; the size is said beside it.

    A published difference is contradicted by one the other way, and by one too small to matter; a published equality only by an
    interval that excludes zero. Models of other sizes need not share the size of an effect, so that alone is no disagreement.
    """
    if measured.pairs < 2:
        return "one seed: no interval" if measured.pairs else "not measured"
    found = (measured.low > 0) - (measured.high < 0)
    none = measured.mean == measured.deviation == 0 or (margin is not None and -margin < measured.low and measured.high < margin)
    if figure.sign == 0:
        return "agrees" if none else "disagrees" if found else "not resolved"
    if found == figure.sign:
        return "agrees (too small to matter here)" if none else f"agrees{_size(figure, measured)}"
    if found:
        return "disagrees"
    return "disagrees: no difference that matters here" if none else f"not resolved{_size(figure, measured)}"


def _size(figure: Published, measured: Difference) -> str:
    """What the interval says of the published size, in brackets behind a verdict on the direction; nothing of an ordering."""
    if figure.amount is None:
        return ""
    if measured.low <= figure.amount <= measured.high:
        return " (the published size lies within the interval)"
    return f" ({'smaller' if abs(measured.mean) < abs(figure.amount) else 'larger'} here than published)"


def _signed(figure: Published, value: float) -> str:
    return f"{100 * value:+.3g} %" if figure.relative else f"{value:+.4g}"


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
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def interval(difference: Difference) -> str:
    """`+0.0123 ±0.0023`; without ± where there is one pair, `±∞` where the pairs bound nothing. More decimals where they mean something."""
    if not difference.pairs:
        return "-"
    half = difference.high - difference.mean if difference.has_interval else 0.0
    smallest = half or abs(difference.mean)
    decimals = max(4, 1 - math.floor(math.log10(smallest))) if smallest else 4
    bound = f" ±{half:.{decimals}f}" if difference.has_interval else " ±∞" if difference.pairs > 1 else ""
    return f"{difference.mean:+.{decimals}f}{bound}"


def percents(difference: Difference) -> str:
    """A difference of fractions in percent: `+1.23 ±0.45 %`."""
    half = f" ±{100 * (difference.high - difference.mean):.2g}" if difference.has_interval else ""
    return f"{100 * difference.mean:+.2f}{half} %"


def emulated(ledger: Ledger) -> str:
    """What speed and memory in the tables are not, where the four-bit formats were emulated; nothing where they were not."""
    engines = {json.loads(member["spec"]).get("engine") for member in ledger.members()}
    said = "tokens/s and memory are those of the emulation here, not of hardware that has these formats."
    return said if "emulated" in engines and ledger.averages("throughput/tokens_per_s") else ""


def reading(arms: list[ArmSummary]) -> str:
    """How to read a table of these arms: how they are paired, what ± is, and what a search's gaps are worth."""
    counts = {arm.gap.pairs for arm in arms if arm.gap and arm.gap.pairs}
    over = f"over {counts.pop()} seeds" if len(counts) == 1 else "by seed, each arm over its own, so compare gaps and not means"
    how = arms[0].interval if arms else Interval()
    said = [f"Gaps and effects are paired {over}; ± is a {how}, each on its own."]
    if how.kind == "sequence":
        said.append("It holds at every look, however often seeds are added.")
    roles = {arm.role for arm in arms}
    if "confirmed" in roles:
        said.append(f"`{CONFIRM}` is the search's best arm on seeds that took no part in choosing it; the other gaps are exploratory.")
    elif "searched" in roles:
        said.append("The arm that won a search was chosen by these numbers: run it again on new seeds before believing its gap.")
    return " ".join(said)


def summary_markdown(ledger: Ledger) -> str:
    """The question and the table as Markdown: the description of the sweep's run in MLflow."""
    metric = metric_of(ledger)
    lines = [
        f"**{ledger.fact('question')}**",
        "",
        f"| arm | {metric.name} | gap to baseline, {interval_of(ledger)} | seeds | verdict |",
        "|---|---|---|---|---|",
    ]
    arms = summaries(ledger)
    shown = foremost(arms, metric, _MOST_LINES)
    for arm in shown:
        gap = "baseline" if arm.gap is None else interval(arm.gap)
        lines.append(f"| {arm.name} | {number(arm.mean)} | {gap} | {len(arm.values)} | {arm.verdict} |")
    if shown != arms:
        lines += ["", f"and {len(arms) - len(shown):,} more arms, none of them better"]
    return "\n".join(lines)
