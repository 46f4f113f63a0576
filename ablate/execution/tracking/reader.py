"""Import of a sweep from MLflow: arms, members, statuses, records that were sent, facts.

MLflow does not have per-layer series, attempts, or the order of records for one step, so these are missing.
"""

import json
import math
import os
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from ablate.errors import InputError, nearest, redact
from ablate.execution.messages import Event
from ablate.execution.tracking.database import revision
from ablate.execution.tracking.login import plainly
from ablate.experiment.roles import Role
from ablate.files import Json
from ablate.store.databases import open_readonly, path_of
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED
from ablate.training.metric_names import DAMAGE, GAP, parse

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

LOOK_SECONDS = 5.0
_RUNS_A_PAGE = 200
_AT_ONCE = 4


def fetch(uri: str, sweep: str, path: Path) -> Ledger:
    """Make a ledger at `path` from the MLflow experiment of this name, and open it.

    Raises:
        InputError: in one sentence, if the file exists, if there is no such experiment, or if MLflow cannot
            be read.
    """
    if path.exists():
        raise InputError(f"{path}: is there already; nothing was fetched")
    with errors_explained(uri):
        look(uri)
        from mlflow import MlflowClient

        client = MlflowClient(uri)
        parent, members = _runs(client, uri, sweep)
        described = json.loads(_artifact(client, parent, "sweep.json") or "null")
        if described is None:
            raise InputError(
                f"{redact(uri)}: {sweep} has no sweep.json:"
                f" `ablate sync {sweep} --rebuild` on the machine that ran it writes it again"
            )
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.unlink(missing_ok=True)
        book = Ledger(unfinished)
        _fill(book, client, _Sweep(described, parent, members))
        book.close()
        unfinished.rename(path)
    return Ledger(path)


@contextmanager
def errors_explained(uri: str) -> Iterator[None]:
    """Convert errors of MLflow within the block to InputError, in one sentence and without passwords."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not isinstance(error, _errors()):
            raise
        first = plainly(error) or next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        hint = (
            f"; `{Path(sys.executable).parent / 'mlflow'} db upgrade` brings it up to date"
            if "out-of-date" in first
            else ""
        )
        raise InputError(
            redact(
                f"{redact(uri)}: MLflow cannot be used there: {first.partition(' Take a backup')[0]}{hint}",
                uri,
            )
        ) from error


def _errors() -> tuple[type[Exception], ...]:
    """Return the classes of MLflow's errors; they are imported only once there is an error."""
    from alembic.util.exc import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    # requests' are OSErrors
    return OSError, sqlite3.Error, MlflowException, SQLAlchemyError, CommandError


def look(uri: str) -> None:
    """Raise InputError if a SQLite store cannot be opened. MLflow would create a missing one, and retry a
    locked one for minutes.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    path = path_of(uri)
    if path is None:
        return
    if not path.exists():
        raise InputError(f"{path}: no such file")
    db = open_readonly(path, LOOK_SECONDS)
    try:
        revision(db)
    except sqlite3.DatabaseError as error:
        why = "is no database of MLflow's" if "no such table" in str(error) else f"cannot be read: {error}"
        raise InputError(f"{path}: {why}") from None
    finally:
        db.close()


class _ArmDescription(TypedDict):
    """One arm in sweep.json."""

    name: str
    knobs: dict[str, Json]
    against: str | None
    """Name of its baseline; None if it is one."""
    optuna: int | None
    role: Role
    reason: str | None
    trials: dict[str, str]
    """Id of its trial by seed."""


class _TrialDescription(TypedDict):
    """One trial in sweep.json."""

    reason: str | None
    seconds: float | None


class _Description(TypedDict):
    """Content of sweep.json, which `runs.description` writes."""

    facts: dict[str, str | None]
    arms: list[_ArmDescription]
    trials: dict[str, _TrialDescription]


class _Sweep:
    """Sweep as MLflow has it: the description in its parent run, and the runs of its members."""

    def __init__(self, described: _Description, parent: "Run", runs: "list[Run]") -> None:
        self.facts = {key: value for key, value in described["facts"].items() if value is not None}
        self.trials = described["trials"]
        self.arms = described["arms"]
        self.runs: dict[tuple[str, str, str], Run] = {}
        """Latest run by arm, seed and trial, in order of their starts."""
        for run in sorted(runs, key=lambda run: run.info.start_time):
            self.runs.pop(_key(run), None)  # a key that is assigned again would keep its first position
            self.runs[_key(run)] = run
        if parent.info.status == "RUNNING":  # what was wanted since it began
            self._add_new()

    def _add_new(self) -> None:
        known = {arm["name"]: arm for arm in self.arms}
        for name, seed, trial in self.runs:
            tags = self.runs[name, seed, trial].data.tags
            optuna = tags.get("ablate.optuna_trial")
            new: _ArmDescription = {
                "name": name,
                "knobs": json.loads(tags["ablate.knobs"]),
                "against": tags.get("ablate.against"),
                "optuna": None if optuna is None else int(optuna),
                "role": cast("Role", tags["ablate.role"]),
                "reason": None,
                "trials": {},
            }
            arm = known.setdefault(name, new)
            arm["trials"][seed] = trial
        self.arms = list(known.values())


def _key(run: "Run") -> tuple[str, str, str]:
    tags = run.data.tags
    return tags["ablate.arm"], tags["ablate.seed"], tags["ablate.trial"]


def _runs(client: "MlflowClient", uri: str, sweep: str) -> "tuple[Run, list[Run]]":
    """Return the sweep's latest parent run, and the runs of its members."""
    experiment = client.get_experiment_by_name(sweep)
    if experiment is None:
        names = sorted(found.name for found in client.search_experiments() if found.name != "Default")
        hint = nearest(sweep, names) if names else "it has none"
        raise InputError(f"{redact(uri)}: no experiment {sweep!r}; {hint}")
    parents = _search(client, experiment.experiment_id, "tags.`ablate.kind` = 'sweep'")
    if not parents:
        raise InputError(f"{redact(uri)}: {sweep} is no sweep: no run of it is tagged `ablate.kind` = sweep")
    parent = max(parents, key=lambda run: run.info.start_time)
    return parent, _search(
        client, experiment.experiment_id, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    )


