"""Projection of one sweep's ledger into MLflow, by one background thread; no trial ever waits for it.

MLflow may be slow, unreachable or deleted, and a sweep must not depend on it. The thread therefore reads the
ledger, sends what MLflow lacks, and reports what it has sent; the controller stores that, since it alone
writes the ledger. A server's failure only increases the number of records that MLflow is behind.

A sweep is one MLflow experiment with one parent run; each member (arm and seed) is a child run. For example,
2 arms on 3 seeds give 1 parent and 6 child runs, and a trial that two sweeps use appears in both.

Records keep their own time stamps, so that sending one twice stores it once. Runs that were created but never
recorded, because a process died in between, are found by their tags and used again. The projector never reads
results back, and stops with `forgotten` set if the runs that the ledger names are gone.
"""

import json
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from ablate.errors import redact
from ablate.execution.tracking import database, runs
from ablate.execution.tracking.login import plainly
from ablate.experiment import schema
from ablate.files import lock
from ablate.results.databases import path_of, set_journal
from ablate.results.ledger import DATA, Ledger
from ablate.results.ledger_progress import unshipped_records
from ablate.results.ledger_rows import Member
from ablate.results.trial_store import Store
from ablate.training.workloads import unit

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunInfo

_TERMINAL = {
    "done": "FINISHED",
    "diverged": "FINISHED",
    "failed": "FAILED",
    "oom": "FAILED",
    "stopped": "KILLED",
    "pruned": "KILLED",
}
_METRICS_A_BATCH = 1000  # MLflow's limit
_RUNS_A_PAGE = 200
_INTERVAL = 1.0
RETRY_SECONDS = 5.0
_VIEW_TAG = f"mlflow.sharedViewState.{runs.VIEW}"


@dataclass(frozen=True)
class Shipped:
    """Progress of one member's run, for the ledger: the step up to which it is complete, and True in `closed`
    if it has ended.
    """

    arm: int
    seed: int
    run: str
    step: int
    closed: bool


def behind(ledger: Ledger) -> int:
    """Return the number of records that MLflow should show and does not have."""
    metrics = json.loads(ledger.fact("metrics") or "[]")
    return unshipped_records(ledger, lambda name: runs.shown(name, metrics))


