"""The audit of a sweep after faults: ledger, files, Optuna and MLflow, compared with an undisturbed run.

Read-only. It recomputes every invariant from files and tables, independently of the code that wrote them, and queries MLflow through
its REST interface. It has its own SQL for the same reason: a wrong query of the ledger would hide its own mistakes.
"""

import itertools
import json
import math
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from ablate.execution.tracking import runs as mlflow_runs
from ablate.files import Damaged
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED, Member
from ablate.store.trial_store import Store, parsed
from ablate.training.metric_names import parse

_PAGE = 25_000
Records = dict[tuple[int, str], float]
"""Value of each record, by step and metric."""


@dataclass(frozen=True)
class Finding:
    """Broken promise."""

    kind: Literal["lost", "twice", "silent", "wrong"]
    """`silent`: a value is not the undisturbed run's, and nothing reports damage. `wrong`: any other broken promise."""
    what: str
    count: int = 1
    """Number of occurrences."""
    about: str = ""
    """Kind of thing that it is about, such as `member`, `trial folder` or `checkpoint`."""


def audit(state: Path, folder: Path, reference: Path, address: str | None = None) -> Iterator[Finding]:
    """Compare a sweep with an undisturbed run of it, and with what Optuna and MLflow show of it.

    Args:
        state: State folder of the audited sweep; it must contain the trials of this sweep only.
        folder: Folder of the audited sweep, with its ledger.
        reference: Folder of the same sweep run without faults.
        address: Address of the MLflow server that has its runs; None if none has.
    """
    yield from sweep(state, folder, reference)
    yield from study(folder)
    if address:
        yield from mlflow(Tracker(address), folder)


def _open(folder: Path) -> closing[Ledger]:
    return closing(Ledger(folder / "ledger.db", readonly=True))


def finished(folder: Path) -> dict[tuple[str, int], float]:
    """Return the last loss of each finished member of a sweep, by arm and seed."""
    with _open(folder) as book:
        rows = [row for row in book.members() if row.status == "done"]
        return {(row.name, row.seed): book.last_values(row.trial)["val/loss"] for row in rows}


def sweep(state: Path, folder: Path, reference: Path) -> Iterator[Finding]:
    """Compare a sweep with an undisturbed run: its members, their records, trial folders and attempts."""
    with _open(folder) as ours, _open(reference) as theirs:
        present, wanted = ({(row.name, row.seed): row for row in book.members()} for book in (ours, theirs))
        yield from _sets("member", set(present), set(wanted))
        for key in present.keys() & wanted.keys():
            member = f"{key[0]} seed={key[1]}"
            if present[key].status != wanted[key].status:
                yield Finding("lost", f"{member} is {present[key].status}, not {wanted[key].status}")
            records = [_of(book, rows[key].trial) for book, rows in ((ours, present), (theirs, wanted))]
            yield from _records(member, *records)
            yield from _files(member, Store(state), present[key].id, set(records[1]))
        folders = {path.name for path in (state / "trials").iterdir()}
        yield from _sets("trial folder", folders, {row.id for row in wanted.values()})
        yield from _attempts(ours)


def _sets(what: str, present: set[Any], wanted: set[Any]) -> Iterator[Finding]:
    for item in sorted(wanted - present):
        yield Finding("lost", f"no {what} {item}", about=what)
    for item in sorted(present - wanted):
        yield Finding("twice", f"a {what} that nobody wanted: {item}", about=what)


def _of(book: Ledger, trial: int) -> Records:
    return {(step, name): value for step, name, value, _ in book.records(trial)}


def _records(member: str, ours: Records, theirs: Records) -> Iterator[Finding]:
    same = (key for key in sorted(ours.keys() & theirs.keys()) if not parse(key[1]).of_machine)
    differ = [
        key
        for key in same
        if ours[key] != theirs[key] and not (math.isnan(ours[key]) and math.isnan(theirs[key]))
    ]
    for kind, keys, what in (
        ("lost", sorted(theirs.keys() - ours.keys()), "records are missing"),
        ("wrong", sorted(ours.keys() - theirs.keys()), "records are not in an undisturbed run"),
        ("silent", differ, "values differ from an undisturbed run's"),
    ):
        if keys:
            first = f"{keys[0]}: {ours.get(keys[0])!r}, not {theirs.get(keys[0])!r}"
            yield Finding(kind, f"{member}: {len(keys)} {what}, the first {first}", len(keys))


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
        what = f"{member}: {len(missing)} records in its folder {trial}, the first {missing[0]}"
        yield Finding("lost", what, len(missing))
    if (store.folder(trial) / "checkpoint.pt").exists():
        yield Finding("wrong", f"{member}: a checkpoint is left in its folder {trial}", about="checkpoint")