def _search(client: "MlflowClient", experiment: str, wanted: str) -> "list[Run]":
    found: list[Run] = []
    page = None
    while True:
        runs = client.search_runs([experiment], wanted, max_results=_RUNS_A_PAGE, page_token=page)
        found, page = [*found, *runs], runs.token
        if not page:
            return found


def _artifact(client: "MlflowClient", run: "Run", name: str) -> str | None:
    """Return a text artifact of a run, None if it has none of this name."""
    if not any(item.path == name for item in client.list_artifacts(run.info.run_id)):
        return None
    with tempfile.TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run.info.run_id, name, folder)).read_text()


# Into the ledger


def _fill(book: Ledger, client: "MlflowClient", sweep: _Sweep) -> None:
    book.describe(**sweep.facts)
    numbers: dict[str | None, int] = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for arm in sorted(
            sweep.arms, key=lambda arm: arm["against"] is not None
        ):  # a baseline has its number first
            against = numbers.get(arm["against"])
            number = book.add_arm(
                arm["name"], arm["knobs"], against, arm["optuna"], arm["role"], reason=arm["reason"]
            )
            numbers[arm["name"]] = number
        for place, arm in enumerate(sweep.arms):
            book.move_arm(numbers[arm["name"]], place)
        wanted = [(arm["name"], seed, trial) for arm in sweep.arms for seed, trial in arm["trials"].items()]
        read = pool.map(
            lambda key: _read(client, sweep.runs[key]) if key in sweep.runs else ("{}", []), wanted
        )
        for (name, seed, trial), (spec, events) in zip(wanted, read, strict=True):
            number = book.add_member(numbers[name], int(seed), trial, spec)
            run = sweep.runs.get((name, seed, trial))
            if run is not None:
                ending = sweep.trials.get(trial)
                tags = run.data.tags
                book.record(number, events)
                if book.status(number) in FINISHED and tags["ablate.status"] not in FINISHED:
                    continue  # the run of an arm that shares the trial has its end; this one's was never sent
                book.settle(
                    number,
                    tags["ablate.status"],
                    ending and ending.get("reason"),
                    ending and ending.get("seconds"),
                    tags["ablate.reused"] == "true",
                )


def _read(client: "MlflowClient", run: "Run") -> tuple[str, list[Event]]:
    """Return a member's spec, as far as it was sent, and its records."""
    tags = run.data.tags
    known = {
        "seed": int(tags["ablate.seed"]),
        "engine": tags["ablate.engine"],
        "device": tags["ablate.device"],
    }
    spec = _artifact(client, run, "spec.json")
    keys = [key for key in run.data.metrics if parse(key).family not in (GAP, DAMAGE)]
    points = (point for key in keys for point in client.get_metric_history(run.info.run_id, key))
    events = [
        {"step": point.step, "time": point.timestamp / 1000, "metrics": {point.key: _value(point.value)}}
        for point in points
    ]
    return spec or json.dumps(known), events


def _value(value: float) -> float:
    """Return a metric's value. MLflow's tables have no infinity and store the largest float instead."""
    return math.copysign(math.inf, value) if abs(value) >= sys.float_info.max else value
