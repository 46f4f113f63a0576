"""What is drawn of a sweep's ledger: Optuna's study by calls from here, MLflow by a thread of its own. Projections only: the
ledger is never asked of them, and either can be deleted and is drawn again."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ablate.errors import redact
from ablate.execution.search import REPEATS, Study
from ablate.execution.study_points import GivenUp, Point, outcome, over, reports, warm
from ablate.experiment.load import Experiment
from ablate.results.databases import path_of
from ablate.results.ledger import Ledger
from ablate.results.markdown_summary import summary_markdown
from ablate.results.summary import gap
from ablate.results.verdict_text import verdict_text


class Mirror:
    """The ledger's picture in MLflow: what its thread shipped is noted here, in the thread that alone writes the ledger."""

    def __init__(self, uri: str, ledger: Ledger, state: Path, folder: Path, name: str, busy: bool) -> None:
        """`busy`: trials will run. Else the thread is started only where something was not shipped."""
        self._ledger, self._where = ledger, (uri, state, folder / "ledger.db", name)
        self._projector: Any = None
        self._forget_what_is_gone(uri)
        if busy or ledger.unshipped():
            self._start()

    def _start(self) -> None:
        from ablate.execution.tracking import (
            Projector,
        )  # MLflow takes seconds to import: only where it is needed

        told = (
            "question",
            "metric",
            "experiment.yaml",
            "provenance.json",
            "uncommitted.diff",
            "metrics",
            "mlflow_parent",
        )
        facts = {key: self._ledger.fact(key) or "" for key in told} | {"sweep_id": self._ledger.identity()}
        self._projector = Projector(*self._where, facts)

    @property
    def trouble(self) -> str | None:
        """Why MLflow is behind, while it is."""
        return self._projector.trouble if self._projector else None

    @property
    def lag(self) -> str | None:
        """How far behind MLflow is and why, while it is."""
        return f"MLflow {self._projector.behind:,} records behind ({self.trouble})" if self.trouble else None

    def hear(self) -> set[int]:
        """Note what was shipped since the last call; returns the arms that it was of."""
        heard: set[int] = set()
        if self._projector is None:
            return heard
        while not self._projector.news.empty():
            news = self._projector.news.get()
            self._ledger.shipped(news.arm, news.seed, news.run, news.step, news.closed)
            heard.add(news.arm)
        if self._projector.discarded:
            self._ledger.discarded(gone=tuple(self._projector.discarded))
            self._projector.discarded = ()
        if self._projector.forgotten:  # the database was deleted, and another sweep has made a new one since
            self._ledger.forget_mlflow()
            self._start()
        if self._projector.parent and not self._ledger.fact("mlflow_parent"):
            self._ledger.describe(
                mlflow_parent=self._projector.parent, mlflow_experiment=self._projector.experiment
            )
        return heard

    def pages(self, runs: Iterable[str | None]) -> list[str]:
        """Where the pages of these runs are; none where MLflow is no server, whose address stays."""
        experiment = self._ledger.fact("mlflow_experiment")
        if not experiment or not self._where[0].startswith(("http://", "https://")):
            return []
        from ablate.execution.tracking import page

        return [page(self._where[0], experiment, run) for run in runs if run]

    def finish(self, status: str, seconds: float) -> str | None:
        """Ship the rest and close the parent run, waiting at most so long; what is missing then, in words."""
        if self._projector is None or self._projector.finish(status, summary_markdown(self._ledger), seconds):
            self.hear()
            return None
        from ablate.execution.tracking import behind

        self.hear()
        why = f"{self.trouble or 'no answer yet'}; {redact(self._where[0])}"
        return f"MLflow {behind(self._ledger):,} records behind ({why}): `ablate sync`, or the next run of this sweep, ships the rest"

    def _forget_what_is_gone(self, uri: str) -> None:
        """Draw everything again where the picture is gone or another server is named. The address may hold a password: hashed."""
        digest = hashlib.sha256(uri.encode()).hexdigest()
        path = path_of(uri)
        gone = path is not None and not path.exists()
        for part in ("-wal", "-shm") if gone else ():  # left behind, they would spoil the new one
            path.with_name(path.name + part).unlink(missing_ok=True)
        if gone or self._ledger.fact("mlflow") != digest:
            self._ledger.forget_mlflow()
            self._ledger.describe(mlflow=digest)


