"""Audit of a finished sweep after faults: compares ledger, files, MLflow and Optuna with an undisturbed run.

Read-only. It recomputes every invariant from files and tables, independently of the code that wrote them, and
queries MLflow through its REST interface. It has its own SQL for the same reason: a wrong query of the ledger
would hide its own mistakes.
"""

import itertools
import json
import math
import sqlite3
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar
from urllib.parse import urlencode

from ablate.files import Damaged, Json
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED, Member
from ablate.store.trial_store import Store, parsed
from ablate.training.metric_names import parse

_PAGE = 25_000
Records = dict[tuple[int, str], float]
"""Value of each record, by step and metric."""
Key = TypeVar("Key", str, tuple[str, int])


@dataclass(frozen=True)
class Finding:
    """Broken promise: its kind, a description, and the number of occurrences."""

    kind: Literal["lost", "twice", "wrong"]
    what: str
    count: int = 1
    silent: bool = False
    """True if values differ from the undisturbed run without any report of damage."""


def members(book: Ledger) -> dict[tuple[str, int], Member]:
    """Return the members of the sweep, by arm and seed."""
    return {(row.name, row.seed): row for row in book.members()}


def sweep(state: Path, folder: Path, reference: Path) -> Iterator[Finding]:
    """Compare a sweep with an undisturbed run: its members, their records, trial folders and attempts.

    Args:
        state: State folder of the audited sweep; it must contain the trials of this sweep only.
        folder: Folder of the audited sweep, with its ledger.
        reference: Folder of the same sweep run without faults.
    """
    ours, theirs = (Ledger(path / "ledger.db", readonly=True) for path in (folder, reference))
    present, wanted = members(ours), members(theirs)
    yield from _sets("member", set(present), set(wanted))
    for key in present.keys() & wanted.keys():
        member = f"{key[0]} seed={key[1]}"
        if present[key].status != wanted[key].status:
            yield Finding("lost", f"{member} is {present[key].status}, not {wanted[key].status}")
        yield from _records(member, _of(ours, present[key].trial), _of(theirs, wanted[key].trial))
        yield from _files(member, Store(state), present[key].id, set(_of(theirs, wanted[key].trial)))
    yield from _sets(
        "trial folder",
        {path.name for path in (state / "trials").iterdir()},
        {row.id for row in wanted.values()},
    )
    yield from _attempts(ours)
    ours.close()
    theirs.close()


def _sets(what: str, present: set[Key], wanted: set[Key]) -> Iterator[Finding]:
    yield from (Finding("lost", f"no {what} {item}") for item in sorted(wanted - present))
    yield from (Finding("twice", f"a {what} that nobody wanted: {item}") for item in sorted(present - wanted))


def _of(book: Ledger, trial: int) -> Records:
    return {(step, name): value for step, name, value, _ in book.records(trial)}


def _records(member: str, ours: Records, theirs: Records) -> Iterator[Finding]:
    if missing := sorted(theirs.keys() - ours.keys()):
        yield Finding("lost", f"{member}: {len(missing)} records, the first {missing[0]}", len(missing))
    if extra := sorted(ours.keys() - theirs.keys()):
        yield Finding(
            "wrong",
            f"{member}: {len(extra)} records that an undisturbed run has not, the first {extra[0]}",
            len(extra),
        )
    same = (key for key in sorted(ours.keys() & theirs.keys()) if not parse(key[1]).of_machine)
    differ = [
        key
        for key in same
        if ours[key] != theirs[key] and not (math.isnan(ours[key]) and math.isnan(theirs[key]))
    ]
    if differ:
        first = f"{differ[0]}: {ours[differ[0]]!r}, not {theirs[differ[0]]!r}"
        yield Finding(
            "wrong",
            f"{member}: {len(differ)} values differ from an undisturbed run's, the first {first}",
            len(differ),
            silent=True,
        )


def _files(member: str, store: Store, trial: str, wanted: set[tuple[int, str]]) -> Iterator[Finding]:
    """Check that the trial's folder alone contains its result and all `wanted` records (step, metric)."""
    try:
        if store.result(trial) is None:
            yield Finding("lost", f"{member}: no result in its folder {trial}")
    except Damaged as error:
        yield Finding("lost", f"{member}: {error}")
    present = {
        (event["step"], name) for event in store.events(trial, strict=False) for name in event["metrics"]
    }
    if missing := sorted(wanted - present):
        yield Finding(
            "lost",
            f"{member}: {len(missing)} records in its folder {trial}, the first {missing[0]}",
            len(missing),
        )
    if (store.folder(trial) / "checkpoint.pt").exists():
        yield Finding("wrong", f"{member}: a checkpoint is left in its folder {trial}")


