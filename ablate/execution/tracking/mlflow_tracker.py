"""Projection of one sweep's ledger into MLflow.

It sends what MLflow lacks, and reports what it has sent; the controller stores that, since it alone writes
the ledger. A server's failure only increases the number of records that MLflow is behind.

A sweep is one MLflow experiment with one parent run; each member (arm and seed) is a child run. For example,
2 arms on 3 seeds give 1 parent and 6 child runs, and a trial that two sweeps use appears in both.

Records keep their own time stamps, so that sending one twice stores it once. Runs that were created but never
recorded, because a process died in between, are found by their tags and used again. Results are never read
back. `forgotten` is set if the runs that the ledger names are gone.
"""

import json
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ablate.errors import redact
from ablate.execution.tracking import database, runs
from ablate.execution.tracking.local_database import LocalDatabase
from ablate.execution.tracking.login import plainly
from ablate.execution.tracking.tracker import Tracker
from ablate.execution.tracking.writer import NOTE, ClientWriter, Entries, Point, Run, Writer
from ablate.files import lock
from ablate.store.databases import path_of, set_journal
from ablate.store.ledger import Ledger
from ablate.store.ledger_progress import unshipped_records
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Store
from ablate.training.metric_names import trackable
from ablate.training.workloads import unit

_TERMINAL = {
    "done": "FINISHED",
    "diverged": "FINISHED",
    "failed": "FAILED",
    "oom": "FAILED",
    "stopped": "KILLED",
    "pruned": "KILLED",
}
_METRICS_A_BATCH = 1000  # MLflow's limit
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
    metrics = ledger.facts.metrics
    return unshipped_records(ledger, lambda name: runs.shown(name, metrics))


