"""Projections of a sweep's ledger: Optuna's study, written from here, and trackers, MLflow among them, each
written by a thread of its own.

The sweep never reads anything back from them: each can be deleted and is made again from the ledger.
"""

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import redact
from ablate.execution.search.journal import REPEATS
from ablate.execution.search.study import Study
from ablate.execution.study_points import GivenUp, Point, outcome, over, reports, warm
from ablate.execution.tracking.tracker import Follower, Tracker
from ablate.experiment.load import Experiment
from ablate.files import Json
from ablate.results.summary import Gaps
from ablate.results.verdict_text import verdict_text
from ablate.store.checked_ledger import state_option
from ablate.store.databases import path_of
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import ArmRow, Member

if TYPE_CHECKING:
    from ablate.execution.tracking.mlflow_tracker import MlflowTracker


_SETTLING_SHARE = 0.05
"""Largest share of a grid's time that settling arms takes while trials run: each settling reads all arms."""


class Mirror:
    """Projection into MLflow. The controller's thread, which alone writes the ledger, records here what was
    shipped."""

    def __init__(self, uri: str, ledger: Ledger, state: Path, folder: Path, name: str, busy: bool) -> None:
        """Start the MLflow thread if trials will run (`busy`), or if records were not shipped yet."""
        self._ledger, self._path, self._target = ledger, folder / "ledger.db", (uri, state, name)
        self.tracker: MlflowTracker | None = None
        self._follower: Follower | None = None
        self._forget_deleted(uri)
        if busy or ledger.unshipped():
            self._start()

    def _start(self) -> None:
        from ablate.execution.tracking.mlflow_tracker import MlflowTracker

        stop = threading.Event()
        self.tracker = MlflowTracker(*self._target, self._ledger.identity(), stop)
        self._follower = Follower(self.tracker, self._path, "mlflow", stop)

    @property
    def trouble(self) -> str | None:
        """Reason for MLflow's delay; None while there is none."""
        return self._follower.trouble if self._follower else None

    def refresh(self) -> set[int]:
        """Record in the ledger what was shipped since the last call; return the arms that it concerns."""
        arms: set[int] = set()
        if self.tracker is None:
            return arms
        while not self.tracker.news.empty():
            news = self.tracker.news.get()
            self._ledger.shipped(news.arm, news.seed, news.run, news.step, news.closed)
            arms.add(news.arm)
        if self.tracker.discarded:
            self._ledger.discarded(gone=tuple(self.tracker.discarded))
            self.tracker.discarded = ()
        if self.tracker.forgotten:  # the database was deleted, and another sweep has made a new one since
            self._ledger.forget_mlflow()
            self._start()
        facts = self._ledger.facts
        if self.tracker.parent and not facts.mlflow_parent:
            with self._ledger.atomic():
                facts.mlflow_parent, facts.mlflow_experiment = self.tracker.parent, self.tracker.experiment
        return arms

    def pages(self, runs: Iterable[str | None]) -> list[str]:
        """Return the addresses of these runs' pages; none if MLflow is not a server, since only a server's
        addresses are stable."""
        experiment = self._ledger.facts.mlflow_experiment
        if not experiment or not self._target[0].startswith(("http://", "https://")):
            return []
        from ablate.execution.tracking.runs import page

        return [page(self._target[0], experiment, run) for run in runs if run]

    def finish(self, status: str, note: str, seconds: float) -> str | None:
        """Ship the rest, for at most `seconds`, and close the parent run with a status in MLflow's words and
        a description in Markdown (`note`); return a sentence about missing records, or None."""
        if self.tracker is None or self._follower is None:
            return None
        deadline, again, complete = time.monotonic() + seconds, True, False
        while again:
            complete = self._follower.finish(status, note, max(0.0, deadline - time.monotonic()))
            again = self.tracker.forgotten
            self.refresh()  # starts another tracker if MLflow has forgotten this sweep's runs
        if complete:
            return None
        from ablate.execution.tracking.mlflow_tracker import behind

        why = f"{self.trouble or 'no answer yet'}; {redact(self._target[0])}"
        command = f"ablate rebuild --sync{state_option(self._path.parent)}"
        remedy = f"`{command}`, or the next run of this sweep, ships the rest"
        return f"MLflow {behind(self._ledger):,} records behind ({why}): {remedy}"

    def _forget_deleted(self, uri: str) -> None:
        """Ship everything again if the database was deleted or another server is named. The address may hold
        a password: hash it."""
        digest = hashlib.sha256(uri.encode()).hexdigest()
        path = path_of(uri)
        gone = path is not None and not path.exists()
        if path is not None and gone:
            for part in ("-wal", "-shm"):  # SQLite would apply an old log to the new file
                path.with_name(path.name + part).unlink(missing_ok=True)
        if gone or self._ledger.facts.mlflow != digest:
            self._ledger.forget_mlflow()
            self._ledger.facts.mlflow = digest