def _attempts(book: Ledger) -> Iterator[Finding]:
    """Check that every attempt ended, and at most one per trial ended with a result."""
    rows: dict[str, list[sqlite3.Row]] = {}
    for row in book.db.execute(
        "SELECT id, attempts.* FROM attempts JOIN trials USING (trial) ORDER BY attempt"
    ):
        rows.setdefault(row["id"], []).append(row)
    for trial, attempts in rows.items():
        if open_ones := [
            row["attempt"] for row in attempts if row["ended"] is None or row["outcome"] is None
        ]:
            yield Finding("wrong", f"trial {trial}: attempts {open_ones} never ended")
        finished = sum(row["outcome"] in FINISHED for row in attempts)
        if finished > 1:
            yield Finding("twice", f"trial {trial}: {finished} attempts ended with a result", finished - 1)


# Steps that were computed again


@dataclass(frozen=True)
class Repeat:
    """Steps of one attempt that the next attempt computed again, and the seconds that they had taken."""

    trial: str
    steps: int
    seconds: float
    slack: float
    """Longest time between two records of the first attempt: work that may not have been recorded."""


def repeats(state: Path) -> Iterator[Repeat]:
    """Yield the repeated steps of all trial folders, computed from the times in their records."""
    for folder in sorted((state / "trials").iterdir()):
        files = sorted(folder.glob("events-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
        attempts = [[*_events(path)] for path in files]
        attempts = [events for events in attempts if events]
        for before, after in itertools.pairwise(attempts):
            resumed = after[0].resumed
            again = [event for event in before if event.step > resumed]
            if again:
                kept = max((event.time for event in before if event.step <= resumed), default=again[0].time)
                gaps = (later.time - earlier.time for earlier, later in itertools.pairwise(before))
                yield Repeat(
                    folder.name, again[-1].step - resumed, again[-1].time - kept, max(gaps, default=0.0)
                )


class _Event(NamedTuple):
    """Step and time of an event, and the step from which its attempt resumed."""

    step: int
    time: float
    resumed: int


def _events(path: Path) -> Iterator[_Event]:
    """Yield the events of an attempt, without lines that are corrupted."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError):
            event = parsed(line + b"\n", path.parent.name)
            yield _Event(event["step"], event["time"], event.get("resumed", 0))


# Optuna and MLflow


def study(folder: Path) -> Iterator[Finding]:
    """Check that Optuna's study contains every arm once, with the mean over its seeds as value."""
    from ablate.execution.search import shown

    book = Ledger(folder / "ledger.db", readonly=True)
    metric = book.facts.metric.name
    finals: dict[int, list[float]] = {}
    for row in book.members():
        if row.optuna is not None:
            finals.setdefault(row.optuna, []).append(book.last_values(row.trial)[metric])
    book.close()
    drawn = shown(folder / "optuna.log")
    if len(drawn) != len(finals):
        yield Finding(
            "twice" if len(drawn) > len(finals) else "lost",
            f"Optuna shows {len(drawn)} points of {len(finals)}",
        )
    for number, (status, value) in enumerate(drawn):
        wanted = math.fsum(finals.get(number, ())) / len(finals.get(number, (0,)))
        if status != "COMPLETE" or value != wanted:
            yield Finding(
                "wrong", f"Optuna's point {number} is {status} with {value}, not COMPLETE with {wanted}"
            )


@dataclass(frozen=True)
class TrackedRun:
    """Run of MLflow."""

    id: str
    name: str
    status: str
    deleted: bool
    tags: Mapping[str, str]
    params: frozenset[str]
    """Names of its parameters."""

    @classmethod
    def parse(cls, content: dict[str, Json]) -> "TrackedRun":
        """Parse a run of the answer of `runs/search`."""
        info, data = _object(content["info"]), _object(content["data"])
        tags = [_object(tag) for tag in _list(data.get("tags"))]
        return cls(
            id=str(info["run_id"]),
            name=str(info["run_name"]),
            status=str(info["status"]),
            deleted=info.get("lifecycle_stage") == "deleted",
            tags={str(tag["key"]): str(tag["value"]) for tag in tags},
            params=frozenset(str(_object(param)["key"]) for param in _list(data.get("params"))),
        )


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise ValueError(f"MLflow sent {value!r} instead of an object")
    return value


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


class Tracker:
    """Client of an MLflow server's REST interface."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **query: str | int) -> dict[str, Json]:
        """Return the JSON answer of a GET request below `api/2.0/mlflow/`."""
        with urllib.request.urlopen(
            f"{self.address}/api/2.0/mlflow/{path}?{urlencode(query)}", timeout=60
        ) as answer:
            return json.load(answer)

    def experiment(self, name: str) -> str:
        """Return the id of an experiment."""
        answer = self.ask("experiments/get-by-name", experiment_name=name)
        return str(_object(answer["experiment"])["experiment_id"])

    def search(self, experiment: str) -> list[TrackedRun]:
        """Return all runs of an experiment, including deleted ones."""
        body = {"experiment_ids": [experiment], "max_results": 10_000, "run_view_type": "ALL"}
        data = json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/api/2.0/mlflow/runs/search", data, kind)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return [TrackedRun.parse(run) for run in json.load(answer).get("runs", [])]

    def history(self, run: str, key: str) -> Counter[tuple[int, float, int]]:
        """Return the points of a metric, (step, value, milliseconds), with their numbers."""
        answer = self.ask("metrics/get-history", run_id=run, metric_key=key, max_results=_PAGE)
        points = [_object(point) for point in _list(answer.get("metrics"))]
        # MLflow sends 64-bit integers and NaN as text.
        return Counter(
            (int(str(point.get("step", 0))), float(str(point["value"])), int(str(point["timestamp"])))
            for point in points
        )

    def files(self, run: str) -> set[str]:
        """Return the names of a run's artifacts."""
        answer = self.ask("artifacts/list", run_id=run)
        return {str(_object(file)["path"]) for file in _list(answer.get("files"))}


def mlflow(tracker: Tracker, folder: Path) -> Iterator[Finding]:
    """Check MLflow's runs: one for each member and one for the sweep, all finished and complete.

    Each record of the ledger must be there exactly once, with its time.
    """
    runs: dict[str, list[TrackedRun]] = {}
    for run in tracker.search(tracker.experiment(folder.name)):
        if run.deleted and run.tags.get("ablate.status") == "replaced":
            continue  # its records were discarded; another run has the records that replaced them
        runs.setdefault(run.tags.get("ablate.member", "the sweep"), []).append(run)
        if run.status != "FINISHED":
            yield Finding("wrong", f"MLflow: {run.name} is {run.status}")
    book = Ledger(folder / "ledger.db", readonly=True)
    wanted = {row.key: row for row in book.members()}
    for member in sorted({*wanted, "the sweep", *runs}):
        matching = runs.get(member, [])
        if len(matching) != 1:
            yield Finding(
                "twice" if matching else "lost",
                f"MLflow: {len(matching)} runs of {member}",
                max(1, len(matching) - 1),
            )
        for run in matching:
            files = {"spec.json", "result.json"} if member in wanted else {"experiment.yaml"}
            yield from _check_complete(tracker, run, files)
            if member in wanted:
                yield from _histories(tracker, run, book, wanted[member])
    book.close()


def _check_complete(tracker: Tracker, run: TrackedRun, files: set[str]) -> Iterator[Finding]:
    if "spec.json" in files and not {"arm", "seed", "data", "recipe.schedule"} <= run.params:
        yield Finding("lost", f"MLflow: {run.name} has {len(run.params)} params, and not all")
    if missing := files - tracker.files(run.id):
        yield Finding("lost", f"MLflow: {run.name} has no {sorted(missing)}", len(missing))


def _histories(tracker: Tracker, run: TrackedRun, book: Ledger, member: Member) -> Iterator[Finding]:
    wanted: dict[str, Counter[tuple[int, float, int]]] = {}
    for step, key, value, moment in book.records(member.trial):
        if parse(key).for_tracker:
            wanted.setdefault(key, Counter())[step, value, int(moment * 1000)] += 1
    for key, points in wanted.items():
        logged = tracker.history(run.id, key)
        subject = f"MLflow: {run.name} {key}"
        if missing := points - logged:
            yield Finding(
                "lost",
                f"{subject}: {missing.total()} of {points.total()} points, the first {min(missing)}",
                missing.total(),
            )
        if extra := logged - points:
            yield Finding(
                "twice",
                f"{subject}: {extra.total()} points that the ledger has not, the first {min(extra)}",
                extra.total(),
            )
