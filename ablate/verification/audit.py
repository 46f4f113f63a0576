"""Invariants of a finished sweep, whatever happened on the way.

Reads only, and believes no word of the code that wrote: files and tables are compared with an undisturbed
run's, and MLflow is asked through its REST interface. Its SQL is its own for that reason: a wrong query of
the ledger would hide what it got wrong.
"""

import itertools
import json
import math
import sqlite3
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

from ablate.files import Damaged
from ablate.results.ledger import Ledger
from ablate.results.ledger_rows import FINISHED
from ablate.results.trial_store import Store, parsed
from ablate.training.metric_names import parse

_PAGE = 25_000
Records = dict[tuple[int, str], float]


@dataclass(frozen=True)
class Finding:
    """A promise that was broken, and how often: something lost, something twice, something else that is
    wrong.
    """

    kind: Literal["lost", "twice", "wrong"]
    what: str
    count: int = 1


def members(book: Ledger) -> dict[tuple[str, int], sqlite3.Row]:
    """Members that the sweep asked for, by arm and seed."""
    return {(row["name"], row["seed"]): row for row in book.members()}


def sweep(state: Path, folder: Path, reference: Path) -> Iterator[Finding]:
    """A sweep's folder, and the trials of its state folder, against the folder of a run that nothing
    disturbed.
    """
    ours, theirs = (Ledger(place / "ledger.db", readonly=True) for place in (folder, reference))
    found, wanted = members(ours), members(theirs)
    yield from _sets("member", set(found), set(wanted))
    for key in found.keys() & wanted.keys():
        about = f"{key[0]} seed={key[1]}"
        if found[key]["status"] != wanted[key]["status"]:
            yield Finding("lost", f"{about} is {found[key]['status']}, not {wanted[key]['status']}")
        yield from _records(about, _of(ours, found[key]["trial"]), _of(theirs, wanted[key]["trial"]))
        yield from _files(about, Store(state), found[key]["id"], set(_of(theirs, wanted[key]["trial"])))
    yield from _sets(
        "trial folder",
        {path.name for path in (state / "trials").iterdir()},
        {row["id"] for row in wanted.values()},
    )
    yield from _attempts(ours)
    ours.close()
    theirs.close()


def _sets(what: str, found: set, wanted: set) -> Iterator[Finding]:
    yield from (Finding("lost", f"no {what} {item}") for item in sorted(wanted - found))
    yield from (Finding("twice", f"a {what} that nobody wanted: {item}") for item in sorted(found - wanted))


def _of(book: Ledger, trial: int) -> Records:
    return {(step, name): value for step, name, value, _ in book.records(trial)}


def _records(about: str, ours: Records, theirs: Records) -> Iterator[Finding]:
    if missing := sorted(theirs.keys() - ours.keys()):
        yield Finding("lost", f"{about}: {len(missing)} records, the first {missing[0]}", len(missing))
    if extra := sorted(ours.keys() - theirs.keys()):
        yield Finding(
            "wrong",
            f"{about}: {len(extra)} records that an undisturbed run has not, the first {extra[0]}",
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
            f"{about}: {len(differ)} values differ from an undisturbed run's, the first {first}",
            len(differ),
        )


def _files(about: str, store: Store, trial: str, wanted: set[tuple[int, str]]) -> Iterator[Finding]:
    """The trial's folder describes it wholly, without the ledger."""
    try:
        if store.result(trial) is None:
            yield Finding("lost", f"{about}: no result in its folder {trial}")
    except Damaged as error:
        yield Finding("lost", f"{about}: {error}")
    there = {
        (event["step"], name) for event in store.events(trial, strict=False) for name in event["metrics"]
    }
    if missing := sorted(wanted - there):
        yield Finding(
            "lost",
            f"{about}: {len(missing)} records in its folder {trial}, the first {missing[0]}",
            len(missing),
        )
    if (store.folder(trial) / "checkpoint.pt").exists():
        yield Finding("wrong", f"{about}: a checkpoint is left in its folder {trial}")


def _attempts(book: Ledger) -> Iterator[Finding]:
    """Every attempt ended, and at most one of a trial's ended with its result."""
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
    """What an attempt did again of the one before it: steps, and the seconds that these had taken."""

    trial: str
    steps: int
    seconds: float
    slack: float
    """The longest time between two records there: what may have been done and was not recorded."""


