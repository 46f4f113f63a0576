"""Operations on MLflow, as an interface of plain data, and their form for any MLflow.

The projection needs few operations: create a run, add records, end it. `Writer` names them without MLflow's
classes, so that a database on this machine can be written without importing MLflow (`local_database`), which
takes seconds. `ClientWriter` uses MLflow's own client, for servers and for databases of other versions.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

_RUNS_A_PAGE = 200


class Point(NamedTuple):
    """One value of a metric."""

    name: str
    value: float
    time_ms: int
    step: int


@dataclass(frozen=True)
class Entries:
    """Values, params and tags that are added to a run at once."""

    points: Sequence[Point] = ()
    params: Sequence[tuple[str, str]] = ()
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run in MLflow."""

    id: str
    start_ms: int
    artifacts: str
    """URI of the folder of its artifacts."""
    experiment: str
    """Id of its experiment."""


@dataclass(frozen=True)
class Child:
    """A member's run in MLflow, and the tags by which the member and its trial are recognised."""

    run: str
    member: str | None
    trial: str | None


class Writer(Protocol):
    """Operations on one MLflow database or server. All raise an exception if MLflow cannot be written."""

    def batch(self) -> AbstractContextManager[None]:
        """Return a context whose writes are stored together, if that is possible."""

    def experiment(self, name: str, location: str | None, tags: Mapping[str, str]) -> str:
        """Return the id of an experiment by its name; create it with this place of artifacts if there is
        none, and restore one that a user has deleted.
        """

    def tagged(self, experiment: str, key: str, value: str) -> str | None:
        """Return a run of an experiment that has this tag, None if there is none."""

    def children(self, experiment: str, parent: str) -> Iterator[list[Child]]:
        """Yield the runs below a parent run, a page at a time, those that started last first."""

    def has(self, run: str) -> bool:
        """Return True if there is such a run, and it is not deleted."""

    def discard(self, experiment: str, parent: str, trial: str, member: str, before_ms: int) -> None:
        """Delete the runs of a trial below a parent run that started before a moment; only those of one
        member if `member` is not empty.
        """

    def create(self, experiment: str, name: str, tags: Mapping[str, str]) -> Run:
        """Create a run that is running from now on."""

    def run(self, run: str) -> Run:
        """Return a run by its id."""

    def log(self, run: str, entries: Entries) -> None:
        """Add entries to a run. A value or a param that the run has already is stored once; a tag is
        replaced.
        """

    def dataset(self, run: str, dataset: Mapping[str, str]) -> None:
        """Add training data as an input of a run, once. `dataset`: fields of MLflow's Dataset."""

    def resume(self, run: str) -> None:
        """Set a run's status to RUNNING."""

    def end(self, run: str, status: str, end_ms: int | None = None) -> None:
        """Set a run's final status and the time of its end, which is now by default."""

    def experiment_tag(self, experiment: str, key: str, value: str) -> None:
        """Set a tag of an experiment."""

    def text(self, run: str, text: str, name: str) -> None:
        """Store a text as an artifact of a run."""

    def files(self, run: Run, paths: Sequence[Path]) -> None:
        """Store files as artifacts of a run."""

    def tree(self, run: Run, folder: Path, name: str) -> None:
        """Store all files of a folder, at any depth, as artifacts of a run below `name`."""

    def note(self, run: str) -> str:
        """Return the description of a run, empty if it has none."""


NOTE = "mlflow.note.content"
"""Tag with the description of a run."""


