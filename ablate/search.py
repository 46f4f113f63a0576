"""Which arms to run next, and the study that shows it: the only file that knows Optuna.

One loop serves grids and searches: a grid's points are queued, a sampler is asked for the rest. The study is a picture of the
ledger: its journal can be deleted at any time and is then drawn again.
"""

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from ablate.experiment import Dimension, Experiment

optuna.logging.set_verbosity(optuna.logging.ERROR)

ARM = "arm"
"""The one parameter of a study whose experiment lists its arms by name."""

SAMPLERS = {
    "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=8),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=8),
    "cmaes": lambda seed: optuna.samplers.CmaEsSampler(seed=seed),
}


def distribution(dimension: Dimension) -> BaseDistribution:
    """A knob's range as Optuna writes it."""
    if dimension.kind == "uniform":
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    if dimension.kind == "int":
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return CategoricalDistribution([_encode(choice) for choice in dimension.choices])


def _encode(value: Any) -> Any:
    """Optuna's categories are None, bool, int, float and str; whatever else becomes JSON text."""
    return value if value is None or isinstance(value, bool | int | float | str) else "json:" + json.dumps(value)


def _decode(value: Any) -> Any:
    return json.loads(value.removeprefix("json:")) if isinstance(value, str) and value.startswith("json:") else value


@dataclass(frozen=True)
class Point:
    """What the ledger knows of one arm of the study, in the study's order."""

    name: str
    knobs: Mapping[str, Any]
    value: float | None
    """The mean metric over its seeds, NaN where one failed; None while it is not over."""
    refused: bool = False


class Study:
    """One sweep's Optuna study, in a journal file beside the ledger. Use it from one thread, holding the sweep's lock."""

    def __init__(self, journal: Path, experiment: Experiment, points: Sequence[Point]) -> None:
        self._journal, self._experiment = journal, experiment
        self.distributions = {knob: distribution(dimension) for knob, dimension in experiment.space.items()}
        if not self.distributions:
            names = [arm.name for arm in experiment.arms if arm.name not in experiment.added]
            self.distributions = {ARM: CategoricalDistribution(names)}
        _repair(journal)
        self.study = self._open()
        if not self._agrees(points):
            journal.unlink()
            self.study = self._open()
        for point in points[len(self._trials()) :]:
            self.add(point)
        # A sampler made again with the same seed would propose the same points again: the trials so far are part of its seed.
        search = experiment.search
        seed = (search.seed * 1_000_003 + len(points)) % 2**32 if search else 0
        with _experimental():
            self.study.sampler = SAMPLERS[search.sampler if search else "random"](seed)

    def _open(self) -> optuna.Study:
        """The journal's study, or a new one; `create_study` keeps the direction of one that is there."""
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(self._journal))),
            study_name=self._experiment.name,
            direction=self._experiment.metric.direction,
            load_if_exists=True,
        )
        study.set_user_attr("question", self._experiment.question)
        with _experimental():
            study.set_metric_names([self._experiment.metric.name])
        return study

    def _agrees(self, points: Sequence[Point]) -> bool:
        """Whether what the journal holds is true of the ledger's points, as far as it goes."""
        trials = self._trials()
        direction = self.study.direction.name.lower() == self._experiment.metric.direction
        return direction and len(trials) <= len(points) and all(map(self._same, trials, points))

    def _same(self, trial: FrozenTrial, point: Point) -> bool:
        params, distributions = self._params(point)
        if trial.params != params or trial.distributions != distributions:
            return False
        if trial.state == TrialState.FAIL:
            return point.refused or (point.value is not None and math.isnan(point.value))
        return not point.refused and (trial.state == TrialState.RUNNING or (trial.state.is_finished() and trial.value == point.value))

    def _params(self, point: Point) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """A point's parameters in today's ranges; a range is widened, and a knob left out, where the point is older than the range."""
        params, distributions = {}, {}
        for knob, known in self.distributions.items():
            if knob != ARM and knob not in point.knobs:
                continue
            value = point.name if knob == ARM else _encode(point.knobs[knob])
            if isinstance(known, FloatDistribution | IntDistribution):
                known = type(known)(min(known.low, value), max(known.high, value), log=known.log)
            elif not any(type(value) is type(choice) and value == choice for choice in known.choices):
                continue
            params[knob], distributions[knob] = value, known
        return params, distributions

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def ask(self) -> tuple[int, dict[str, Any]]:
        """A new point: its number in the study and its knobs."""
        trial = self.study.ask(self.distributions)
        return trial.number, {knob: _decode(value) for knob, value in trial.params.items()}

    def add(self, point: Point) -> None:
        """Add a given point, the next number."""
        params, distributions = self._params(point)
        state = TrialState.FAIL if point.refused else TrialState.RUNNING
        facts = {"arm": point.name}
        self.study.add_trial(create_trial(state=state, params=params, distributions=distributions, user_attrs=facts))

    def running(self) -> list[int]:
        """Numbers of the points that were not yet told."""
        return [trial.number for trial in self._trials() if trial.state == TrialState.RUNNING]

    def refuse(self, number: int, why: str) -> None:
        """Settle a proposed point that cannot be run."""
        optuna.Trial(self.study, self._trials()[number]._trial_id).set_user_attr("refused", why)
        self.study.tell(number, state=TrialState.FAIL)

    def tell(self, number: int, value: float, steps: Mapping[int, float], facts: Mapping[str, Any]) -> None:
        """Settle a point: its mean metric, intermediate values by step, and facts (arm, gap, MLflow runs). NaN fails it."""
        trial = optuna.Trial(self.study, self._trials()[number]._trial_id)
        for key, fact in facts.items():
            trial.set_user_attr(key, fact)
        reported = self._trials()[number].intermediate_values  # by a driver that died before it could tell the rest
        for step in sorted(steps.keys() - reported.keys()):
            trial.report(steps[step], step)
        if math.isnan(value):
            self.study.tell(number, state=TrialState.FAIL)
        else:
            self.study.tell(number, value)


@contextmanager
def _experimental() -> Iterator[None]:
    """Use what Optuna calls experimental without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield


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
