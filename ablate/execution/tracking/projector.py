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
import queue
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import shorten

from ablate.errors import redact
from ablate.execution.tracking import database, runs
from ablate.execution.tracking.local_database import LocalDatabase
from ablate.execution.tracking.login import plainly
from ablate.execution.tracking.tracker import NOTE, Entries, MlflowTracker, Point, Run, Tracker
from ablate.experiment import schema
from ablate.files import lock
from ablate.store.databases import path_of, set_journal
from ablate.store.ledger import DATA, Ledger
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
        self._made: dict[str, Run] = {}
        """Runs created here, which saves a call each."""
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
        tracker = None
        # Importing MLflow and creating its database would delay the first trial.
        while not (self._finish or ledger.recorded()):
            self._wake.wait(_INTERVAL)
        while not self._stop.is_set():
            try:
                tracker = tracker or self._connect(ledger)
                last = self._finish
                self._ship(tracker, ledger)
                self.trouble = None
                if last:
                    self._close(tracker, ledger, *last)
                    break
            except Exception as error:  # must not end the sweep: shown in the status line, tried again
                first = shorten((str(error).splitlines() or [""])[0], 120, placeholder=" ...")
                why = plainly(error) or f"{type(error).__name__}: {first}"
                self.trouble, self.behind = redact(why, self._uri), behind(ledger)
                _release(tracker)
                tracker = None  # connecting again finds a run whose creation was not answered
                self._stop.wait(RETRY_SECONDS)
            self._wake.wait(_INTERVAL)
            self._wake.clear()
        _release(tracker)
        ledger.close()

    def _connect(self, ledger: Ledger) -> Tracker:
        with lock(database.lock_path(self._uri, self._state)):
            database.prepare(self._uri, self._state / "artifacts")
            tracker = self._tracker()
            self.experiment = self._experiment_id(tracker)
        noted = self.parent or self._facts.get("mlflow_parent")
        # An earlier controller may have created the parent run and died before recording it.
        known = noted or tracker.tagged(self.experiment, "ablate.sweep_id", self._facts["sweep_id"])
        if known and not tracker.has(known):
            self.forgotten, self.parent = True, None
            self._stop.set()
            raise LookupError("MLflow does not have this sweep's runs any more")
        parent = known or self._new_parent(tracker, self.experiment)
        if not noted:
            self._describe(tracker, self.experiment, parent, ledger)
        self.parent = parent  # recorded only when it is complete
        if known:
            tracker.resume(parent)
            self._discard(tracker, ledger)
            noted_runs = ledger.mlflow_runs() | {member.run for member in self._shipped.values()}
            self._orphans = self._find_orphans(tracker, noted_runs)
        return tracker

    def _tracker(self) -> Tracker:
        """Return our own way into a database of this machine, or MLflow's client."""
        own = (self._state / "mlflow.db").resolve()
        path = path_of(self._uri)
        local = LocalDatabase.open(self._uri, own=path == own)
        if local:
            return local
        tracker = MlflowTracker(self._uri)
        if path == own:
            self._wait_less(own)
        return tracker

    def _discard(self, tracker: Tracker, ledger: Ledger) -> None:
        """Delete the runs in MLflow of results that were put aside; new runs replace them."""
        done = []
        for trial, moment, member in ledger.discarded():
            tracker.discard(self._id(self.experiment), self._id(self.parent), trial, member, moment)
            done.append((trial, moment, member))
        self.discarded = tuple(done)

    @staticmethod
    def _wait_less(own: Path) -> None:
        """Set the journal mode of our own database: one disk wait per transaction instead of four, and
        readers beside the writer.
        """
        with closing(sqlite3.connect(own)) as db:
            set_journal(db, own)

    def _experiment_id(self, tracker: Tracker) -> str:
        local = path_of(self._uri) is not None
        location = (self._state / "artifacts" / self._sweep).resolve().as_uri() if local else None
        # Without this kind the experiment's page opens on traces of language models.
        return tracker.experiment(
            self._sweep, location, {"mlflow.experimentKind": "custom_model_development"}
        )

    def _find_orphans(self, tracker: Tracker, noted: set[str]) -> dict[tuple[str | None, str | None], str]:
        """Return created but unrecorded runs. They are among the latest, so stop at the first page without
        any.
        """
        orphans: dict[tuple[str | None, str | None], str] = {}
        for page in tracker.children(self._id(self.experiment), self._id(self.parent)):
            new = [child for child in page if child.run not in noted]
            if not new:
                break
            orphans |= {(child.member, child.trial): child.run for child in new}
        return orphans

    @staticmethod
    def _id(known: str | None) -> str:
        """Return the id of the experiment or of the parent run, which `_connect` has set."""
        if known is None:
            raise RuntimeError("the projector is not connected")
        return known

    def _new_parent(self, tracker: Tracker, experiment: str) -> str:
        tags = {
            "ablate.kind": "sweep",
            "ablate.sweep_id": self._facts["sweep_id"],
            "ablate.sweep": self._sweep,
            "mlflow.note.content": self._facts.get("question", ""),
        }
        return tracker.create(experiment, self._sweep, tags).id

    def _describe(self, tracker: Tracker, experiment: str, parent: str, ledger: Ledger) -> None:
        for name in ("experiment.yaml", "provenance.json", "uncommitted.diff"):
            if self._facts.get(name):
                tracker.text(parent, self._facts[name], name)
        self._overview(tracker, experiment, parent, ledger)

    def _overview(self, tracker: Tracker, experiment: str, parent: str, ledger: Ledger) -> None:
        """Write the current description of the sweep, from which it can be imported, and the saved view of
        its runs.
        """
        tracker.text(parent, runs.description(ledger), "sweep.json")
        metric = schema.Metric.model_validate_json(ledger.fact("metric") or "{}")
        knobs = dict.fromkeys(knob for arm in ledger.arms() for knob in json.loads(arm.knobs))
        counted = next((unit(member.spec, metric.name) for member in ledger.members()), "")
        minimize, now = metric.direction == "minimize", int(time.time() * 1000)
        gaps = runs.gap_names(ledger, counted)
        shown = runs.view(knobs, metric.name, self._metrics or [metric.name], gaps, minimize, now)
        if shown:
            tracker.experiment_tag(experiment, _VIEW_TAG, shown)

    def _ship(self, tracker: Tracker, ledger: Ledger) -> None:
        """Bring the run of every unfinished member up to date with the ledger."""
        for member in ledger.to_ship():
            key = (member.arm, member.seed)
            known = self._shipped.get(key) or Shipped(*key, member.mlflow or "", member.shipped, closed=False)
            if self._stop.is_set():
                return
            if known.closed:
                continue
            with tracker.batch():
                now = self._draw(tracker, ledger, member, known)
            if now != known:
                self._shipped[key] = now
                self.news.put(now)

    def _draw(self, tracker: Tracker, ledger: Ledger, member: Member, known: Shipped) -> Shipped:
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
            run = self._create(tracker, member)
        elif not (begun or over):
            tracker.resume(run)
        if params:
            self._data(tracker, ledger, run, member)
        step = known.step
        gaps = self._gaps(ledger, member, run) if over else {}
        for last, points in self._batches(ledger.records(member.trial, step), gaps.pop(run, [])):
            tracker.log(run, Entries(points, params, tags))
            step, params, tags = max(step, last), [], {}
        if params or tags:
            tracker.log(run, Entries(params=params, tags=tags))
        for other, points in gaps.items():
            if tracker.has(other):  # may have been deleted in its pages
                tracker.log(other, Entries(points))
        if over:
            facts = self._made.pop(run, None) or tracker.run(run)
            tracker.files(facts, self._artifacts(member))
            lasted = member.seconds and int(1000 * member.seconds)  # of the trial, not of the upload
            tracker.end(run, _TERMINAL[member.status], facts.start_ms + lasted if lasted else None)
        return Shipped(known.arm, known.seed, run, step, over)

    def _gaps(self, ledger: Ledger, member: Member, run: str) -> dict[str, list[Point]]:
        """Return gaps to the baseline, by run, that can be computed because this member has ended.

        Of two members that are compared, the one sent last adds the gap; sent twice, it is stored once.
        """
        found = {}
        for one, step, moment, metrics in runs.gaps(ledger, member, self._metric):
            own = (one.arm, one.seed) == (member.arm, member.seed)
            known = self._shipped.get((one.arm, one.seed)) or Shipped(
                one.arm, one.seed, one.mlflow or "", 0, one.closed
            )
            if own or known.closed:
                found[run if own else known.run] = [
                    Point(name, value, int(moment * 1000), step) for name, value in metrics.items()
                ]
        return found

    def _create(self, tracker: Tracker, member: Member) -> str:
        tags = runs.tags(member, self._sweep, self.parent, member.against)
        run = tracker.create(self._id(self.experiment), f"{member.name} seed={member.seed}", tags)
        self._made[run.id] = run
        return run.id

    def _data(self, tracker: Tracker, ledger: Ledger, run: str, member: Member) -> None:
        """Add the member's training data as its run's input; sent twice, it is stored once."""
        facts = ledger.fact(f"{DATA}{json.loads(member.spec)['data']}")
        if facts:
            tracker.dataset(run, runs.dataset(member, json.loads(facts)))

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

    def _close(self, tracker: Tracker, ledger: Ledger, status: str, note: str) -> None:
        parent = self._id(self.parent)
        for member in self._shipped.values():
            if not member.closed:
                tracker.end(member.run, "KILLED")
        self._overview(tracker, self._id(self.experiment), parent, ledger)
        tracker.log(parent, Entries(tags={NOTE: note}))
        tracker.end(parent, status)


def _release(tracker: Tracker | None) -> None:
    """Close a database that was opened here; nobody waits for an error of a broken one."""
    if isinstance(tracker, LocalDatabase):
        with suppress(sqlite3.Error):
            tracker.close()