class Projections:
    """The study and the MLflow projection of one sweep, used by its controller in the controller's thread."""

    def __init__(
        self,
        experiment: Experiment,
        ledger: Ledger,
        state: Path,
        folder: Path,
        mlflow: str | None,
        busy: bool,
    ) -> None:
        self._experiment, self._ledger = experiment, ledger
        self._mirror = Mirror(mlflow, ledger, state, folder, experiment.name, busy) if mlflow else None
        self._journal = folder / "optuna.log"
        self._warm, outside = warm(ledger, state, experiment)
        others = f"; {outside} others lie outside of this space" if outside else ""
        self.warmed = (
            f"the sampler knows {len(self._warm)} arms of earlier sweeps{others}"
            if self._warm or outside
            else None
        )
        """What was taken from earlier sweeps, in words."""
        self._draw()

    def _draw(self) -> None:
        arms = self._ledger.points()
        self.study = Study(self._journal, self._experiment, [self._point(arm) for arm in arms], self._warm)
        running = set(self.study.running())
        self._due = {arm["arm"] for arm in arms if arm["optuna"] in running}
        """Arms that may have to be told: one of their trials ended."""
        self._waiting: dict[int, int] = {}
        """Points that are over and wait for their arm's runs in MLflow, by point; looked at when there is news of the arm."""
        self._late: set[int] = set()
        """Arms that are over and whose baseline is not: a grid's wait for it, since nothing can be added to a point that was told."""

    @property
    def trouble(self) -> str | None:
        """How far behind MLflow is and why, while it is."""
        return self._mirror.lag if self._mirror else None

    def settled(self, trial: int) -> None:
        """A trial is over: the arms that want it may be, too, and those whose baseline does can be told."""
        for arm in self._ledger.arms_of(trial):
            self.due(arm)
        if self._late:
            self._due |= self._late.intersection(self._ledger.compared_with(trial))

    def due(self, arm: int) -> None:
        """An arm may be over."""
        self._due.add(arm)

    def refresh(self, final: bool = False) -> None:
        """Note what MLflow's thread shipped, and settle in the study every arm whose seeds are all over.

        An arm's MLflow runs are facts of its point, so it waits for them, unless MLflow is in trouble or this is the last call.
        """
        heard = self._mirror.hear() if self._mirror else set()
        if self._experiment.growth:  # an arm's mean is not settled before the last look
            if not final:
                return
            self._draw()
        patient = self._mirror and not (final or self.trouble)
        waited = {point for point, arm in self._waiting.items() if arm in heard or not patient}
        look = self._due | waited | (self._late if final else set())
        self._due.clear()
        self._late -= look
        for arm in look:
            point = self._ledger.point(arm)
            subject = point["repeats"] or arm
            members = self._ledger.members(subject)
            if not members or not over(members):
                continue
            if patient and not all(member["mlflow"] for member in members):
                self._waiting[arm] = subject
                continue
            self._waiting.pop(arm, None)
            if not (final or self._experiment.search or self._comparable(members[0])):
                self._late.add(arm)
                continue
            self._tell(point["optuna"], members)

    def finish(self, status: str, seconds: float) -> str | None:
        """Bring the pictures up to date, waiting at most so long; what is missing then, in words."""
        behind = self._mirror.finish(status, seconds) if self._mirror else None
        self.refresh(final=True)
        return behind

    def judge(self, trial: int) -> dict[int, GivenUp]:
        """Report to the pruner what the arms that want a trial have shown by now. Return those to be given up, by the arm's number."""
        given_up = {}
        for arm in self._ledger.arms_of(trial) if self._experiment.prunes else ():
            members = self._ledger.members(arm)
            if not members:  # a point that repeats an arm: the pruner has judged that
                continue
            number = members[0]["optuna"]
            for step, value in reports(self._ledger, members, self._experiment).items():
                self.study.report(number, step, value)
            step = self.study.given_up_at(number)
            if step is not None:
                given_up[arm] = GivenUp(self._experiment.search.pruner, step)
        return given_up

    def _point(self, arm: Any) -> Point:
        members = self._ledger.members(arm["repeats"] or arm["arm"])
        told = {} if arm["repeats"] else reports(self._ledger, members, self._experiment)
        known = Point(
            arm["name"],
            json.loads(arm["knobs"]),
            None,
            refused=not members,
            pruned=_pruned(members),
            reports=told,
        )
        if not members or known.pruned or not over(members):
            return known
        its = outcome(self._ledger, members, self._experiment)
        return replace(
            known, values=its.values, violations=its.violations, compared=self._compared(members[0])
        )

    def _comparable(self, member: Any) -> bool:
        """Whether an arm's baseline is over, or it has none."""
        return member["baseline"] is None or over(self._ledger.members(member["baseline"]))

    def _tell(self, number: int, members: list[Any]) -> None:
        facts = {
            "arm": members[0]["name"],
            "seeds": [member["seed"] for member in members],
            "trials": [member["id"] for member in members],
            "mlflow_runs": [member["mlflow"] for member in members],
        }
        facts |= {REPEATS: members[0]["optuna"]} if number != members[0]["optuna"] else {}
        facts |= self._compared(members[0]) | self._pages(facts["mlflow_runs"])
        if _pruned(members):
            self.study.tell(number, (), {}, facts, pruned=True)
            return
        its = outcome(self._ledger, members, self._experiment)
        by_seed = {
            f"{metric.name} by seed": values
            for metric, values in zip(self._experiment.objectives, its.by_seed, strict=True)
        }
        self.study.tell(number, its.values, its.means, facts | by_seed, its.violations)

    def _compared(self, member: Any) -> dict[str, Any]:
        """An arm's gap as far as it is known when the arm is told: an arm of a search may be told before its baseline is over."""
        found = gap(self._ledger, member["arm"])
        if found is None or not found[0].pairs:
            return {}
        interval = {"interval": [found[0].low, found[0].high]} if found[0].has_interval else {}
        return {"gap": found[0].mean, **interval, "verdict": verdict_text(found[1])}

    def _pages(self, runs: Iterable[str | None]) -> dict[str, Any]:
        pages = self._mirror.pages(runs) if self._mirror else []
        return {"mlflow": pages} if pages else {}


def _pruned(members: list[Any]) -> bool:
    return any(member["status"] == "pruned" for member in members)