def _attempts(book: Ledger) -> Iterator[Finding]:
    """Check that every attempt ended, and at most one per trial ended with a result."""
    query = "SELECT id, attempt, ended, outcome FROM attempts JOIN trials USING (trial) ORDER BY id, attempt"
    for trial, rows in itertools.groupby(book.db.execute(query), key=lambda row: row["id"]):
        attempts = list(rows)
        never = [row["attempt"] for row in attempts if row["ended"] is None or row["outcome"] is None]
        if never:
            yield Finding("wrong", f"trial {trial}: attempts {never} never ended")
        results = sum(row["outcome"] in FINISHED for row in attempts)
        if results > 1:
            yield Finding("twice", f"trial {trial}: {results} attempts ended with a result", results - 1)


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
        attempts = [events for path in files if (events := [*_events(path)])]
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
    finals: dict[int, list[float]] = {}
    with _open(folder) as book:
        metric = book.facts.metric.name
        for row in book.members():
            if row.optuna is not None:
                finals.setdefault(row.optuna, []).append(book.last_values(row.trial)[metric])
    storage = JournalStorage(JournalFileBackend(str(folder / "optuna.log")))  # as Optuna itself reads it
    (name,) = optuna.get_all_study_names(storage)
    points = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
    drawn = [(trial.state.name, trial.value) for trial in points]
    if len(drawn) != len(finals):
        kind = "twice" if len(drawn) > len(finals) else "lost"
        yield Finding(kind, f"Optuna shows {len(drawn)} points of {len(finals)}")
    for number, (status, value) in enumerate(drawn):
        wanted = math.fsum(finals.get(number, ())) / len(finals.get(number, (0,)))
        if status != "COMPLETE" or value != wanted:
            what = f"Optuna's point {number} is {status} with {value}, not COMPLETE with {wanted}"
            yield Finding("wrong", what)


class Tracker:
    """Client of an MLflow server's REST interface."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, body: dict[str, Any] | None = None, **query: str | int) -> dict[str, Any]:
        """Return the JSON answer of a request below `api/2.0/mlflow/`: GET, or POST if it has a body."""
        url = f"{self.address}/api/2.0/mlflow/{path}?{urlencode(query)}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def search(self, name: str) -> list[dict[str, Any]]:
        """Return all runs of an experiment, including deleted ones."""
        number = self.ask("experiments/get-by-name", experiment_name=name)["experiment"]["experiment_id"]
        body = {"experiment_ids": [number], "max_results": 10_000, "run_view_type": "ALL"}
        return self.ask("runs/search", body).get("runs", [])

    def history(self, run: str, key: str) -> Counter[tuple[int, float, int]]:
        """Return the points of a metric, (step, value, milliseconds), with their numbers."""
        answer = self.ask("metrics/get-history", run_id=run, metric_key=key, max_results=_PAGE)
        # MLflow sends 64-bit integers and NaN as text.
        return Counter(
            (int(point.get("step", 0)), float(point["value"]), int(point["timestamp"]))
            for point in answer.get("metrics", [])
        )

    def files(self, run: str) -> set[str]:
        """Return the names of a run's artifacts."""
        return {file["path"] for file in self.ask("artifacts/list", run_id=run).get("files", [])}


def mlflow(tracker: Tracker, folder: Path) -> Iterator[Finding]:
    """Check MLflow's runs: one for each member and one for the sweep, all finished and complete.

    Each record of the ledger must be there exactly once, with its time.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in tracker.search(folder.name):
        info, tags = run["info"], {tag["key"]: tag["value"] for tag in run["data"].get("tags", ())}
        if info.get("lifecycle_stage") == "deleted" and tags.get("ablate.status") == "replaced":
            continue  # its records were discarded; another run has the records that replaced them
        runs.setdefault(tags.get("ablate.member", "the sweep"), []).append(run)
        if info["status"] != "FINISHED":
            yield Finding("wrong", f"MLflow: {info['run_name']} is {info['status']}")
    with _open(folder) as book:
        wanted = {row.key: row for row in book.members()}
        for member in sorted({*wanted, "the sweep", *runs}):
            matching = runs.get(member, [])
            if len(matching) != 1:
                kind = "twice" if matching else "lost"
                yield Finding(kind, f"MLflow: {len(matching)} runs of {member}", max(1, len(matching) - 1))
            for run in matching:
                yield from _run(tracker, run, book, wanted.get(member))


def _run(tracker: Tracker, run: dict[str, Any], book: Ledger, member: Member | None) -> Iterator[Finding]:
    """Check one run: of a member, or of the sweep if it is None."""
    name, number = f"MLflow: {run['info']['run_name']}", run["info"]["run_id"]
    params = {param["key"] for param in run["data"].get("params", ())}
    if member and not {"arm", "seed", "data", "recipe.schedule"} <= params:
        yield Finding("lost", f"{name} has {len(params)} params, and not all")
    files = {"spec.json", "result.json"} if member else {"experiment.yaml"}
    if missing := files - tracker.files(number):
        yield Finding("lost", f"{name} has no {sorted(missing)}", len(missing))
    wanted: dict[str, Counter[tuple[int, float, int]]] = {}
    for step, key, value, moment in book.records(member.trial) if member else ():
        if sent := mlflow_runs.key(key, [book.facts.metric.name]):
            wanted.setdefault(sent, Counter())[step, value, int(moment * 1000)] += 1
    for key, points in wanted.items():
        logged = tracker.history(number, key)
        for kind, wrong in (("lost", points - logged), ("twice", logged - points)):
            if wrong:
                what = f"{name} {key}: {wrong.total()} points of {points.total()}, the first {min(wrong)}"
                yield Finding(kind, what, wrong.total())