class MlflowTracker(Tracker):
    """Projection into MLflow. The controller reads `news` and writes it to the ledger."""

    def __init__(self, uri: str, state: Path, sweep: str, identity: str, stop: threading.Event) -> None:
        """Connect to nothing yet.

        Args:
            uri: Address of MLflow.
            state: State folder.
            sweep: Name of the sweep.
            identity: Unique id of its ledger.
            stop: Ends a refresh between two members; set here once the sweep's runs are gone.
        """
        self.news: queue.SimpleQueue[Shipped] = queue.SimpleQueue()
        self.parent: str | None = None
        self.experiment: str | None = None
        """Id of the sweep's experiment in MLflow."""
        self.forgotten = False
        """True if MLflow lacks runs that the ledger names: everything has to be sent again, by another
        tracker.
        """
        self.discarded: tuple[tuple[str, int, str], ...] = ()
        """Entries of the ledger's `discarded` whose runs were deleted in MLflow."""
        self.behind = 0
        """Number of records that MLflow lacked at the last trouble."""
        self._uri, self._state, self._sweep, self._identity = uri, state, sweep, identity
        self._metrics: Sequence[str] = ()
        self._shipped: dict[tuple[int, int], Shipped] = {}
        self._orphans: dict[tuple[str | None, str | None], str] = {}
        """Runs that were created and never recorded, because the controller or the server died; by member and
        trial.
        """
        self._made: dict[str, Run] = {}
        """Runs created here, which saves a call each."""
        self._stop = stop
        self._writer: Writer | None = None

    def refresh(self, ledger: Ledger) -> None:
        """Send what MLflow lacks."""
        self._metrics = ledger.facts.metrics
        if self._writer is None:
            self._writer = self._connect(ledger)
        self._ship(self._writer, ledger)

    def finish(self, ledger: Ledger, status: str, note: str) -> None:
        """Close the runs that are open, and the parent run with the note as its description."""
        writer, parent = self._writer, self._id(self.parent)
        if writer is None:
            raise RuntimeError("finish comes after a refresh")
        for member in self._shipped.values():
            if not member.closed:
                writer.end(member.run, "KILLED")
        self._overview(writer, self._id(self.experiment), parent, ledger)
        writer.log(parent, Entries(tags={NOTE: note}))
        writer.end(parent, status)
        self._release()

    def trouble(self, ledger: Ledger, error: Exception) -> str:
        """Return why MLflow cannot be written. The next refresh connects anew, which finds a run whose
        creation was not answered.
        """
        self._release()
        self.behind = behind(ledger)
        return redact(plainly(error) or super().trouble(ledger, error), self._uri)

    def _release(self) -> None:
        """Close a database that was opened here; nobody waits for an error of a broken one."""
        if isinstance(self._writer, LocalDatabase):
            with suppress(sqlite3.Error):
                self._writer.close()
        self._writer = None

    def _connect(self, ledger: Ledger) -> Writer:
        with lock(database.lock_path(self._uri, self._state)):
            database.prepare(self._uri, self._state / "artifacts")
            writer = self._open()
            self.experiment = self._experiment_id(writer)
        noted = self.parent or ledger.facts.mlflow_parent
        # An earlier controller may have created the parent run and died before recording it.
        known = noted or writer.tagged(self.experiment, "ablate.sweep_id", self._identity)
        if known and not writer.has(known):
            self.forgotten, self.parent = True, None
            self._stop.set()
            raise LookupError("MLflow does not have this sweep's runs any more")
        parent = known or self._new_parent(writer, self.experiment, ledger)
        if not noted:
            self._describe(writer, self.experiment, parent, ledger)
        self.parent = parent  # recorded only when it is complete
        if known:
            writer.resume(parent)
            self._discard(writer, ledger)
            noted_runs = ledger.mlflow_runs() | {member.run for member in self._shipped.values()}
            self._orphans = self._find_orphans(writer, noted_runs)
        return writer

    def _open(self) -> Writer:
        """Return our own way into a database of this machine, or MLflow's client."""
        own = (self._state / "mlflow.db").resolve()
        path = path_of(self._uri)
        local = LocalDatabase.open(self._uri, own=path == own)
        if local:
            return local
        writer = ClientWriter(self._uri)
        if path == own:
            self._wait_less(own)
        return writer

    def _discard(self, writer: Writer, ledger: Ledger) -> None:
        """Delete the runs in MLflow of results that were put aside; new runs replace them."""
        done = []
        for trial, moment, member in ledger.discarded():
            writer.discard(self._id(self.experiment), self._id(self.parent), trial, member, moment)
            done.append((trial, moment, member))
        self.discarded = tuple(done)

    @staticmethod
    def _wait_less(own: Path) -> None:
        """Set the journal mode of our own database: one disk wait per transaction instead of four, and
        readers beside the writer.
        """
        with closing(sqlite3.connect(own)) as db:
            set_journal(db, own)

    def _experiment_id(self, writer: Writer) -> str:
        local = path_of(self._uri) is not None
        location = (self._state / "artifacts" / self._sweep).resolve().as_uri() if local else None
        # Without this kind the experiment's page opens on traces of language models.
        return writer.experiment(self._sweep, location, {"mlflow.experimentKind": "custom_model_development"})

    def _find_orphans(self, writer: Writer, noted: set[str]) -> dict[tuple[str | None, str | None], str]:
        """Return created but unrecorded runs. They are among the latest, so stop at the first page without
        any.
        """
        orphans: dict[tuple[str | None, str | None], str] = {}
        for page in writer.children(self._id(self.experiment), self._id(self.parent)):
            new = [child for child in page if child.run not in noted]
            if not new:
                break
            orphans |= {(child.member, child.trial): child.run for child in new}
        return orphans

    @staticmethod
    def _id(known: str | None) -> str:
        """Return the id of the experiment or of the parent run, which `_connect` has set."""
        if known is None:
            raise RuntimeError("MLflow is not connected")
        return known

    def _new_parent(self, writer: Writer, experiment: str, ledger: Ledger) -> str:
        tags = {
            "ablate.kind": "sweep",
            "ablate.sweep_id": self._identity,
            "ablate.sweep": self._sweep,
            "mlflow.note.content": ledger.facts.question,
        }
        return writer.create(experiment, self._sweep, tags).id

    def _describe(self, writer: Writer, experiment: str, parent: str, ledger: Ledger) -> None:
        for name in ("experiment.yaml", "provenance.json", "uncommitted.diff"):
            if text := ledger.fact(name):
                writer.text(parent, text, name)
        self._overview(writer, experiment, parent, ledger)

    def _overview(self, writer: Writer, experiment: str, parent: str, ledger: Ledger) -> None:
        """Write the current description of the sweep, from which it can be imported, and the saved view of
        its runs.
        """
        writer.text(parent, runs.description(ledger), "sweep.json")
        metric = ledger.facts.metric
        knobs = dict.fromkeys(knob for arm in ledger.arms() for knob in json.loads(arm.knobs))
        counted = next((unit(member.resolved.workload, metric.name) for member in ledger.members()), "")
        minimize, now = metric.direction == "minimize", int(time.time() * 1000)
        gaps = runs.gap_names(ledger, counted)
        shown = runs.view(knobs, metric.name, ledger.facts.metrics or [metric.name], gaps, minimize, now)
        if shown:
            writer.experiment_tag(experiment, _VIEW_TAG, shown)

    def _ship(self, writer: Writer, ledger: Ledger) -> None:
        """Bring the run of every unfinished member up to date with the ledger."""
        for member in ledger.to_ship():
            key = (member.arm, member.seed)
            known = self._shipped.get(key) or Shipped(*key, member.mlflow or "", member.shipped, closed=False)
            if self._stop.is_set():
                return
            if known.closed:
                continue
            with writer.batch():
                now = self._draw(writer, ledger, member, known)
            if now != known:
                self._shipped[key] = now
                self.news.put(now)

    def _draw(self, writer: Writer, ledger: Ledger, member: Member, known: Shipped) -> Shipped:
        """Bring one member's run up to date in as few calls as possible: each costs a server a round trip."""
        over, run = (
            member.status in _TERMINAL,
            known.run or self._orphans.get((member.key, member.id), ""),
        )
        begun = (known.arm, known.seed) in self._shipped
        new = not begun and known.step < 0
        params = [param for param in runs.params(member) if trackable(param[0])] if new else []
        tags = {"ablate.status": member.status} if over and run else {}
        if not run:
            run = self._create(writer, member)
        elif not (begun or over):
            writer.resume(run)
        if params:
            self._data(writer, ledger, run, member)
        step = known.step
        gaps = self._gaps(ledger, member, run) if over else {}
        for last, points in self._batches(ledger.records(member.trial, step), gaps.pop(run, [])):
            writer.log(run, Entries(points, params, tags))
            step, params, tags = max(step, last), [], {}
        if params or tags:
            writer.log(run, Entries(params=params, tags=tags))
        for other, points in gaps.items():
            if writer.has(other):  # may have been deleted in its pages
                writer.log(other, Entries(points))
        if over:
            facts = self._made.pop(run, None) or writer.run(run)
            writer.files(facts, self._artifacts(member))
            lasted = member.seconds and int(1000 * member.seconds)  # of the trial, not of the upload
            writer.end(run, _TERMINAL[member.status], facts.start_ms + lasted if lasted else None)
        return Shipped(known.arm, known.seed, run, step, over)

    def _gaps(self, ledger: Ledger, member: Member, run: str) -> dict[str, list[Point]]:
        """Return gaps to the baseline, by run, that can be computed because this member has ended.

        Of two members that are compared, the one sent last adds the gap; sent twice, it is stored once.
        """
        found = {}
        for one, step, moment, metrics in runs.gaps(ledger, member, ledger.facts.metric.name):
            own = (one.arm, one.seed) == (member.arm, member.seed)
            known = self._shipped.get((one.arm, one.seed)) or Shipped(
                one.arm, one.seed, one.mlflow or "", 0, one.closed
            )
            if own or known.closed:
                found[run if own else known.run] = [
                    Point(name, value, int(moment * 1000), step) for name, value in metrics.items()
                ]
        return found

    def _create(self, writer: Writer, member: Member) -> str:
        tags = runs.tags(member, self._sweep, self.parent, member.against)
        run = writer.create(self._id(self.experiment), f"{member.name} seed={member.seed}", tags)
        self._made[run.id] = run
        return run.id

    def _data(self, writer: Writer, ledger: Ledger, run: str, member: Member) -> None:
        """Add the member's training data as its run's input; sent twice, it is stored once."""
        if facts := ledger.facts.data(member.resolved.data):
            writer.dataset(run, runs.dataset(member, facts))

    def _batches(
        self, records: Iterator[tuple[int, str, float, float]], more: list[Point]
    ) -> Iterator[tuple[int, list[Point]]]:
        """Yield last step and metrics of as many whole steps as fit one call; `more` goes with the last."""
        batch: list[Point] = []
        last = -1
        for step, found in groupby(records, key=lambda record: record[0]):
            points = [
                Point(name, value, int(moment * 1000), step)
                for _, name, value, moment in found
                if runs.shown(name, self._metrics)
            ]
            if batch and len(batch) + len(points) + len(more) > _METRICS_A_BATCH:
                yield last, batch
                batch = []
            batch, last = batch + points, step
        if batch or more:
            yield last, batch + more

    def _artifacts(self, member: Member) -> list[Path]:
        """Return the resolved spec, the result with its environment, and the trial's own artifacts.

        What is a link, a folder or a device in their place is left out: MLflow would get what lies elsewhere.
        """
        store = Store(self._state)
        folder = store.folder(member.id)
        paths = (folder / "spec.json", folder / "result.json", *store.artifacts(member.id))
        return [path for path in paths if path.is_file() and not path.is_symlink()]