class Projections:
    """The study and the trackers of one sweep, used in its controller's thread."""

    def __init__(
        self,
        experiment: Experiment,
        ledger: Ledger,
        state: Path,
        folder: Path,
        mlflow: str | None,
        busy: bool,
        clock: Callable[[], float] = time.monotonic,
        describe: Callable[[Ledger], str] = lambda ledger: "",
        trackers: Mapping[str, Tracker] = {},
    ) -> None:
        self._experiment, self._ledger, self._describe = experiment, ledger, describe
        self._clock, self._settle_after = clock, -math.inf
        self.mirror = Mirror(mlflow, ledger, state, folder, experiment.name, busy) if mlflow else None
        path = folder / "ledger.db"
        self._followers = {name: Follower(tracker, path, name) for name, tracker in trackers.items()}
        self._journal = folder / "optuna.log"
        self._warm, outside = warm(ledger, state, experiment)
        others = f"; {outside} others lie outside of this space" if outside else ""
        knows = f"the sampler knows {len(self._warm)} arms of earlier sweeps{others}"
        self.warmed = knows if self._warm or outside else None
        """Sentence about the arms of earlier sweeps that the sampler starts with; None if there are none."""
        self._open_study()

    def _open_study(self) -> None:
        arms, gaps = self._ledger.points(), Gaps(self._ledger)
        self.study = Study(
            self._journal, self._experiment, [self._point(arm, gaps) for arm in arms], self._warm
        )
        running = set(self.study.running())
        self._due = {arm.arm for arm in arms if arm.optuna in running}
        """Arms that may be over: one of their trials ended."""
        self._waiting: dict[int, int] = {}
        """Finished arms that wait for their runs in MLflow, keyed by point; checked when MLflow has news of
        the arm."""
        self._late: set[int] = set()
        """Finished arms whose baseline is not finished. Those of a grid wait for it: a settled point cannot
        be changed."""

    @property
    def trouble(self) -> str | None:
        """Delays of trackers with their reasons, as a sentence; None while there are none."""
        delays = []
        if self.mirror and self.mirror.tracker and self.mirror.trouble:
            delays.append(f"MLflow {self.mirror.tracker.behind:,} records behind ({self.mirror.trouble})")
        for name, follower in self._followers.items():
            if follower.trouble:
                delays.append(f"{name} is behind ({follower.trouble})")
        return "; ".join(delays) or None

    def settled(self, trial: int) -> None:
        """Mark the arms that need this finished trial, and the arms that wait for such an arm as their
        baseline."""
        for arm in self._ledger.arms_of(trial):
            self.due(arm)
        if self._late:
            self._due |= self._late.intersection(self._ledger.compared_with(trial))

    def due(self, arm: int) -> None:
        """Mark an arm that may be over."""
        self._due.add(arm)

    def refresh(self, final: bool = False) -> None:
        """Record what MLflow's thread has shipped, and settle in the study every arm whose seeds are all
        over.

        An arm's MLflow runs are facts of its point, so it waits for them, unless MLflow is delayed or `final`
        is True. Finished arms of a large grid are settled together after a while, since a verdict depends on
        all arms: settled one by one, they would cost the square of their number.
        """
        updated = self.mirror.refresh() if self.mirror else set()
        if self._experiment.keys.growth:  # an arm's mean is not settled before the last look
            if not final:
                return
            self._open_study()
        patient = self.mirror and not (final or self.mirror.trouble)
        if updated or not patient:
            self._due |= {point for point, arm in self._waiting.items() if arm in updated or not patient}
        began = self._clock()
        if not (final or self._experiment.keys.search or began >= self._settle_after):
            return
        candidates = self._due | (self._late if final else set())
        self._due.clear()
        self._late -= candidates
        gaps = Gaps(self._ledger)
        for arm in candidates:
            point = self._ledger.point(arm)
            subject = point.repeats or arm
            members = self._ledger.members(subject)
            if point.optuna is None or not members or not over(members):
                continue
            if patient and not all(member.mlflow for member in members):
                self._waiting[arm] = subject
                continue
            self._waiting.pop(arm, None)
            baseline = members[0].baseline
            waits = not (final or self._experiment.keys.search or baseline is None)
            if waits and not over(self._ledger.members(baseline)):
                self._late.add(arm)
                continue
            self._settle_point(point.optuna, members, gaps)
            now = self._clock()
            self._settle_after = now + (now - began) / _SETTLING_SHARE

    def finish(self, status: str, seconds: float) -> str | None:
        """Bring all projections up to date, waiting at most `seconds`; return sentences about missing
        records, or None."""
        note = self._describe(self._ledger) if self.mirror or self._followers else ""
        for follower in self._followers.values():
            follower.ask_to_finish(status, note)
        deadline = time.monotonic() + seconds
        behind = [self.mirror.finish(status, note, seconds)] if self.mirror else []
        for name, follower in self._followers.items():
            if not follower.finish(status, note, max(0.0, deadline - time.monotonic())):
                why = follower.trouble or "it takes long"
                behind.append(f"{name} is behind ({why}): the next run of this sweep writes the rest")
        self.refresh(final=True)
        return "; ".join(filter(None, behind)) or None

    def judge(self, trial: int) -> dict[int, GivenUp]:
        """Report to the pruner the values of all arms that need this trial. Return the decisions to end an
        arm, by its number."""
        given_up: dict[int, GivenUp] = {}
        search = self._experiment.keys.search
        if search is None or search.pruner is None:
            return given_up
        for arm in self._ledger.arms_of(trial):
            members = self._ledger.members(arm)
            number = members[0].optuna if members else None
            if number is None:  # a point that repeats an arm, which the pruner has judged
                continue
            for step, value in reports(self._ledger, members, self._experiment).items():
                self.study.report(number, step, value)
            last = self.study.given_up.get(number)
            if last is not None:
                given_up[arm] = GivenUp(search.pruner, last)
        return given_up

    def _point(self, arm: ArmRow, gaps: Gaps) -> Point:
        members = self._ledger.members(arm.repeats or arm.arm)
        shown = {} if arm.repeats else reports(self._ledger, members, self._experiment)
        knobs, pruned = json.loads(arm.knobs), _pruned(members)
        if not members or pruned or not over(members):
            return Point(arm.name, knobs, None, refused=not members, pruned=pruned, reports=shown)
        result, compared = outcome(self._ledger, members, self._experiment), _compared(members[0], gaps)
        return Point(
            arm.name, knobs, result.values, reports=shown, violations=result.violations, compared=compared
        )

    def _settle_point(self, number: int, members: list[Member], gaps: Gaps) -> None:
        runs = [member.mlflow for member in members]
        facts: dict[str, Json] = {
            "arm": members[0].name,
            "seeds": [member.seed for member in members],
            "trials": [member.id for member in members],
            "mlflow_runs": [*runs],
        }
        facts |= {REPEATS: members[0].optuna} if number != members[0].optuna else {}
        facts |= _compared(members[0], gaps)
        if self.mirror and (pages := self.mirror.pages(runs)):
            facts["mlflow"] = [*pages]
        if _pruned(members):
            self.study.tell(number, (), {}, facts, pruned=True)
            return
        result = outcome(self._ledger, members, self._experiment)
        by_seed: dict[str, Json] = {
            f"{metric.name} by seed": [*values]
            for metric, values in zip(self._experiment.objectives, result.by_seed, strict=True)
        }
        self.study.tell(number, result.values, result.means, facts | by_seed, result.violations)


def _compared(member: Member, gaps: Gaps) -> dict[str, Json]:
    """Return an arm's gap and verdict so far; an arm of a search may be settled before its baseline is
    over."""
    estimate = gaps.of(member.arm)
    if estimate is None or not estimate[0].pairs:
        return {}
    difference, verdict = estimate
    interval: dict[str, Json] = (
        {"interval": [difference.low, difference.high]} if difference.has_interval else {}
    )
    return {"gap": difference.mean, **interval, "verdict": verdict_text(verdict)}


def _pruned(members: list[Member]) -> bool:
    return any(member.status == "pruned" for member in members)
