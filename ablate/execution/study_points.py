"""An arm as a point of a study: what the ledger says that it is worth, keeps to and was judged by. It knows no Optuna."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ablate.errors import InputError, nearest
from ablate.experiment.load import Experiment
from ablate.experiment.schema import Constraint, Metric
from ablate.experiment.search_space import Dimension
from ablate.results.ledger import Ledger
from ablate.results.ledger_rows import OVER


@dataclass(frozen=True)
class Point:
    """What the ledger knows of one arm of the study, in the study's order."""

    name: str
    knobs: Mapping[str, Any]
    values: tuple[float, ...] | None
    """The mean of each objective over the seeds, NaN where one failed; None while the arm is not over."""
    refused: bool = False
    """Its knobs contradict each other: it was never run."""
    pruned: bool = False
    """It was given up after the last of its reports."""
    reports: Mapping[int, float] = field(default_factory=dict)
    """What its pruner was told, by rung, or by the seed's place among the seeds."""
    violations: tuple[float, ...] = ()
    """By how much it breaks each constraint, at most 0 where it keeps it; empty while it is not over."""
    compared: Mapping[str, Any] = field(default_factory=dict)
    """Its gap to its baseline and what to make of it, once both are over."""


@dataclass(frozen=True)
class Outcome:
    """What the members of one arm, all over, say together."""

    values: tuple[float, ...]
    by_seed: tuple[list[float], ...]
    """Each objective's last value for each member."""
    means: Mapping[int, float]
    """The main metric's mean at every step that all members recorded."""
    violations: tuple[float, ...]


def over(members: Iterable[Any]) -> bool:
    """Whether none of the members runs any more, for now."""
    return all(member["status"] in OVER for member in members)


def outcome(ledger: Ledger, members: Sequence[Any], experiment: Experiment) -> Outcome:
    """What an arm came to. A member that broke off counts as infinitely bad, one that failed as unknown."""
    finals = [ledger.last_values(member["trial"]) for member in members]
    by_seed = tuple(
        [_final(member, last, metric) for member, last in zip(members, finals, strict=True)]
        for metric in experiment.objectives
    )
    broken = sum(_broke_off(member) for member in members)
    kept = [violations(experiment.constraints, last) for last in finals]
    worst = tuple(max(column) for column in zip(*kept, strict=True))
    series = [ledger.series(member["trial"], experiment.metric.name) for member in members]
    shared = set.intersection(*(set(steps) for steps in series))
    return Outcome(
        values=tuple(math.fsum(values) / len(values) for values in by_seed),
        by_seed=by_seed,
        means={step: math.fsum(steps[step] for steps in series) / len(series) for step in sorted(shared)},
        violations=(*worst, float(broken or -1)),
    )


def _worst(metric: Metric) -> float:
    return math.inf if metric.direction == "minimize" else -math.inf


def _final(member: Any, last: Mapping[str, float], metric: Metric) -> float:
    if _broke_off(member):
        return _worst(metric)
    return last.get(metric.name, math.nan) if member["status"] == "done" else math.nan


def _broke_off(member: Any) -> bool:
    """Whether the recipe itself ended the trial: it diverged, or needed more memory than there is."""
    return member["status"] in ("diverged", "oom")


def violations(constraints: Iterable[Constraint], finals: Mapping[str, float]) -> list[float]:
    """By how much a member's last values break each constraint: at most 0 where they keep it, infinite where there is no value."""
    broken = []
    for constraint in constraints:
        value = finals.get(constraint.metric, math.nan)
        excess = value - constraint.at_most if constraint.at_least is None else constraint.at_least - value
        broken.append(math.inf if math.isnan(excess) else excess)
    return broken


def reports(ledger: Ledger, members: Iterable[Any], experiment: Experiment) -> dict[int, float]:
    """What an arm's pruner is told so far, in order: its first seed's metric at the rungs, or each seed's last value once it ended.

    Of one that was given up: until then, whatever it recorded before it stopped.
    """
    if not experiment.prunes:
        return {}
    members = list(members)
    last = min((_given_up_at(member) for member in members if member["status"] == "pruned"), default=math.inf)
    return {step: value for step, value in _shown(ledger, members, experiment).items() if step <= last}


def infeasible(ledger: Ledger, experiment: Experiment) -> set[str]:
    """The names of the arms of a search, among those that are over, that break a constraint."""
    arms = {arm["name"]: ledger.members(arm["arm"]) for arm in ledger.arms() if arm["optuna"] is not None}
    ended = {name: members for name, members in arms.items() if members and over(members)}
    return {
        name
        for name, members in ended.items()
        if any(excess > 0 for excess in outcome(ledger, members, experiment).violations)
    }


