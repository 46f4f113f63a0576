"""An arm as a point of a study: its values, its violations of constraints, and its reports to the pruner,
from the ledger.

This file does not use Optuna.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ablate.errors import InputError, nearest
from ablate.experiment.load import Experiment
from ablate.experiment.schema import Metric, Search
from ablate.experiment.search_space import Dimension
from ablate.files import Json
from ablate.results.next_runs import violations
from ablate.store.checked_ledger import open_checked
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import OVER, Member


@dataclass(frozen=True)
class Point:
    """State of one arm in the ledger, as a point of the study, in the study's order."""

    name: str
    knobs: Mapping[str, Json]
    values: tuple[float, ...] | None
    """Mean of each objective over the seeds, NaN if a seed failed; None until the arm is over."""
    refused: bool = False
    """True if its knobs contradict each other: it was never run."""
    pruned: bool = False
    """True if it was given up after the last of its reports."""
    reports: Mapping[int, float] = field(default_factory=dict)
    """Values reported to its pruner, by rung, or by the seed's position among the seeds."""
    violations: tuple[float, ...] = ()
    """Amount by which it breaks each constraint, at most 0 if it keeps it; empty until it is over."""
    compared: Mapping[str, Json] = field(default_factory=dict)
    """Gap to its baseline and the verdict, once both are over."""


@dataclass(frozen=True)
class ArmResult:
    """Joint result of the members of one arm, all of which are over."""

    values: tuple[float, ...]
    by_seed: tuple[list[float], ...]
    """Last value of each objective for each member."""
    means: Mapping[int, float]
    """Mean of the main metric at every step that all members recorded."""
    violations: tuple[float, ...]


def over(members: Iterable[Member]) -> bool:
    """Return True if none of the members runs or waits."""
    return all(member.status in OVER for member in members)


def outcome(ledger: Ledger, members: Sequence[Member], experiment: Experiment) -> ArmResult:
    """Compute the result of an arm. A member that diverged or ran out of memory counts as infinitely bad, a
    failed one as NaN."""
    finals = [ledger.last_values(member.trial) for member in members]
    by_seed = tuple(
        [_final(member, last, metric) for member, last in zip(members, finals, strict=True)]
        for metric in experiment.objectives
    )
    broken = sum(_broke_off(member) for member in members)
    kept = [violations(experiment.keys.constraints, last) for last in finals]
    worst = tuple(max(column) for column in zip(*kept, strict=True))
    series = [ledger.series(member.trial, experiment.metric.name) for member in members]
    shared = set.intersection(*(set(steps) for steps in series))
    return ArmResult(
        values=tuple(math.fsum(values) / len(values) for values in by_seed),
        by_seed=by_seed,
        means={step: math.fsum(steps[step] for steps in series) / len(series) for step in sorted(shared)},
        violations=(*worst, float(broken or -1)),
    )


def _worst(metric: Metric) -> float:
    return math.inf if metric.direction == "minimize" else -math.inf


def _final(member: Member, last: Mapping[str, float], metric: Metric) -> float:
    if _broke_off(member):
        return _worst(metric)
    return last.get(metric.name, math.nan) if member.status == "done" else math.nan


def _broke_off(member: Member) -> bool:
    """Return True if the recipe itself ended the trial: it diverged, or needed more memory than there is."""
    return member.status in ("diverged", "oom")


def reports(ledger: Ledger, members: Iterable[Member], experiment: Experiment) -> dict[int, float]:
    """Return the values reported to an arm's pruner so far, in order. These are its first seed's metric at
    the rungs, or each seed's last value once that seed is over. For an arm that was given up: the reports
    until then, whatever it recorded before it stopped."""
    search = experiment.keys.search
    if search is None or search.pruner is None:
        return {}
    members = list(members)
    decisions = [GivenUp.parse(member.reason) for member in members if member.status == "pruned"]
    last = min((decision.step for decision in decisions if decision), default=math.inf)
    values = _reported(ledger, members, experiment, search)
    return {step: value for step, value in values.items() if step <= last}


@dataclass(frozen=True)
class GivenUp:
    """Decision of a pruner to end an arm, with the last report that it was based on. Stored as a pruned
    trial's reason, as JSON."""

    pruner: str | None
    """Name of the pruner; None if the experiment file names none any more."""
    step: int
    """Training step of the rung, or the seed's position among the seeds."""

    @property
    def reason(self) -> str:
        """JSON text for the ledger."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, reason: str | None) -> "GivenUp | None":
        """Read a pruned trial's reason; None if it is anything else."""
        try:
            return cls(**json.loads(reason or ""))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"given up by {self.pruner} at {self.step}"


