"""Projection of one sweep's ledger into MLflow.

It sends what MLflow lacks, and reports what it has sent; the controller stores that, since it alone writes
the ledger. A server's failure only increases the number of records that MLflow is behind.

A sweep is one MLflow experiment with one parent run; each member (arm and seed) is a child run. For example,
2 arms on 3 seeds give 1 parent and 6 child runs, and a trial that two sweeps use appears in both.

Records keep their own time stamps, so that sending one twice stores it once. Runs that were created but never
recorded, because a process died in between, are found by their tags and used again. Results are never read
back. `forgotten` is set if the parent run that the ledger names is gone. The next tracker then creates a new
one, and moves the child runs of a parent that a user deleted below it.
"""

import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import redact
from ablate.execution.tracking import database, runs
from ablate.execution.tracking.access import is_active, open_client, plainly
from ablate.execution.tracking.mlflow_private import close_database
from ablate.execution.tracking.tracker import Tracker
from ablate.files import lock
from ablate.store.databases import path_of
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Store
from ablate.training.metric_names import trackable

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import RunInfo

_TERMINAL = {"done": "FINISHED", "diverged": "FINISHED", "failed": "FAILED", "oom": "FAILED"}
_TERMINAL |= dict.fromkeys(("stopped", "pruned"), "KILLED")
_RECORDS_A_CALL = 10_000
"""Records that are in memory at once. MLflow's client splits them to 1,000 values a request."""
_RUNS_A_PAGE = 200
_FIRST_SECONDS = 60.0
"""Longest time that a new run's values wait for the first one of the main metric."""
_Point = tuple[int, str, float, float]
"""Step, metric, value, and time in seconds: a record of the ledger, or a gap."""
_VIEW_TAG = f"mlflow.sharedViewState.{runs.VIEW}"


@dataclass(frozen=True)
class Shipped:
    """Progress of one member's run, for the ledger: the step up to which it is complete, and True in `closed`
    if it has ended."""

    arm: int
    seed: int
    run: str
    step: int
    closed: bool


def behind(ledger: Ledger) -> int:
    """Return the number of records that MLflow should show and does not have."""
    metrics = _metrics(ledger)
    return ledger.unshipped_records(lambda name: runs.key(name, metrics) is not None)


def _metrics(ledger: Ledger) -> Sequence[str]:
    """Return the names of the experiment's metrics, the main one first."""
    main = ledger.facts.metric.name
    return [main, *(name for name in ledger.facts.metrics if name != main)]


