"""Forecast of a sweep: the trials that are missing, their training steps and their seconds. Runs nothing."""

import json
import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ablate.errors import by_key
from ablate.execution.shared_prefixes import Family, note
from ablate.execution.time_model import Load, MachinePaces, TimeModel, Trials, time_left, unproposed
from ablate.execution.workers.placement import Need, placements
from ablate.experiment.arms import Arm, KnobError
from ablate.experiment.edits import PlannedTrial, redefined
from ablate.experiment.load import Experiment
from ablate.experiment.roles import GROUPS
from ablate.experiment.schema import Resources
from ablate.experiment.trial_spec import TrialSpec
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Store

_START_SECONDS = {"ray": 8.0, "inline": 6.0}
"""Start-up time by executor: imports and the check of the numerics; with Ray also its start, and torch in
each worker."""


@dataclass
class Forecast:
    """Forecast of a run of an experiment: trials, training steps and seconds."""

    rows: list[tuple[Arm, list[TrialSpec], int]] = field(default_factory=list)
    """Each arm that the file names, its trials, and the number of those that are done."""
    trials: int = 0
    """Number of trials to run, of arms that exist already."""
    later: int = 0
    """Upper bound of the trials that a search may still propose, including baselines and confirmation."""
    grown: int = 0
    """Upper bound of the trials on added seeds, if arms stay undecided."""
    done: int = 0
    proposed: int = 0
    """Number of points that the search has proposed."""
    redefined: list[str] = field(default_factory=list)
    """Names of arms whose trials differ from those of the last run."""
    alone: int = 0
    """Training steps of the trials to run that can share a prefix, without sharing; of existing arms."""
    resumed: int = 0
    """Those of `alone` that the trials' own checkpoints save."""
    steps: int = 0
    """Steps that these trials compute when each shared prefix is computed once."""
    seconds: float = 0.0
    """Duration of all trials to run, one after the other."""
    longest: float = 0.0
    """Duration of the longest trial, in seconds."""
    measured: int = 0
    """Number of trials in the state folder on which the estimate of the seconds is based."""
    recalled: int = 0
    """Number of trials of other state folders on this machine on which it is based, too."""
    known: bool = True
    """False for a user's own code, of whose speed nothing is known before a trial has run."""


def forecast(experiment: Experiment, state: Path, device: str, paces: MachinePaces | None = None) -> Forecast:
    """Forecast a run of the experiment, from the trial store and the ledger of the sweep. `paces`: what this
    machine has measured for other state folders; None to leave it out."""
    store = Store(state)
    result = Forecast(known=not experiment.base.config.own_code)
    recorded = _Recorded([(arm, experiment.seeds) for arm in experiment.arms])
    path = state / "sweeps" / experiment.name / "ledger.db"
    if path.exists():  # a damaged ledger is skipped here; `ablate sweep` refuses it
        with suppress(sqlite3.DatabaseError), closing(Ledger(path, readonly=True)) as ledger:
            _add_ledger(recorded, experiment, ledger, store, device)
    pace, family = TimeModel(experiment, store, device), Family(note=note(experiment.keys.telemetry))
    if paces:
        pace.recall(paces.read())
    todo: dict[str, Load] = {}
    finished = set(recorded.finished)
    for position, (arm, seeds) in enumerate(recorded.arms):
        specs = [experiment.spec(arm, seed, device) for seed in seeds]
        load = Load.of(arm, experiment, device)
        done = {spec.id for spec in specs if spec.id in recorded.pruned or store.finished(spec.id)}
        finished |= done
        # Finished trials, too: a trial that shares a prefix with one starts from its checkpoint.
        for spec in specs:
            family.add(spec, store.checkpoint_step(spec.id))
            if spec.id not in done:
                todo[spec.id] = load
        if position < len(experiment.arms):
            result.rows.append((arm, specs, sum(spec.id in done for spec in specs)))
    rows = [(arm.name, spec) for arm, specs, _ in result.rows for spec in specs]
    named = {(name, spec.seed): PlannedTrial(spec.id, spec.wire) for name, spec in rows}
    result.redefined = redefined(recorded.members, named)
    result.trials, result.done, result.proposed = len(todo), len(finished), recorded.proposed
    computed = family.steps(todo.keys(), {path.stem for path in (state / "checkpoints").glob("*.pt")})
    whole = {spec.id: spec.steps for spec in family if spec.id in todo}
    result.alone, result.steps = sum(whole.values()), sum(computed.values())
    result.resumed = sum(step for trial, step in family.resumed.items() if trial in todo)
    trials = Trials(
        (load, computed[trial] / whole[trial] if trial in whole else 1.0) for trial, load in todo.items()
    )
    if todo or not recorded.ended:
        if experiment.keys.growth:
            result.grown = sum(max(0, experiment.keys.growth.most - len(seeds)) for _, seeds in recorded.arms)
        asks = experiment.keys.search.trials - recorded.proposed if experiment.keys.search else 0
        later = unproposed(experiment, device, asks, not recorded.confirmed, recorded.grouped)
        result.later = later.total()
        trials += later
    result.seconds, result.longest = pace.sum_and_longest(trials)
    result.measured, result.recalled = pace.measured, pace.recalled
    return result