def _reported(
    ledger: Ledger, members: Iterable[Member], experiment: Experiment, search: Search
) -> dict[int, float]:
    metric = experiment.metric
    by_seed = {member.seed: member for member in members}
    if search.pruner == "wilcoxon":
        places = ((place, by_seed[seed]) for place, seed in enumerate(experiment.seeds) if seed in by_seed)
        ended = {
            place: _final(member, ledger.last_values(member.trial), metric)
            for place, member in places
            if over([member])
        }
        return {place: value for place, value in ended.items() if not math.isnan(value)}
    first = by_seed.get(experiment.seeds[0])
    series = ledger.series(first.trial, metric.name) if first else {}
    return {
        rung: _worst(metric) if math.isnan(series[rung]) else series[rung]
        for rung in search.rungs
        if rung in series
    }


# Earlier sweeps


def warm(ledger: Ledger, state: Path, experiment: Experiment) -> tuple[list[Point], int]:
    """Return the arms of the earlier sweeps that a search names, as points of its space, and the number of
    arms outside of it. They are read once, when this sweep first names them, and kept in its ledger, so that
    the study can be made again even if those sweeps change. InputError if there is no such sweep."""
    if experiment.keys.search is None or not experiment.keys.search.warm:
        return [], 0
    asked = {
        "sweeps": experiment.keys.search.warm,
        "objectives": [metric.model_dump(include={"name", "direction"}) for metric in experiment.objectives],
        "constraints": [constraint.model_dump() for constraint in experiment.keys.constraints],
    }
    of = json.dumps(asked)
    kept = ledger.facts.warm
    if kept.get("of") != of:
        arms = [arm for name in experiment.keys.search.warm for arm in _arms(state, name, experiment)]
        kept = ledger.facts.warm = {"of": of, "arms": arms}
    points = [
        Point(arm["name"], knobs, tuple(arm["values"]), violations=tuple(arm["violations"]))
        for arm in kept["arms"]
        if (knobs := inside(arm["knobs"], experiment.space)) is not None
    ]
    return points, len(kept["arms"]) - len(points)


def _arms(state: Path, name: str, experiment: Experiment) -> list[dict[str, Any]]:
    """Return name, knobs, values and violations of every arm of an earlier sweep that is over and has all
    objectives, as the ledger keeps them."""
    sweeps = {path.parent.name: path for path in (state / "sweeps").glob("*/ledger.db")}
    if name not in sweeps:
        others = sorted(sweeps.keys() - {experiment.name})
        raise InputError(
            f"{experiment.file}: search.warm: {name!r}: no such sweep in {state}; {nearest(name, others)}"
        )
    with closing(open_checked(sweeps[name])) as book:
        here, there = experiment.keys.design, book.facts.design
        if (here and here.shape) != (there and there.shape):
            kinds = [f"forks ({one.trunk})" if one else "full runs" for one in (there, here)]
            raise InputError(
                f"{experiment.file}: search.warm: {name!r} is of {kinds[0]} and this search of {kinds[1]}"
                f"{' in other windows' if here and there else ''}: their values cannot be compared"
            )
        arms: list[dict[str, Any]] = []
        for arm in (arm for arm in book.arms() if arm.role not in ("null", "bad")):
            members = book.members(arm.arm)
            if members and over(members):
                one = outcome(book, members, experiment)
                if not any(map(math.isnan, one.values)):
                    of = {"name": f"{name}/{arm.name}", "knobs": json.loads(arm.knobs)}
                    arms.append(of | {"values": one.values, "violations": one.violations})
        return arms


def inside(knobs: Mapping[str, Json], space: Mapping[str, Dimension]) -> dict[str, Json] | None:
    """Return the knobs as a point of the space, or None if they are not one."""
    applying = {knob for knob, dimension in space.items() if dimension.applies(knobs)}
    if knobs.keys() != applying or not all(space[knob].holds(value) for knob, value in knobs.items()):
        return None
    point = {knob: knobs[knob] for knob in space if knob in applying}
    return {
        knob: float(value) if isinstance(value, int) and space[knob].kind == "uniform" else value
        for knob, value in point.items()
    }