def repeats(state: Path) -> Iterator[Repeat]:
    """What was computed again in all trial folders, from the records' own times."""
    for folder in sorted((state / "trials").iterdir()):
        files = sorted(folder.glob("events-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
        attempts = [[*_events(path)] for path in files]
        attempts = [events for events in attempts if events]
        for before, after in itertools.pairwise(attempts):
            resumed = after[0].get("resumed", 0)
            again = [event for event in before if event["step"] > resumed]
            if again:
                kept = max(
                    (event["time"] for event in before if event["step"] <= resumed), default=again[0]["time"]
                )
                gaps = (later["time"] - earlier["time"] for earlier, later in itertools.pairwise(before))
                yield Repeat(
                    folder.name, again[-1]["step"] - resumed, again[-1]["time"] - kept, max(gaps, default=0.0)
                )


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """An attempt's events, without lines that were corrupted."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        with suppress(ValueError):
            yield parsed(line + b"\n", path.parent.name)


# The pictures


def study(folder: Path) -> Iterator[Finding]:
    """Optuna's study shows every arm once, told with the mean of its seeds."""
    from ablate.execution.search import shown

    book = Ledger(folder / "ledger.db", readonly=True)
    metric = json.loads(book.fact("metric"))["name"]
    finals: dict[int, list[float]] = {}
    for row in book.members():
        if row["optuna"] is not None:
            finals.setdefault(row["optuna"], []).append(book.last_values(row["trial"])[metric])
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


class Tracker:
    """An MLflow server, asked by REST."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **query: Any) -> dict[str, Any]:
        """GET."""
        with urllib.request.urlopen(
            f"{self.address}/api/2.0/mlflow/{path}?{urlencode(query)}", timeout=60
        ) as answer:
            return json.load(answer)

    def search(self, experiment: str) -> list[dict[str, Any]]:
        """All runs of an experiment, deleted ones too."""
        body = {"experiment_ids": [experiment], "max_results": 10_000, "run_view_type": "ALL"}
        data = json.dumps(body).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.address}/api/2.0/mlflow/runs/search", data, kind)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer).get("runs", [])

    def history(self, run: str, key: str) -> Counter:
        """(step, value, milliseconds) of a metric."""
        points = self.ask("metrics/get-history", run_id=run, metric_key=key, max_results=_PAGE).get(
            "metrics", []
        )
        return Counter(
            (int(point.get("step", 0)), float(point["value"]), int(point["timestamp"])) for point in points
        )

    def files(self, run: str) -> set[str]:
        """Names of a run's artifacts."""
        return {file["path"] for file in self.ask("artifacts/list", run_id=run).get("files", [])}


def mlflow(tracker: Tracker, folder: Path) -> Iterator[Finding]:
    """One run a member and one for the sweep, all finished, whole, and with the ledger's records and times,
    each once.
    """
    experiment = tracker.ask("experiments/get-by-name", experiment_name=folder.name)["experiment"][
        "experiment_id"
    ]
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in tracker.search(experiment):
        if run["info"].get("lifecycle_stage") == "deleted" and _tags(run).get("ablate.status") == "replaced":
            continue  # of records that were put aside; another run shows those that came in their place
        runs.setdefault(_tags(run).get("ablate.member", "the sweep"), []).append(run)
        if run["info"]["status"] != "FINISHED":
            yield Finding("wrong", f"MLflow: {run['info']['run_name']} is {run['info']['status']}")
    book = Ledger(folder / "ledger.db", readonly=True)
    wanted = {f"{row['arm']}/{row['seed']}": row for row in book.members()}
    for member in sorted({*wanted, "the sweep", *runs}):
        found = runs.get(member, [])
        if len(found) != 1:
            yield Finding(
                "twice" if found else "lost", f"MLflow: {len(found)} runs of {member}", max(1, len(found) - 1)
            )
        for run in found:
            yield from _whole(
                tracker, run, {"spec.json", "result.json"} if member in wanted else {"experiment.yaml"}
            )
            if member in wanted:
                yield from _histories(tracker, run, book, wanted[member])
    book.close()


def _tags(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}


def _whole(tracker: Tracker, run: dict[str, Any], files: set[str]) -> Iterator[Finding]:
    about, params = (
        f"MLflow: {run['info']['run_name']}",
        {param["key"] for param in run["data"].get("params", [])},
    )
    if "spec.json" in files and not {"arm", "seed", "data", "recipe.schedule"} <= params:
        yield Finding("lost", f"{about} has {len(params)} params, and not all")
    if missing := files - tracker.files(run["info"]["run_id"]):
        yield Finding("lost", f"{about} has no {sorted(missing)}", len(missing))


def _histories(tracker: Tracker, run: dict[str, Any], book: Ledger, member: sqlite3.Row) -> Iterator[Finding]:
    wanted: dict[str, Counter] = {}
    for step, key, value, moment in book.records(member["trial"]):
        if parse(key).for_tracker:
            wanted.setdefault(key, Counter())[step, value, int(moment * 1000)] += 1
    for key, points in wanted.items():
        drawn = tracker.history(run["info"]["run_id"], key)
        about = f"MLflow: {run['info']['run_name']} {key}"
        if missing := points - drawn:
            yield Finding(
                "lost",
                f"{about}: {missing.total()} of {points.total()} points, the first {min(missing)}",
                missing.total(),
            )
        if extra := drawn - points:
            yield Finding(
                "twice",
                f"{about}: {extra.total()} points that the ledger has not, the first {min(extra)}",
                extra.total(),
            )