@dataclass(frozen=True)
class GivenUp:
    """Decision of a pruner to end an arm: the last report that it judged by. A pruned trial's reason in the ledger, as JSON."""

    pruner: str
    step: int
    """Training step of the rung, or the seed's place among the seeds."""

    @property
    def reason(self) -> str:
        """Text that the ledger keeps."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, reason: str | None) -> "GivenUp | None":
        """Read a pruned trial's reason; ledgers of earlier versions have a sentence. None if it is neither."""
        match (reason or "").split():
            case ["given", "up", "by", pruner, "at", step] if step.isdecimal():
                return cls(pruner, int(step))
        try:
            return cls(**json.loads(reason or ""))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        """Return the decision in words, for a line of news."""
        return f"given up by {self.pruner} at {self.step}"


def _given_up_at(member: Any) -> float:
    decision = GivenUp.parse(member["reason"])
    return decision.step if decision else math.inf


def _shown(ledger: Ledger, members: Iterable[Any], experiment: Experiment) -> dict[int, float]:
    search, metric = experiment.search, experiment.metric
    by_seed = {member["seed"]: member for member in members}
    if search.pruner == "wilcoxon":
        places = ((place, by_seed[seed]) for place, seed in enumerate(experiment.seeds) if seed in by_seed)
        ended = {
            place: _final(member, ledger.last_values(member["trial"]), metric)
            for place, member in places
            if over([member])
        }
        return {place: value for place, value in ended.items() if not math.isnan(value)}
    first = by_seed.get(experiment.seeds[0])
    series = ledger.series(first["trial"], metric.name) if first else {}
    return {
        rung: _worst(metric) if math.isnan(series[rung]) else series[rung]
        for rung in search.rungs
        if rung in series
    }


# Earlier sweeps


def warm(ledger: Ledger, state: Path, experiment: Experiment) -> tuple[list[Point], int]:
    """The arms of the earlier sweeps that a search names, as points of its own space; and how many others they have.

    They are taken once, as they stood when this sweep first named them, and kept in its ledger: the study can then be drawn again
    whatever becomes of them. InputError where there is no such sweep.
    """
    if experiment.search is None or not experiment.search.warm:
        return [], 0
    asked = {
        "sweeps": experiment.search.warm,
        "objectives": [metric.model_dump(include={"name", "direction"}) for metric in experiment.objectives],
        "constraints": [constraint.model_dump() for constraint in experiment.constraints],
    }
    of = json.dumps(asked)
    kept = json.loads(ledger.fact("warm") or "{}")
    if kept.get("of") != of:
        kept = {
            "of": of,
            "arms": [arm for name in experiment.search.warm for arm in _arms(state, name, experiment)],
        }
        ledger.describe(warm=json.dumps(kept))
    points = [
        Point(arm["name"], knobs, tuple(arm["values"]), violations=tuple(arm["violations"]))
        for arm in kept["arms"]
        if (knobs := inside(arm["knobs"], experiment.space)) is not None
    ]
    return points, len(kept["arms"]) - len(points)


def _arms(state: Path, name: str, experiment: Experiment) -> list[dict[str, Any]]:
    """Every arm of an earlier sweep that is over and has all objectives."""
    sweeps = {path.parent.name: path for path in (state / "sweeps").glob("*/ledger.db")}
    if name not in sweeps:
        others = sorted(sweeps.keys() - {experiment.name})
        raise InputError(
            [f"{experiment.file}: search.warm: {name!r}: no such sweep in {state}; {nearest(name, others)}"]
        )
    book = Ledger(sweeps[name], readonly=True)
    try:
        found = []
        for arm in book.arms():
            members = book.members(arm["arm"])
            if members and over(members):
                its = outcome(book, members, experiment)
                knobs = json.loads(arm["knobs"])
                found.append(
                    {
                        "name": f"{name}/{arm['name']}",
                        "knobs": knobs,
                        "values": its.values,
                        "violations": its.violations,
                    }
                )
        return [arm for arm in found if not any(map(math.isnan, arm["values"]))]
    finally:
        book.close()


def inside(knobs: Mapping[str, Any], space: Mapping[str, Dimension]) -> dict[str, Any] | None:
    """The knobs as a point of the space, None where they are none."""
    applying = {knob for knob, dimension in space.items() if dimension.applies(knobs)}
    if knobs.keys() != applying or not all(space[knob].holds(value) for knob, value in knobs.items()):
        return None
    return {
        knob: float(knobs[knob]) if space[knob].kind == "uniform" else knobs[knob]
        for knob in space
        if knob in applying
    }