def import_client() -> None:
    """Import MLflow's client, which takes seconds, with the settings that it reads then."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A retry would create a second run if the answer to the first call was lost.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # MLflow would print the address with its password.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow  # noqa: F401


class ClientWriter:
    """Operations by MLflow's own client."""

    def __init__(self, uri: str) -> None:
        """`uri`: address of a server or of a database."""
        import_client()
        from mlflow import MlflowClient

        self._uri, self._client = uri, MlflowClient(uri)

    def batch(self) -> AbstractContextManager[None]:
        """Return a context without effect: each call of MLflow's client is stored on its own."""
        return nullcontext()

    def experiment(self, name: str, location: str | None, tags: Mapping[str, str]) -> str:
        """Return the id of an experiment by its name; create or restore it if needed."""
        known = self._client.get_experiment_by_name(name)
        if known is None:
            return self._client.create_experiment(name, artifact_location=location, tags=dict(tags))
        if known.lifecycle_stage == "deleted":  # by a user, in MLflow's pages
            self._client.restore_experiment(known.experiment_id)
        return known.experiment_id

    def tagged(self, experiment: str, key: str, value: str) -> str | None:
        """Return a run of an experiment that has this tag, None if there is none."""
        runs = self._client.search_runs([experiment], f"tags.`{key}` = '{value}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def children(self, experiment: str, parent: str) -> Iterator[list[Child]]:
        """Yield the runs below a parent run, a page at a time, those that started last first."""
        wanted, order = f"tags.`mlflow.parentRunId` = '{parent}'", ["attributes.start_time DESC"]
        page = None
        while True:
            runs = self._client.search_runs([experiment], wanted, 1, _RUNS_A_PAGE, order, page)
            yield [
                Child(run.info.run_id, run.data.tags.get("ablate.member"), run.data.tags.get("ablate.trial"))
                for run in runs
            ]
            page = runs.token
            if not page:
                return

    def has(self, run: str) -> bool:
        """Return True if there is such a run, and it is not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def discard(self, experiment: str, parent: str, trial: str, member: str, before_ms: int) -> None:
        """Delete the runs of a trial below a parent run that started before a moment."""
        of_member = f" AND tags.`ablate.member` = '{member}'" if member else ""
        for run in self._client.search_runs([experiment], f"tags.`ablate.trial` = '{trial}'{of_member}"):
            if run.data.tags.get("mlflow.parentRunId") == parent and run.info.start_time < before_ms:
                self._client.set_tag(run.info.run_id, "ablate.status", "replaced")
                self._client.delete_run(run.info.run_id)

    def create(self, experiment: str, name: str, tags: Mapping[str, str]) -> Run:
        """Create a run that is running from now on."""
        info = self._client.create_run(experiment, tags=dict(tags), run_name=name).info
        return Run(info.run_id, info.start_time, info.artifact_uri, info.experiment_id)

    def run(self, run: str) -> Run:
        """Return a run by its id."""
        info = self._client.get_run(run).info
        return Run(info.run_id, info.start_time, info.artifact_uri, info.experiment_id)

    def log(self, run: str, entries: Entries) -> None:
        """Add entries to a run."""
        from mlflow.entities import Metric, Param, RunTag

        self._client.log_batch(
            run,
            [Metric(point.name, point.value, point.time_ms, point.step) for point in entries.points],
            [Param(key, value) for key, value in entries.params],
            [RunTag(key, value) for key, value in entries.tags.items()],
        )

    def dataset(self, run: str, dataset: Mapping[str, str]) -> None:
        """Add training data as an input of a run, once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tags = [InputTag("mlflow.data.context", "training")]
        self._client.log_inputs(run, [DatasetInput(Dataset(**dataset), tags)])

    def resume(self, run: str) -> None:
        """Set a run's status to RUNNING."""
        self._client.update_run(run, status="RUNNING")

    def end(self, run: str, status: str, end_ms: int | None = None) -> None:
        """Set a run's final status and the time of its end, which is now by default."""
        self._client.set_terminated(run, status, end_ms)

    def experiment_tag(self, experiment: str, key: str, value: str) -> None:
        """Set a tag of an experiment."""
        self._client.set_experiment_tag(experiment, key, value)

    def text(self, run: str, text: str, name: str) -> None:
        """Store a text as an artifact of a run."""
        self._client.log_text(run, text, name)

    def files(self, run: Run, paths: Sequence[Path]) -> None:
        """Store files as artifacts of a run."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        artifacts = get_artifact_repository(run.artifacts, tracking_uri=self._uri)
        for path in paths:
            artifacts.log_artifact(str(path))

    def tree(self, run: Run, folder: Path, name: str) -> None:
        """Store all files of a folder as artifacts of a run below `name`."""
        self._client.log_artifacts(run.id, str(folder), name)

    def note(self, run: str) -> str:
        """Return the description of a run, empty if it has none."""
        return self._client.get_run(run).data.tags.get(NOTE, "")