class MlflowTracker(Tracker):
    """Projection into MLflow. The controller reads `news` and writes it to the ledger."""

    def __init__(self, uri: str, state: Path, sweep: str, identity: str, stop: threading.Event) -> None:
        """Connect to nothing yet. `identity`: unique id of the sweep's ledger. `stop` ends a refresh between
        two members, and is set here once the sweep's runs are gone."""
        self.news: queue.SimpleQueue[Shipped] = queue.SimpleQueue()
        self.parent: str | None = None
        self.experiment: str | None = None
        """Id of the sweep's experiment in MLflow."""
        self.forgotten = False
        """True if MLflow lacks runs that the ledger names: everything has to be sent again, by another
        tracker."""
        self.discarded: tuple[tuple[str, int, str], ...] = ()
        """Entries of the ledger's `discarded` whose runs were deleted in MLflow."""
        self.behind = 0
        """Number of records that MLflow lacked at the last trouble."""
        self._uri, self._state, self._sweep, self._identity = uri, state, sweep, identity
        self._metrics: Sequence[str] = ()
        self._shipped: dict[tuple[int, int], Shipped] = {}
        self._orphans: dict[tuple[str | None, str | None], str] = {}
        """Runs that were created and never recorded, because the controller or the server died; by member and
        trial."""
        self._made: dict[str, RunInfo] = {}
        """Runs created here, which saves a call each."""
        self._stop = stop
        self._client: MlflowClient | None = None
        self._path = path_of(uri)
        """File of a database of this machine."""
        self._file: tuple[int, int] | None = None
        """Identity of that file when it was opened."""

    def refresh(self, ledger: Ledger) -> None:
        """Send what MLflow lacks."""
        self._metrics = _metrics(ledger)
        if self._client is None:
            self._client = self._connect(ledger)
        self._ship(self._client, ledger)

    def finish(self, ledger: Ledger, status: str, note: str) -> None:
        """Close the runs that are open, and the parent run with the note as its description."""
        client, parent = self._client, self._id(self.parent)
        if client is None:
            raise RuntimeError("finish comes after a refresh")
        for member in self._shipped.values():
            if not member.closed and is_active(client, member.run):
                client.set_terminated(member.run, "KILLED")
        for run in {*self._orphans.values()} - {member.run for member in self._shipped.values()}:
            if is_active(client, run) and client.get_run(run).info.status == "RUNNING":
                client.set_terminated(run, "KILLED")  # of a member that is not wanted any more, or pending
        self._save_view(client, self._id(self.experiment), ledger)
        client.set_tag(parent, runs.NOTE, note)
        client.set_terminated(parent, status)
        self._release()

    def trouble(self, ledger: Ledger, error: Exception) -> str:
        """Return why MLflow cannot be written. The next refresh connects anew, which finds a run whose
        creation was not answered."""
        self._release()
        self.behind = behind(ledger)
        return redact(plainly(error) or super().trouble(ledger, error), self._uri)

    def _release(self) -> None:
        """Drop the client, and its connections to a database: its file may be replaced."""
        self._client = None
        if self._path:
            close_database(self._uri)

    def _connect(self, ledger: Ledger) -> "MlflowClient":
        own = (self._state / "mlflow.db").resolve()
        with lock(database.lock_path(self._uri, self._state)):
            database.prepare(self._uri, self._state / "artifacts")
            self._file = database.identity(self._path)
            if self._path == own:
                database.wait_less(own)  # before a client has it open, which would keep it in its mode
            client = open_client(self._uri)
            self.experiment = self._experiment_id(client, moves=self._path == own)
        noted = self.parent or ledger.facts.mlflow_parent
        # An earlier controller may have created the parent run and died before recording it.
        tag = f"tags.`ablate.sweep_id` = '{self._identity}'"
        tagged = [] if noted else client.search_runs([self.experiment], tag, max_results=1)
        known = noted or next((run.info.run_id for run in tagged), None)
        if known and not is_active(client, known):
            self.forgotten, self.parent = True, None
            self._stop.set()
            raise LookupError("MLflow does not have this sweep's run any more; a new one is created")
        if not (parent := known):
            tags = {"ablate.kind": "sweep", "ablate.sweep_id": self._identity, "ablate.sweep": self._sweep}
            tags[runs.NOTE] = ledger.facts.question
            parent = client.create_run(self.experiment, tags=tags, run_name=self._sweep).info.run_id
        if not noted:
            for name in ("experiment.yaml", "provenance.json", "uncommitted.diff"):
                if text := ledger.fact(name):
                    client.log_text(parent, text, name)
            self._save_view(client, self.experiment, ledger)
        self.parent = parent  # recorded only when it is complete
        adopted = self._adopt(client, self.experiment)
        if known:
            client.update_run(parent, status="RUNNING")
            self._discard(client, ledger)
        if known or adopted:
            noted_runs = ledger.mlflow_runs() | {member.run for member in self._shipped.values()}
            self._orphans = self._find_orphans(client, noted_runs)
        return client

    def _experiment_id(self, client: "MlflowClient", moves: bool) -> str:
        """Return the id of the sweep's experiment; create it, or restore one that a user has deleted. MLflow
        cannot move artifacts. If the database `moves` with the state folder and this has another place now,
        the experiment is renamed and deleted, and everything is sent again to a new one."""
        folder = self._state / "artifacts" / self._sweep
        location = folder.resolve().as_uri() if self._path else None
        known = client.get_experiment_by_name(self._sweep)
        if known and known.lifecycle_stage == "deleted":  # by a user, in MLflow's pages
            client.restore_experiment(known.experiment_id)
        if known and moves and known.artifact_location != location:
            client.rename_experiment(known.experiment_id, f"{self._sweep} (moved, {known.experiment_id})")
            client.delete_experiment(known.experiment_id)
            known = None
        if known:
            return known.experiment_id
        # Without this kind the experiment's page opens on traces of language models.
        kind = {"mlflow.experimentKind": "custom_model_development"}
        return client.create_experiment(self._sweep, artifact_location=location, tags=kind)

    def _adopt(self, client: "MlflowClient", experiment: str) -> bool:
        """Move the child runs of deleted parents of this sweep below the present parent; return True if there
        were any."""
        from mlflow.entities import ViewType

        wanted, adopted = f"tags.`ablate.sweep_id` = '{self._identity}'", False
        for old in client.search_runs([experiment], wanted, ViewType.DELETED_ONLY):
            if old.info.run_id == self.parent:  # deleted just now: its children would be moved without end
                raise LookupError("MLflow does not have this sweep's run any more; a new one is created")
            children = f"tags.`{runs.PARENT}` = '{old.info.run_id}'"
            while page := client.search_runs([experiment], children):  # moved ones are in no later page
                adopted = True
                for run in page:
                    client.set_tag(run.info.run_id, runs.PARENT, self._id(self.parent))
        return adopted

    def _discard(self, client: "MlflowClient", ledger: Ledger) -> None:
        """Delete the runs in MLflow of results that were put aside; new runs replace them."""
        experiment, done = self._id(self.experiment), []
        for trial, moment, member in ledger.discarded():
            of_member = f" AND tags.`ablate.member` = '{member}'" if member else ""
            for run in client.search_runs([experiment], f"tags.`ablate.trial` = '{trial}'{of_member}"):
                if run.data.tags.get(runs.PARENT) == self.parent and run.info.start_time < moment:
                    client.set_tag(run.info.run_id, "ablate.status", "replaced")
                    client.delete_run(run.info.run_id)
            done.append((trial, moment, member))
        self.discarded = tuple(done)

    def _find_orphans(
        self, client: "MlflowClient", noted: set[str]
    ) -> dict[tuple[str | None, str | None], str]:
        """Return created but unrecorded runs. They are among the latest, so stop at the first page without
        any."""
        orphans: dict[tuple[str | None, str | None], str] = {}
        wanted, order = f"tags.`{runs.PARENT}` = '{self.parent}'", ["attributes.start_time DESC"]
        token = None
        while True:
            page = client.search_runs([self._id(self.experiment)], wanted, 1, _RUNS_A_PAGE, order, token)
            new = [run for run in page if run.info.run_id not in noted]
            for run in new:
                key = run.data.tags.get("ablate.member"), run.data.tags.get("ablate.trial")
                orphans[key] = run.info.run_id
            token = page.token
            if not (new and token):
                return orphans

    @staticmethod
    def _id(known: str | None) -> str:
        """Return the id of the experiment or of the parent run, which `_connect` has set."""
        if known is None:
            raise RuntimeError("MLflow is not connected")
        return known

    def _save_view(self, client: "MlflowClient", experiment: str, ledger: Ledger) -> None:
        minimize, now = ledger.facts.metric.direction == "minimize", int(time.time() * 1000)
        parts = bool(ledger.facts.design) and "val/loss_bf16" in ledger.names().values()
        shown = runs.view(ledger.arms(), _metrics(ledger), minimize, now, parts)
        if shown:
            client.set_experiment_tag(experiment, _VIEW_TAG, shown)

    def _ship(self, client: "MlflowClient", ledger: Ledger) -> None:
        for member in ledger.to_ship():
            key = (member.arm, member.seed)
            known = self._shipped.get(key) or Shipped(*key, member.mlflow or "", member.shipped, closed=False)
            if self._stop.is_set():
                return
            if known.closed:
                continue
            if database.identity(self._path) != self._file:
                raise FileNotFoundError(f"{self._path} was deleted or replaced")
            try:
                now = self._draw(client, ledger, member, known)
            except Exception as error:
                silent = getattr(error, "error_code", "INTERNAL_ERROR") == "INTERNAL_ERROR"
                if silent or not known.run or is_active(client, known.run):
                    raise
                if not is_active(client, self._id(self.parent)):  # another MLflow, or all was deleted
                    raise
                # Deleted in MLflow's pages: it would hold up all other members, too.
                self._shipped.pop(key, None)
                now = self._draw(client, ledger, member, Shipped(*key, "", -1, closed=False))
            if now != known:
                self._shipped[key] = now
                self.news.put(now)

    def _draw(self, client: "MlflowClient", ledger: Ledger, member: Member, known: Shipped) -> Shipped:
        """Bring one member's run up to date in as few calls as possible: each costs a server a round trip."""
        over, run = (member.status in _TERMINAL, known.run or self._orphans.get((member.key, member.id), ""))
        begun = (known.arm, known.seed) in self._shipped
        new = not begun and known.step < 0
        params = [param for param in runs.params(member) if trackable(param[0])] if new else []
        tags = {"ablate.status": member.status} if over and run else {}
        if not run:
            run = self._create(client, member)
        elif not (begun or over):
            client.update_run(run, status="RUNNING")
        if params and (facts := ledger.facts.data(member.resolved.data)):  # sent twice, it is stored once
            from mlflow.entities import Dataset, DatasetInput, InputTag

            training = [InputTag("mlflow.data.context", "training")]
            client.log_inputs(run, [DatasetInput(Dataset(**runs.dataset(member, facts)), training)])
        gaps = self._gaps(ledger, member, run) if over else {}
        step, more = known.step, gaps.pop(run, [])
        main = self._metrics[0]
        # Compare's plot opens on the metric that a run was sent first.
        waits = run in self._made and step < 0 and not over and ledger.last_record(member.trial, main) is None
        waits = waits and time.time() - self._made[run].start_time / 1000 < _FIRST_SECONDS
        records = iter(()) if waits else ledger.records(member.trial, step)
        while (part := [*islice(records, _RECORDS_A_CALL)]) or more or params or tags:
            step = max([step, *(record[0] for record in part)])
            keys = {name: runs.key(name, self._metrics) for name in {record[1] for record in part}}
            points = [(at, key, value, moment) for at, name, value, moment in part if (key := keys[name])]
            points.sort(key=lambda point: point[1] != keys.get(main))
            self._log(client, run, points + more, params, tags)
            more, params, tags = [], [], {}
        for other, compared in gaps.items():
            if is_active(client, other):  # may have been deleted in its pages
                self._log(client, other, compared)
        if over:
            info = self._made.pop(run, None) or client.get_run(run).info
            self._log_artifacts(info, member)
            lasted = member.seconds and int(1000 * member.seconds)  # of the trial, not of the upload
            ended = info.start_time + lasted if lasted else None
            client.set_terminated(run, _TERMINAL[member.status], ended)
        return Shipped(known.arm, known.seed, run, step, over)

    def _gaps(self, ledger: Ledger, member: Member, run: str) -> dict[str, list[_Point]]:
        """Return gaps to the baseline, by run, that can be computed because this member has ended. The
        later one sent of two members that are compared adds the gap; sent twice, it is stored once."""
        found = {}
        for one, step, moment, metrics in runs.gaps(ledger, member, ledger.facts.metric.name):
            own = (one.arm, one.seed) == (member.arm, member.seed)
            recorded = Shipped(one.arm, one.seed, one.mlflow or "", 0, one.closed)
            known = self._shipped.get((one.arm, one.seed), recorded)
            if own or known.closed:
                points = [(step, name, value, moment) for name, value in metrics.items()]
                found[run if own else known.run] = points
        return found

    def _create(self, client: "MlflowClient", member: Member) -> str:
        tags = runs.tags(member, self._sweep, self.parent, member.against)
        name = f"{member.name} seed={member.seed}"
        info = client.create_run(self._id(self.experiment), tags=tags, run_name=name).info
        self._made[info.run_id] = info
        return info.run_id

    @staticmethod
    def _log(
        client: "MlflowClient",
        run: str,
        points: Iterable[_Point],
        params: Iterable[tuple[str, str]] = (),
        tags: Mapping[str, str] = {},
    ) -> None:
        """Add values, params and tags to a run, in as many calls as MLflow's limits require. A value that the
        run has already is stored once."""
        from mlflow.entities import Metric, Param, RunTag

        client.log_batch(
            run,
            [Metric(name, value, int(moment * 1000), step) for step, name, value, moment in points],
            [Param(*param) for param in params],
            [RunTag(*tag) for tag in tags.items()],
        )

    def _log_artifacts(self, info: "RunInfo", member: Member) -> None:
        """Store the resolved spec, the result with its environment, and the trial's own artifacts. A
        link, a folder or a device in their place is left out: MLflow would get what lies elsewhere."""
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        artifacts = get_artifact_repository(info.artifact_uri, tracking_uri=self._uri)
        store = Store(self._state)
        folder = store.folder(member.id)
        for path in (folder / "spec.json", folder / "result.json", *store.artifacts(member.id)):
            if path.is_file() and not path.is_symlink():
                artifacts.log_artifact(str(path))
