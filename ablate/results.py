"""An experiment back from its ledger: one tidy frame of everything, and one summary an arm. Reads only."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ablate.ledger import Ledger
from ablate.stats import Difference, paired_difference, verdict
from ablate.surface import Metric


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


def summaries(ledger: Ledger) -> list[ArmSummary]:
    """One summary an arm, in the ledger's order."""
    metric, arms = metric_of(ledger), {arm["arm"]: arm for arm in ledger.arms()}
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
    """For every two arms that differ in exactly one knob, what turning it did: first value minus second, seeds paired."""
    result = []
    for i, first in enumerate(arms):
        for second in arms[i + 1 :]:
            if first.knobs.keys() != second.knobs.keys() or not first.knobs:
                continue
            differing = [knob for knob in first.knobs if first.knobs[knob] != second.knobs[knob]]
            if len(differing) == 1:
                result.append(_contrast(first, second, differing[0], metric))
    return sorted(result, key=lambda contrast: contrast.knob)


def _contrast(first: ArmSummary, second: ArmSummary, knob: str, metric: Metric) -> Contrast:
    effect = paired_difference(first.values, second.values)
    held = " ".join(f"{k}={json.dumps(v)}" for k, v in first.knobs.items() if k != knob)
    change = f"{json.dumps(first.knobs[knob])} instead of {json.dumps(second.knobs[knob])}"
    return Contrast(knob, change, held, effect, verdict(effect, metric.direction == "minimize", metric.min_effect))


def interval(difference: Difference) -> str:
    """`+0.0123 ±0.0023`, the t interval being symmetric; without ± where there is no interval."""
    if not difference.pairs:
        return "-"
    half = f" ±{difference.high - difference.mean:.4f}" if difference.has_interval else ""
    return f"{difference.mean:+.4f}{half}"


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
        lines.append(f"| {arm.name} | {arm.mean:.4f} | {gap} | {arm.verdict} |")
    return "\n".join(lines)