class Projector:
    """Background thread that writes one sweep's ledger to MLflow. The controller reads `news` and writes it
    to the ledger.
    """

    def __init__(self, uri: str, state: Path, ledger: Path, sweep: str, facts: Mapping[str, str]) -> None:
        self.news: queue.SimpleQueue[Shipped] = queue.SimpleQueue()
        self.parent: str | None = None
        self.experiment: str | None = None
        """Id of the sweep's experiment in MLflow."""
        self.forgotten = False
        """True if MLflow lacks runs that the ledger names: this projector has ended, and everything has to be
        sent again.
        """
        self.discarded: tuple[tuple[str, int, str], ...] = ()
        """Entries of the ledger's `discarded` whose runs were deleted in MLflow."""
        self.trouble: str | None = None
        """Reason for MLflow's delay; None while there is none."""
        self.behind = 0
        """Number of records that MLflow lacks while there is trouble."""
        self._uri, self._state, self._ledger_path, self._sweep, self._facts = (
            uri,
            state,
            ledger,
            sweep,
            dict(facts),
        )
        self._metric = schema.Metric.model_validate_json(facts.get("metric") or "{}").name
        self._metrics = json.loads(facts.get("metrics") or "[]")
        self._shipped: dict[tuple[int, int], Shipped] = {}
        self._orphans: dict[tuple[str | None, str | None], str] = {}
        """Runs that were created and never recorded, because the controller or the server died; by member and
        trial.
        """
        self._made: dict[str, RunInfo] = {}
        """RunInfo of runs created here, which saves a call each."""
        self._finish: tuple[str, str] | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def finish(self, status: str, note: str, seconds: float) -> bool:
        """Send the rest and close the parent run.

        Args:
            status: MLflow's status of the parent run.
            note: description of the parent run, in Markdown.
            seconds: longest time to wait.

        Returns:
            True if everything was sent in time.
        """
        self._finish = (status, note)
        self._wake.set()
        self._thread.join(seconds)
        self._stop.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        ledger = Ledger(self._ledger_path, readonly=True)
        client = None
        # Importing MLflow and creating its database would delay the first trial.
        while not (self._finish or ledger.recorded()):
            self._wake.wait(_INTERVAL)
        while not self._stop.is_set():
            try:
                client = client or self._connect(ledger)
                last = self._finish
                self._ship(client, ledger)
                self.trouble = None
                if last:
                    self._close(client, ledger, *last)
                    break
            except Exception as error:  # must not end the sweep: shown in the status line, tried again
                first = shorten((str(error).splitlines() or [""])[0], 120, placeholder=" ...")
                why = plainly(error) or f"{type(error).__name__}: {first}"
                self.trouble, self.behind = redact(why, self._uri), behind(ledger)
                client = None  # connecting again finds a run whose creation was not answered
                self._stop.wait(RETRY_SECONDS)
            self._wake.wait(_INTERVAL)
            self._wake.clear()
        ledger.close()

    def _connect(self, ledger: Ledger) -> "MlflowClient":
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # A retry would create a second run if the answer to the first call was lost.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        # MLflow would print the address with its password.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow import MlflowClient

        with lock(database.lock_path(self._uri, self._state)):
            database.prepare(self._uri, self._state / "artifacts")
            client = MlflowClient(self._uri)
            self.experiment = self._experiment_id(client)
            self._wait_less()
        noted = self.parent or self._facts.get("mlflow_parent")
        known = noted or self._find_parent(client)
        if known and not self._has(client, known):
            self.forgotten, self.parent = True, None
            self._stop.set()
            raise LookupError("MLflow does not have this sweep's runs any more")
        parent = known or self._new_parent(client)
        if not noted:
            self._describe(client, parent, ledger)
        self.parent = parent  # recorded only when it is complete
        if known:
            client.update_run(parent, status="RUNNING")
            self._discard(client, ledger)
            self._orphans = self._find_orphans(
                client, ledger.mlflow_runs() | {member.run for member in self._shipped.values()}
            )
        return client

    def _has(self, client: "MlflowClient", run: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return client.get_run(run).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _discard(self, client: "MlflowClient", ledger: Ledger) -> None:
        """Delete the runs in MLflow of results that were put aside; new runs replace them."""
        done = []
        for trial, moment, member in ledger.discarded():
            of_member = f" AND tags.`ablate.member` = '{member}'" if member else ""
            runs = client.search_runs([self.experiment], f"tags.`ablate.trial` = '{trial}'{of_member}")
            for run in runs:
                if run.data.tags.get("mlflow.parentRunId") == self.parent and run.info.start_time < moment:
                    client.set_tag(run.info.run_id, "ablate.status", "replaced")
                    client.delete_run(run.info.run_id)
            done.append((trial, moment, member))
        self.discarded = tuple(done)

    def _wait_less(self) -> None:
        """Set the journal mode of our own database: one disk wait per transaction instead of four, and
        readers beside the writer.
        """
        own = (self._state / "mlflow.db").resolve()
        if path_of(self._uri) == own:
            with closing(sqlite3.connect(own)) as db:
                set_journal(db, own)

    def _experiment_id(self, client: "MlflowClient") -> str:
        known = client.get_experiment_by_name(self._sweep)
        if known is not None:
            if known.lifecycle_stage == "deleted":  # by a user, in MLflow's pages
                client.restore_experiment(known.experiment_id)
            return known.experiment_id
        local = path_of(self._uri) is not None
        location = (self._state / "artifacts" / self._sweep).resolve().as_uri() if local else None
        # Without this kind the experiment's page opens on traces of language models.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return client.create_experiment(self._sweep, artifact_location=location, tags=kind)

    def _find_parent(self, client: "MlflowClient") -> str | None:
        """Return this sweep's parent run if an earlier controller created it and died before recording it."""
        runs = client.search_runs(
            [self.experiment], f"tags.`ablate.sweep_id` = '{self._facts['sweep_id']}'", max_results=1
        )
        return runs[0].info.run_id if runs else None

    def _find_orphans(
        self, client: "MlflowClient", noted: set[str]
    ) -> dict[tuple[str | None, str | None], str]:
        """Return created but unrecorded runs. They are among the latest, so stop at the first page without
        any.
        """
        orphans: dict[tuple[str | None, str | None], str] = {}
        page = None
        while True:
            wanted = f"tags.`mlflow.parentRunId` = '{self.parent}'"
            runs = client.search_runs(
                [self.experiment], wanted, 1, _RUNS_A_PAGE, ["attributes.start_time DESC"], page
            )
            new = [run for run in runs if run.info.run_id not in noted]
            orphans |= {
                (run.data.tags.get("ablate.member"), run.data.tags.get("ablate.trial")): run.info.run_id
                for run in new
            }
            page = runs.token
            if not (new and page):
                return orphans

    def _new_parent(self, client: "MlflowClient") -> str:
        tags = {
            "ablate.kind": "sweep",
            "ablate.sweep_id": self._facts["sweep_id"],
            "ablate.sweep": self._sweep,
            "mlflow.note.content": self._facts.get("question", ""),
        }
        return client.create_run(self.experiment, tags=tags, run_name=self._sweep).info.run_id

    def _describe(self, client: "MlflowClient", parent: str, ledger: Ledger) -> None:
        for name in ("experiment.yaml", "provenance.json", "uncommitted.diff"):
            if self._facts.get(name):
                client.log_text(parent, self._facts[name], name)
        self._overview(client, parent, ledger)

    def _overview(self, client: "MlflowClient", parent: str | None, ledger: Ledger) -> None:
        """Write the current description of the sweep, from which it can be imported, and the saved view of
        its runs.
        """
        client.log_text(parent, runs.description(ledger), "sweep.json")
        metric = schema.Metric.model_validate_json(ledger.fact("metric") or "{}")
        knobs = dict.fromkeys(knob for arm in ledger.arms() for knob in json.loads(arm.knobs))
        counted = next((unit(member.spec, metric.name) for member in ledger.members()), "")
        minimize, now = metric.direction == "minimize", int(time.time() * 1000)
        gaps = runs.gap_names(ledger, counted)
        shown = runs.view(knobs, metric.name, self._metrics or [metric.name], gaps, minimize, now)
        if shown:
            client.set_experiment_tag(self.experiment, _VIEW_TAG, shown)

    def _ship(self, client: "MlflowClient", ledger: Ledger) -> None:
        """Bring the run of every unfinished member up to date with the ledger."""
        for member in ledger.to_ship():
            key = (member.arm, member.seed)
            known = self._shipped.get(key) or Shipped(*key, member.mlflow or "", member.shipped, closed=False)
            if self._stop.is_set():
                return
            if known.closed:
                continue
            now = self._draw(client, ledger, member, known)
            if now != known:
                self._shipped[key] = now
                self.news.put(now)

    def _draw(self, client: "MlflowClient", ledger: Ledger, member: Member, known: Shipped) -> Shipped:
        """Bring one member's run up to date in as few calls as possible: each costs a commit, or a round
        trip.
        """
        from mlflow.entities import Param, RunTag

        over, run = (
            member.status in _TERMINAL,
            known.run or self._orphans.get((member.key, member.id), ""),
        )
        begun = (known.arm, known.seed) in self._shipped
        params = [] if begun or known.step >= 0 else [Param(key, value) for key, value in runs.params(member)]
        tags = [RunTag("ablate.status", member.status)] if over and run else []
        if not run:
            run = self._create(client, member)
        elif not (begun or over):
            client.update_run(run, status="RUNNING")
        if params:
            self._data(client, ledger, run, member)
        step = known.step
        gaps = self._gaps(ledger, member, run) if over else {}
        for last, metrics in self._batches(ledger.records(member.trial, step), gaps.pop(run, [])):
            client.log_batch(run, metrics=metrics, params=params, tags=tags)
            step, params, tags = max(step, last), [], []
        if params or tags:
            client.log_batch(run, params=params, tags=tags)
        for other, metrics in gaps.items():
            if self._has(client, other):  # may have been deleted in its pages
                client.log_batch(other, metrics=metrics)
        if over:
            info = self._made.pop(run, None) or client.get_run(run).info
            self._artifacts(info.artifact_uri, member)
            lasted = member.seconds and int(1000 * member.seconds)  # of the trial, not of the upload
            client.set_terminated(run, _TERMINAL[member.status], lasted and info.start_time + lasted)
        return Shipped(known.arm, known.seed, run, step, over)

    def _gaps(self, ledger: Ledger, member: Member, run: str) -> dict[str, "list[Metric]"]:
        """Return gaps to the baseline, by run, that can be computed because this member has ended.

        Of two members that are compared, the one sent last adds the gap; sent twice, it is stored once.
        """
        from mlflow.entities import Metric

        found = {}
        for one, step, moment, metrics in runs.gaps(ledger, member, self._metric):
            own = (one.arm, one.seed) == (member.arm, member.seed)
            known = self._shipped.get((one.arm, one.seed)) or Shipped(
                one.arm, one.seed, one.mlflow or "", 0, one.closed
            )
            if own or known.closed:
                found[run if own else known.run] = [
                    Metric(name, value, int(moment * 1000), step) for name, value in metrics.items()
                ]
        return found

    def _create(self, client: "MlflowClient", member: Member) -> str:
        tags = runs.tags(member, self._sweep, self.parent, member.against)
        run = client.create_run(self.experiment, tags=tags, run_name=f"{member.name} seed={member.seed}").info
        self._made[run.run_id] = run
        return run.run_id

    def _data(self, client: "MlflowClient", ledger: Ledger, run: str, member: Member) -> None:
        """Add the member's training data as its run's input; sent twice, it is stored once."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        facts = ledger.fact(f"{DATA}{json.loads(member.spec)['data']}")
        if facts:
            dataset = Dataset(**runs.dataset(member, json.loads(facts)))
            client.log_inputs(run, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])

    def _batches(
        self, records: Iterator[tuple[int, str, float, float]], more: "list[Metric]"
    ) -> Iterator[tuple[int, "list[Metric]"]]:
        """Yield last step and metrics of as many whole steps as fit one call; `more` goes with the last."""
        from mlflow.entities import Metric

        batch: list[Metric] = []
        last = -1
        for step, found in groupby(records, key=lambda record: record[0]):
            metrics = [
                Metric(name, value, int(moment * 1000), step)
                for _, name, value, moment in found
                if runs.shown(name, self._metrics)
            ]
            if batch and len(batch) + len(metrics) + len(more) > _METRICS_A_BATCH:
                yield last, batch
                batch = []
            batch, last = batch + metrics, step
        if batch or more:
            yield last, batch + more

    def _artifacts(self, place: str, member: Member) -> None:
        """Upload the resolved spec, the result with its environment, and the trial's own artifacts."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        store = Store(self._state)
        folder = store.folder(member.id)
        artifacts = get_artifact_repository(place, tracking_uri=self._uri)
        for path in (folder / "spec.json", folder / "result.json", *store.artifacts(member.id)):
            if path.exists():
                artifacts.log_artifact(str(path))

    def _close(self, client: "MlflowClient", ledger: Ledger, status: str, note: str) -> None:
        for member in self._shipped.values():
            if not member.closed:
                client.set_terminated(member.run, "KILLED")
        self._overview(client, self.parent, ledger)
        client.set_tag(self.parent, "mlflow.note.content", note)
        client.set_terminated(self.parent, status)
