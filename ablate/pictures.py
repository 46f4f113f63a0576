"""What is drawn of a sweep's ledger: Optuna's study by calls from here, MLflow by a thread of its own. Pictures only: the
ledger is never asked of them, and either can be deleted and is drawn again."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from ablate.experiment import Experiment
from ablate.ledger import FINISHED, Ledger
from ablate.results import summary_markdown
from ablate.search import Point, Study


class Pictures:
    """The study and the MLflow projection of one sweep, used by its controller in the controller's thread."""

    def __init__(self, experiment: Experiment, ledger: Ledger, state: Path, folder: Path, mlflow: str | None, busy: bool) -> None:
        """`busy`: trials will run. Else MLflow's thread is started only where something was not shipped."""
        self._metric, self._ledger = experiment.metric, ledger
        self._projector: Any = None
        if mlflow:
            self._forget_what_is_gone(mlflow)
        if mlflow and (busy or ledger.unshipped()):
            from ablate.tracking import Projector  # MLflow takes seconds to import: only where it is needed

            told = ("question", "experiment.yaml", "provenance.json", "uncommitted.diff", "metrics")
            facts = {key: ledger.fact(key) or "" for key in told}
            facts |= {"mlflow_parent": ledger.fact("mlflow_parent") or "", "sweep_id": ledger.identity()}
            self._projector = Projector(mlflow, state, folder / "ledger.db", experiment.name, facts)
        arms = sorted((arm for arm in ledger.arms() if arm["optuna"] is not None), key=lambda arm: arm["optuna"])
        self.study = Study(folder / "optuna.log", experiment, [self._point(arm) for arm in arms])

    @property
    def trouble(self) -> str | None:
        """Why MLflow is behind, while it is."""
        return self._projector.trouble if self._projector else None

    def refresh(self, final: bool = False) -> None:
        """Note what MLflow's thread shipped, and settle in the study every arm whose seeds are all over.

        An arm's MLflow runs are facts of its point, so it waits for them, unless MLflow is in trouble or this is the last call.
        """
        self._hear()
        members = self._ledger.members()
        for number in self.study.running():
            mine = [member for member in members if member["optuna"] == number]
            waits = self._projector and not (final or self.trouble) and not all(member["mlflow"] for member in mine)
            if mine and not waits and _over(mine):
                self._tell(number, mine)

    def finish(self, status: str, seconds: float) -> str | None:
        """Bring the pictures up to date and close MLflow's parent run, waiting at most so long; what is missing then, in words."""
        done = self._projector is None or self._projector.finish(status, summary_markdown(self._ledger), seconds)
        self.refresh(final=True)
        return None if done else f"MLflow is behind ({self.trouble or 'still writing'}): the next run of this sweep ships the rest"

    def _hear(self) -> None:
        if self._projector is None:
            return
        while not self._projector.news.empty():
            news = self._projector.news.get()
            self._ledger.shipped(news.arm, news.seed, news.run, news.step, news.closed)
        if self._projector.parent and not self._ledger.fact("mlflow_parent"):
            self._ledger.describe(mlflow_parent=self._projector.parent)

    def _forget_what_is_gone(self, uri: str) -> None:
        """Draw everything again where the picture is gone or another server is named. The address may hold a password: hashed."""
        digest = hashlib.sha256(uri.encode()).hexdigest()
        gone = uri.startswith("sqlite:///") and not Path(uri.removeprefix("sqlite:///")).exists()
        if gone or self._ledger.fact("mlflow") != digest:
            self._ledger.forget_mlflow()
            self._ledger.describe(mlflow=digest)

    def _point(self, arm: Any) -> Point:
        members = [member for member in self._ledger.members() if member["arm"] == arm["arm"]]
        value = self._outcome(members)[0] if members and _over(members) else None
        return Point(arm["name"], json.loads(arm["knobs"]), value, refused=not members)

    def _tell(self, number: int, members: list[Any]) -> None:
        value, finals, means = self._outcome(members)
        facts = {
            "arm": members[0]["name"],
            "seeds": [member["seed"] for member in members],
            f"{self._metric.name} by seed": finals,
            "trials": [member["id"] for member in members],
            "mlflow_runs": [member["mlflow"] for member in members],
        }
        self.study.tell(number, value, means, facts)

    def _outcome(self, members: list[Any]) -> tuple[float, list[float], dict[int, float]]:
        """An arm's mean metric over its seeds, the metric of each seed, and the mean at every step that all seeds recorded.

        A diverged seed counts as infinitely bad, a failed one as unknown.
        """
        series = [self._series(member["trial"]) for member in members]
        worst = math.inf if self._metric.direction == "minimize" else -math.inf
        finals = [
            worst if member["status"] == "diverged" else steps[max(steps)] if steps and member["status"] == "done" else math.nan
            for member, steps in zip(members, series, strict=True)
        ]
        shared = set.intersection(*(set(steps) for steps in series))
        means = {step: math.fsum(steps[step] for steps in series) / len(series) for step in shared}
        return math.fsum(finals) / len(finals), finals, means

    def _series(self, trial: int) -> dict[int, float]:
        return {step: value for step, name, value, _ in self._ledger.records(trial) if name == self._metric.name}


def _over(members: list[Any]) -> bool:
    return all(member["status"] in (*FINISHED, "failed") for member in members)
