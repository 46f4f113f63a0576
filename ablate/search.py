"""Which arms to run next, and the study that shows it: the only file that knows Optuna.

One loop serves grids and searches: a grid's points are queued, a sampler is asked for the rest. The study is a picture of the
ledger: its journal can be deleted at any time and is then drawn again.
"""

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ablate.experiment import Dimension, Experiment

optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)

ARM = "arm"
"""The one parameter of a study whose experiment lists its arms by name."""

SAMPLERS = {
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=8),
    "cmaes": lambda seed: optuna.samplers.CmaEsSampler(seed=seed),
}


def distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    """A knob's range as Optuna writes it."""
    if dimension.kind == "uniform":
        return optuna.distributions.FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    if dimension.kind == "int":
        return optuna.distributions.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return optuna.distributions.CategoricalDistribution([_encode(choice) for choice in dimension.choices])


def _encode(value: Any) -> Any:
    """Optuna's categories are None, bool, int, float and str; whatever else becomes JSON text."""
    return value if value is None or isinstance(value, bool | int | float | str) else "json:" + json.dumps(value)


def _decode(value: Any) -> Any:
    return json.loads(value.removeprefix("json:")) if isinstance(value, str) and value.startswith("json:") else value


class Study:
    """One sweep's Optuna study, in a journal file beside the ledger. Use it from one thread."""

    def __init__(self, journal: Path, experiment: Experiment) -> None:
        _repair(journal)
        self.distributions = {knob: distribution(dimension) for knob, dimension in experiment.space.items()}
        if not self.distributions:
            names = [arm.name for arm in experiment.arms if arm.name not in experiment.added]
            self.distributions = {ARM: optuna.distributions.CategoricalDistribution(names)}
        seed = experiment.search.seed if experiment.search else 0
        self.study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(journal))),
            study_name=experiment.name,
            direction=experiment.metric.direction,
            load_if_exists=True,
        )
        # A sampler made again with the same seed would propose the same points again: the trials so far are part of its seed.
        sampler = experiment.search.sampler if experiment.search else "random"
        self.study.sampler = SAMPLERS[sampler]((seed * 1_000_003 + len(self.study.trials)) % 2**32)
        self.study.set_user_attr("question", experiment.question)
        self.study.set_metric_names([experiment.metric.name])

    def ask(self) -> tuple[int, dict[str, Any]]:
        """A new point: its number in the study and its knobs."""
        trial = self.study.ask(self.distributions)
        return trial.number, {knob: _decode(value) for knob, value in trial.params.items()}

    def queue(self, name: str, knobs: Mapping[str, Any]) -> int:
        """Add a given point, a grid's; returns its number."""
        self.study.enqueue_trial(self._params(name, knobs), user_attrs={"arm": name})
        return self.study.ask(self.distributions).number

    def restore(self, points: Mapping[int, tuple[str, Mapping[str, Any]]]) -> None:
        """Make the study hold the ledger's points, {number: (arm, knobs)}, and none left running that the ledger does not know."""
        for number in range(len(self._trials()), max(points, default=-1) + 1):
            name, knobs = points.get(number, ("", None))
            params = {} if knobs is None else self._params(name, knobs)
            distributions = {knob: self.distributions[knob] for knob in params}
            state = TrialState.FAIL if knobs is None else TrialState.RUNNING
            self.study.add_trial(
                optuna.trial.create_trial(state=state, params=params, distributions=distributions, user_attrs={"arm": name})
            )
        for number in self.running() - set(points):
            self.study.tell(number, state=TrialState.FAIL)

    def _params(self, name: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
        return {knob: name if knob == ARM else _encode(knobs[knob]) for knob in self.distributions}

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def running(self) -> set[int]:
        """Numbers of the points that were asked for and not yet told."""
        return {trial.number for trial in self._trials() if trial.state == TrialState.RUNNING}

    def tell(self, number: int, value: float, steps: Mapping[int, float], facts: Mapping[str, Any]) -> None:
        """Settle a point: its mean metric, intermediate values by step, and facts (arm, gap, MLflow runs). NaN fails it."""
        trial = optuna.Trial(self.study, self._trials()[number]._trial_id)
        for key, fact in facts.items():
            trial.set_user_attr(key, fact)
        for step, mean in sorted(steps.items()):
            trial.report(mean, step)
        if math.isnan(value):
            self.study.tell(number, state=TrialState.FAIL)
        else:
            self.study.tell(number, value)

    def best(self) -> int | None:
        """The number of the best point so far."""
        finished = [trial for trial in self._trials() if trial.state == TrialState.COMPLETE]
        return self.study.best_trial.number if finished else None


def _repair(journal: Path) -> None:
    """Cut a last line torn by a crash, and remove a lock left by one: this process holds the sweep, so nobody else writes here."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink()
    if journal.exists():
        content = journal.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            with journal.open("r+b") as file:
                file.truncate(whole)