@dataclass
class _Recorded:
    """Arms of the experiment file and of the ledger of its sweep, and what the ledger records about them."""

    arms: list[tuple[Arm, tuple[int, ...]]]
    """Arms with their seeds, those of the file first."""
    members: dict[tuple[str, int], Member] = field(default_factory=dict)
    """Members of the ledger, by name of arm and seed."""
    proposed: int = 0
    finished: set[str] = field(default_factory=set)
    """Ids of the finished trials of proposed arms, which `arms` leaves out."""
    pruned: set[str] = field(default_factory=set)
    """Ids of pruned trials."""
    grouped: int = 0
    """Number of finished runs of groups of units in a search for a cause."""
    confirmed: bool = False
    """The search has begun to confirm its winner."""
    ended: bool = False
    """The last run of the same file finished all trials."""


def _add_ledger(
    recorded: _Recorded, experiment: Experiment, ledger: Ledger, store: Store, device: str
) -> None:
    """Add the points that a search proposed, seeds beyond those of the file, and pruned trials."""
    rows = ledger.members()
    unchanged = ledger.facts.text == experiment.text
    recorded.members = {(row.name, row.seed): row for row in rows}
    recorded.ended = unchanged and ledger.facts.ended == "done"
    recorded.pruned = {row.id for row in rows if row.status == "pruned"}
    members = by_key((row.name, row) for row in rows)
    if experiment.keys.growth:
        recorded.arms = [(arm, _seeds(own, members.get(arm.name, []))) for arm, own in recorded.arms]
    recorded.grouped = sum(row.role in GROUPS and store.finished(row.id) for row in rows)
    if not experiment.keys.search:
        return
    recorded.proposed = len(ledger.points())
    wanted = {"engine": experiment.engine, "device": device}.items()
    named = {arm.name for arm in experiment.arms}
    for arm in ledger.arms():
        recorded.confirmed |= arm.role == "confirmed"
        first = experiment.seeds if arm.name in named else ()
        own = [row for row in members.get(arm.name, []) if row.seed not in first]
        if unchanged and all(
            wanted <= row.resolved.content.items() and (row.id in recorded.pruned or store.finished(row.id))
            for row in own
        ):
            recorded.finished |= {row.id for row in own}
        elif own:
            with suppress(KnobError):  # the file was edited
                recorded.arms.append((experiment.base.arm(json.loads(arm.knobs)), _seeds((), own)))


def _seeds(first: tuple[int, ...], rows: list[Member]) -> tuple[int, ...]:
    return tuple(sorted({*first, *(row.seed for row in rows)}))


class TimeNeeded(NamedTuple):
    """Estimated duration of a run, and the number of trials at once."""

    seconds: float
    at_once: int


def time_needed(
    result: Forecast,
    device: str,
    resources: Resources,
    executor: str,
    workers: int | None,
    cluster: bool,
    gpus: int,
) -> TimeNeeded | None:
    """Return the estimated duration of the run; None if there is nothing to base it on.

    `resources`: those of one trial; `executor`: `ray` or `inline`; `workers`: most trials at once, None for
    as many as `Pool` places on this machine's cores, or on its `gpus` GPUs. It is one if this machine has no
    GPU that the trials need, and if Ray runs elsewhere (`cluster`): nothing is known of the units there.
    """
    missing, ranks = result.trials + result.later, resources.layout(device).ranks
    if not missing:
        return TimeNeeded(0.0, 1)
    measured = result.measured + result.recalled
    if not measured and (device == "cuda" or not result.known):
        return None
    units = 0 if cluster else gpus if device == "cuda" else workers or os.cpu_count() or 1
    slots = 1 if executor == "inline" else min(missing, workers or (missing if units else 1))
    if units:
        room = {"here": float(units)}
        slots = max(1, len(placements(Need.of(resources.gpus_of(device), ranks), slots, room, room, ())))
    unmeasured = 1 if measured else ranks  # without measurements, the cost of a workload is that of one core
    seconds = time_left(result.seconds / unmeasured, result.longest / unmeasured, (), slots)
    return TimeNeeded(seconds + _START_SECONDS[executor], slots)
