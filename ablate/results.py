"""An experiment back from its ledger: one tidy frame of everything, and one summary an arm. Reads only."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ablate.arms import label
from ablate.ledger import Ledger
from ablate.stats import Difference, paired_difference, verdict
from ablate.surface import Metric, Published


@dataclass(frozen=True)
class ArmSummary:
    """One line of the table: an arm over its seeds."""

    name: str
    baseline: str | None
    knobs: dict[str, Any]
    values: dict[int, float]
    """The metric by seed, finished and finite seeds only."""
    gap: Difference | None
    verdict: str
    sqnr_db: float
    tokens_per_s: float
    nans: int
    diverged: int
    missing: int

    @property
    def mean(self) -> float:
        """Mean of the metric over the seeds that have it."""
        return math.fsum(self.values.values()) / len(self.values) if self.values else math.nan


@dataclass(frozen=True)
class Replication:
    """A published figure beside the measured one."""

    figure: Published
    measured: Difference
    """The mean over seeds with its interval (a difference from nothing)."""
    verdict: str


@dataclass(frozen=True)
class Contrast:
    """Two arms that differ in one knob: the effect of turning it, everything else held."""

    knob: str
    change: str
    held: str
    effect: Difference
    verdict: str


def open_ledger(state: Path, sweep: str) -> Ledger:
    """The ledger of a sweep that has been run; FileNotFoundError where there is none."""
    path = state / "sweeps" / sweep / "ledger.db"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such sweep has been run")
    return Ledger(path, readonly=True)


def frame(ledger: Ledger) -> pd.DataFrame:
    """Every record as one row: arm, baseline, seed, trial, status, step, metric, value, and a column for each knob."""
    names = {arm["arm"]: arm["name"] for arm in ledger.arms()}
    rows = []
    for member in ledger.members():
        facts = {
            "arm": member["name"],
            "baseline": names.get(member["baseline"]),
            "seed": member["seed"],
            "trial": member["id"],
            "status": member["status"],
            **json.loads(member["knobs"]),
        }
        rows += [facts | {"step": step, "metric": name, "value": value} for step, name, value, _ in ledger.records(member["trial"])]
    return pd.DataFrame(rows)


def metric_of(ledger: Ledger) -> Metric:
    """What the sweep compares arms by."""
    return Metric.model_validate_json(ledger.fact("metric") or "{}")


def summaries(ledger: Ledger, metric: Metric | None = None) -> list[ArmSummary]:
    """One summary an arm by a metric (the sweep's main one, where none is given), in the ledger's order."""
    metric, arms = metric or metric_of(ledger), {arm["arm"]: arm for arm in ledger.arms()}
    members: dict[int, list[Any]] = {}
    finals: dict[int, dict[int, dict[str, float]]] = {}
    for member in ledger.members():
        members.setdefault(member["arm"], []).append(member)
        if member["status"] == "done":
            finals.setdefault(member["arm"], {})[member["seed"]] = ledger.last_values(member["trial"])
    values = {arm: _values(finals.get(arm, {}), metric.name) for arm in arms}
    return [_summary(arms, number, members.get(number, []), finals.get(number, {}), values, metric, ledger) for number in arms]


def _values(finals: dict[int, dict[str, float]], name: str) -> dict[int, float]:
    found = {seed: last.get(name, math.nan) for seed, last in finals.items()}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}


def _summary(arms, number, members, finals, values, metric: Metric, ledger: Ledger) -> ArmSummary:
    arm = arms[number]
    baseline = arm["baseline"]
    gap = None if baseline is None else paired_difference(values[number], values[baseline])
    lasts = [ledger.last_values(member["trial"]) for member in members]
    return ArmSummary(
        name=arm["name"],
        baseline=None if baseline is None else arms[baseline]["name"],
        knobs=json.loads(arm["knobs"]),
        values=values[number],
        gap=gap,
        verdict="baseline" if gap is None else verdict(gap, metric.direction == "minimize", metric.min_effect),
        sqnr_db=_mean([v for last in finals.values() for k, v in last.items() if k.endswith("/sqnr_db")]),
        tokens_per_s=_mean([ledger.average(member["trial"], "throughput/tokens_per_s") for member in members if member["seed"] in finals]),
        nans=sum("nan/first_step" in last for last in lasts),
        diverged=sum(member["status"] == "diverged" for member in members),
        missing=sum(member["status"] not in ("done", "diverged") for member in members),
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def contrasts(arms: list[ArmSummary], metric: Metric) -> list[Contrast]:
    """For every two arms that differ in exactly one knob, what turning it did: first value minus second, seeds paired.

    Left out are presets, what an arm's gap to its baseline says already, and, where a recipe's knobs are turned, the workload's:
    those are what they are tried on.
    """
    about = {knob for arm in arms for knob in arm.knobs if not knob.startswith("workload.") and knob != "recipe"}
    result = []
    for i, first in enumerate(arms):
        for second in arms[i + 1 :]:
            told = first.name == second.baseline or second.name == first.baseline
            if told or first.knobs.keys() != second.knobs.keys():
                continue
            differing = [knob for knob in first.knobs if first.knobs[knob] != second.knobs[knob]]
            if len(differing) == 1 and (differing[0] in about or not about):
                result.append(_contrast(first, second, differing[0], metric))
    return sorted(result, key=lambda contrast: contrast.knob)


def _contrast(first: ArmSummary, second: ArmSummary, knob: str, metric: Metric) -> Contrast:
    effect = paired_difference(first.values, second.values)
    held = label({k: v for k, v in first.knobs.items() if k != knob})
    change = f"{json.dumps(first.knobs[knob])} instead of {json.dumps(second.knobs[knob])}"
    return Contrast(knob, change, held, effect, verdict(effect, metric.direction == "minimize", metric.min_effect))


def replications(ledger: Ledger, published: Iterable[Published]) -> list[Replication]:
    """Every published figure beside what this sweep measured of it."""
    return [_replication(figure, _measured(ledger, figure)) for figure in published]


def _measured(ledger: Ledger, figure: Published) -> dict[int, float]:
    """The figure's metric by seed, at its step."""
    found = {}
    for member in ledger.members():
        if member["name"] == figure.arm and member["status"] == "done":
            records = ledger.records(member["trial"])
            values = [value for step, name, value, _ in records if name == figure.metric and figure.step in (None, step)]
            found |= {member["seed"]: values[-1]} if values else {}
    return found


def _replication(figure: Published, values: dict[int, float]) -> Replication:
    measured = paired_difference(values, dict.fromkeys(values, 0.0))
    if not measured.pairs:
        return Replication(figure, measured, "not measured")
    apart = measured.mean - figure.value
    if abs(apart) <= figure.tolerance * abs(figure.value):
        return Replication(figure, measured, f"agrees within {figure.tolerance:.0%}" if figure.value else "agrees")
    return Replication(figure, measured, f"differs by {apart / abs(figure.value):+.1%}" if figure.value else "differs")


def number(value: float) -> str:
    """Four decimals of a number like a loss, four digits of a small one."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.1 else f"{value:.4g}"


def interval(difference: Difference) -> str:
    """`+0.0123 ±0.0023`, the t interval being symmetric; without ± where there is none. More decimals where they mean something."""
    if not difference.pairs:
        return "-"
    half = difference.high - difference.mean if difference.has_interval else 0.0
    smallest = half or abs(difference.mean)
    decimals = max(4, 1 - math.floor(math.log10(smallest))) if smallest else 4
    return f"{difference.mean:+.{decimals}f}" + (f" ±{half:.{decimals}f}" if difference.has_interval else "")


def summary_markdown(ledger: Ledger) -> str:
    """The question and the table as Markdown: the description of the sweep's run in MLflow."""
    metric = metric_of(ledger)
    lines = [
        f"**{ledger.fact('question')}**",
        "",
        f"| arm | {metric.name} | gap to baseline, 95 % interval | verdict |",
        "|---|---|---|---|",
    ]
    for arm in summaries(ledger):
        gap = "baseline" if arm.gap is None else interval(arm.gap)
        lines.append(f"| {arm.name} | {number(arm.mean)} | {gap} | {arm.verdict} |")
    return "\n".join(lines)
