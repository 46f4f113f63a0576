"""Runs of an MLflow store that others wrote: their params, tags, metrics with all steps, and status."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import InputError, nearest, one_line, redact
from ablate.execution.tracking.access import errors_explained, look, open_client
from ablate.files import Json

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUNS_A_PAGE = 200
_STATUS = {"FINISHED": "done", "RUNNING": "running", "SCHEDULED": "running"}


@dataclass(frozen=True)
class StoredRun:
    """One run of MLflow."""

    name: str
    config: dict[str, Json]
    """Its params, and its tags except MLflow's own."""
    scalars: list[tuple[int, str, float]]
    """Step, metric and value, in the order of time."""
    status: str
    """`done`, `running`, or the word of MLflow: `failed`, `killed`."""


@contextmanager
def _variables_kept() -> Iterator[None]:
    """Restore MLflow's environment variables, which the process of a user's Python needs as they were."""
    before = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("MLFLOW_") and name not in before]:
            del os.environ[name]
        os.environ.update(before)


@_variables_kept()
def stored_runs(uri: str, experiment: str | None) -> tuple[str, list[StoredRun]]:
    """Return the name of an experiment and its runs. `uri`: address of a server or database, or a folder
    `mlruns`; `experiment` None: the only one that has runs. InputError if MLflow cannot be read there, or
    there is no such experiment, or several have runs."""
    if "://" not in uri:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 reads folders only if asked
    with errors_explained(uri):
        look(uri)
        client = open_client(uri if "://" in uri else Path(uri).resolve().as_uri())
        runs = {one.name: [*_runs(client, one.experiment_id)] for one in client.search_experiments()}
    if experiment is not None:
        if experiment not in runs:
            raise InputError(
                f"{redact(uri)}: no experiment {one_line(experiment)!r}; {nearest(experiment, runs)}"
            )
        return experiment, runs[experiment]
    full = [name for name, stored in runs.items() if any(run.scalars for run in stored)]
    if len(full) != 1:
        listed = ", ".join(map(one_line, full)) if full else "none has runs with metrics"
        raise InputError(f"{redact(uri)}: name an experiment, {redact(uri)}#NAME: {listed}")
    return full[0], runs[full[0]]


def _runs(client: "MlflowClient", experiment: str) -> Iterator[StoredRun]:
    token: str | None = None
    while True:
        page = client.search_runs(
            [experiment], max_results=_RUNS_A_PAGE, order_by=["attributes.start_time ASC"], page_token=token
        )
        for run in page:
            points = [
                (point.timestamp, point.step, name, _value(point.value))
                for name in run.data.metrics
                for point in client.get_metric_history(run.info.run_id, name)
            ]
            tags = {key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")}
            yield StoredRun(
                run.info.run_name or run.info.run_id,
                {**tags, **run.data.params},
                [(step, name, value) for _, step, name, value in sorted(points, key=lambda one: one[:2])],
                _STATUS.get(run.info.status, run.info.status.lower()),
            )
        token = page.token
        if not token:
            return


def _value(value: float) -> float:
    """Return a value with infinities, for which MLflow's databases hold the largest number."""
    return value if abs(value) < sys.float_info.max else value * 2
