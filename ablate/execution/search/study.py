"""Optuna study of one sweep: proposes arms of a search, and shows the arms of searches and grids.

The points of a grid are added, those of a search are proposed by a sampler. The study is a projection of the
ledger: its journal can be deleted at any time and is then written again.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from ablate.execution.search.journal import WARM, Category, StudyJournal, decode, encode
from ablate.execution.search.optuna_private import generation_attribute
from ablate.execution.study_points import Point
from ablate.execution.sweep_control import put_aside
from ablate.experiment.load import Experiment
from ablate.experiment.search_space import Dimension, Kind
from ablate.files import Json

optuna.logging.set_verbosity(optuna.logging.ERROR)

ARM = "arm"
"""Only parameter of a study whose experiment lists its arms by name."""
ENDED = "neither diverged nor out of memory"
"""Constraint that every arm has."""

POPULATION = 10
"""Population size of NSGA-II: searches here propose tens of arms, not thousands."""

_MOST_CHOICES = 100

SAMPLERS = {
    "tpe": lambda seed: optuna.samplers.TPESampler(
        seed=seed, multivariate=True, group=True, n_startup_trials=8
    ),
    "random": lambda seed: optuna.samplers.RandomSampler(seed=seed),
    "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=8),
    "cmaes": lambda seed: optuna.samplers.CmaEsSampler(seed=seed),
    "nsga2": lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=POPULATION),
}


def _factor(rungs: Sequence[int]) -> int:
    """Return the ratio of the first two rungs; after a rung, one arm of so many continues."""
    return rungs[1] // rungs[0] if rungs[1:] else 3


PRUNERS = {
    "median": lambda rungs: optuna.pruners.MedianPruner(n_startup_trials=0, n_min_trials=5),
    "asha": lambda rungs: optuna.pruners.SuccessiveHalvingPruner(
        min_resource=rungs[0], reduction_factor=_factor(rungs)
    ),
    # One bracket a rung: it takes the whole logarithm of max over min, which rounding may put just below.
    "hyperband": lambda rungs: optuna.pruners.HyperbandPruner(
        min_resource=rungs[0], max_resource=rungs[-1] + 1, reduction_factor=_factor(rungs)
    ),
    "wilcoxon": lambda rungs: optuna.pruners.WilcoxonPruner(p_threshold=0.1),
}


def distribution(dimension: Dimension) -> BaseDistribution:
    """Convert a knob's range to Optuna's distribution."""
    if dimension.kind == "uniform":
        return FloatDistribution(dimension.low, dimension.high, log=dimension.log)
    if dimension.kind == "int":
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return CategoricalDistribution([encode(choice) for choice in dimension.choices])


def _shown(dimension: Dimension) -> Dimension | None:
    """Return the form in which a grid's list of values appears in its study, from which nothing is sampled.
    Optuna repeats the categories in every trial, so a long list becomes a range, or None if its values are
    not numbers."""
    values = dimension.choices
    if len(values) <= _MOST_CHOICES:
        return dimension
    numbers = [value for value in values if isinstance(value, int | float) and type(value) is not bool]
    if len(numbers) < len(values):
        return None
    kind: Kind = "int" if all(type(number) is int for number in numbers) else "uniform"
    return Dimension(kind, low=min(numbers), high=max(numbers))


class Study:
    """Optuna study of one sweep, in a journal beside the ledger. Use it from one thread that holds the
    sweep's lock.

    Points are counted from 0 in the order of the ledger. Optuna's own numbers start after the `warm` points:
    arms of earlier sweeps that the sampler starts with. They are not arms of this sweep, and are not compared
    when pruning.
    """

    def __init__(
        self, journal: Path, experiment: Experiment, points: Sequence[Point], warm: Sequence[Point] = ()
    ) -> None:
        self._journal, self._experiment, self._warm = journal, experiment, warm
        names = tuple(arm.name for arm in experiment.arms if arm.name not in experiment.added)
        space = experiment.space or {ARM: Dimension("choice", names)}
        searched = experiment.keys.search is not None
        shown = {knob: part if searched else _shown(part) for knob, part in space.items()}
        self.distributions = {knob: distribution(dimension) for knob, dimension in shown.items() if dimension}
        self._constraints = [*(constraint.description for constraint in experiment.keys.constraints), ENDED]
        self.given_up: dict[int, int] = {}
        """Step of the report after which the pruner gave a point up, by number."""
        self.damaged: Path | None = None
        """New path of a journal that could not be read, and was written again."""
        try:
            self.study = self._open()
            agrees = self._agrees(points)
        except Exception:  # a changed byte can make Optuna's replay raise any of them
            agrees, self.damaged = False, put_aside(journal)
        if not agrees:
            journal.unlink(missing_ok=True)
            self.study = self._open()
        self._equip(len(points))
        for point in warm[len(self._trials()) :]:
            facts = {"values": list(point.values or ()), "constraints": self._broken(point.violations)}
            self._add(point, TrialState.COMPLETE, user_attrs={"arm": point.name, WARM: point.name}, **facts)
        known = len(self._trials()) - len(warm)
        for number, point in enumerate(points):
            if number >= known:
                self.add(point)
            else:
                for step in sorted(point.reports):
                    self.report(number, step, point.reports[step])

    def _open(self) -> optuna.Study:
        """Open the journal's study or create it; an existing study keeps its directions."""
        objectives = self._experiment.objectives
        self._file = StudyJournal(self._journal)
        self._storage = JournalStorage(self._file)
        study = optuna.create_study(
            storage=self._storage,
            study_name=self._experiment.name,
            directions=[metric.direction for metric in objectives],
            load_if_exists=True,
        )
        study.set_user_attr("question", self._experiment.keys.question)
        with _quiet():
            study.set_metric_names([metric.name for metric in objectives])
        self._id = self._storage.get_study_id_from_name(self._experiment.name)
        return study

    def _equip(self, points: int) -> None:
        search = self._experiment.keys.search
        # A sampler made again with the same seed would propose the same points again: the seed depends on
        # the number of trials so far.
        seed = (search.seed * 1_000_003 + points) % 2**32 if search else 0
        with _quiet():
            self.study.sampler = SAMPLERS[search.sampler if search else "random"](seed)
            self.study.pruner = optuna.pruners.NopPruner()
            if search and search.pruner:
                self.study.pruner = PRUNERS[search.pruner](search.rungs)

    # The journal and the ledger

    def _agrees(self, points: Sequence[Point]) -> bool:
        """Return True if everything in the journal agrees with the ledger's points, which may be more."""
        trials, warm = self._trials(), len(self._warm)
        directions = [direction.name.lower() for direction in self.study.directions]
        return (
            len(self._storage.get_all_studies()) == 1
            and directions == [metric.direction for metric in self._experiment.objectives]
            and len(trials) <= warm + len(points)
            and all(map(self._same_warm, trials, self._warm))
            and all(map(self._same, trials[warm:], points))
        )

    def _same(self, trial: FrozenTrial, point: Point) -> bool:
        reported = trial.intermediate_values.items() <= point.reports.items() or not self._experiment.prunes
        if not self._same_place(trial, point) or not reported or WARM in trial.user_attrs:
            return False
        match trial.state:
            case TrialState.RUNNING:
                return not point.refused
            case TrialState.FAIL:
                return point.refused or (point.values is not None and any(map(math.isnan, point.values)))
            case TrialState.PRUNED:
                return point.pruned
            case TrialState.COMPLETE:
                return self._same_end(trial, point)
        return False

    def _same_warm(self, trial: FrozenTrial, point: Point) -> bool:
        ended = self._same_place(trial, point) and self._same_end(trial, point)
        return ended and trial.user_attrs.get(WARM) == point.name

    def _same_place(self, trial: FrozenTrial, point: Point) -> bool:
        params, distributions = self._params(point)
        return trial.params == params and trial.distributions == distributions

    def _same_end(self, trial: FrozenTrial, point: Point) -> bool:
        values = None if point.values is None else list(point.values)
        compared = "gap" not in trial.user_attrs or point.compared.items() <= trial.user_attrs.items()
        return trial.values == values and trial.constraints == self._broken(point.violations) and compared

    def _broken(self, violations: Sequence[float]) -> dict[str, float]:
        return dict(zip(self._constraints, violations, strict=True)) if violations else {}

    def _params(self, point: Point) -> tuple[dict[str, Category], dict[str, BaseDistribution]]:
        """Return a point's parameters in today's ranges; an older point widens a range or omits a knob."""
        params, distributions = {}, {}
        for knob, known in self.distributions.items():
            if knob != ARM and knob not in point.knobs:
                continue
            value = point.name if knob == ARM else encode(point.knobs[knob])
            if isinstance(known, FloatDistribution | IntDistribution):
                known = type(known)(min(known.low, value), max(known.high, value), log=known.log)
            elif not any(type(value) is type(choice) and value == choice for choice in known.choices):
                continue
            params[knob], distributions[knob] = value, known
        return params, distributions

    def _trials(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _trial(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, len(self._warm) + number)

    # Points

    def ask(self) -> tuple[int, dict[str, Json]]:
        """Propose a new point. Return its number in the study, and the knobs that exist beside each other."""
        knobs: dict[str, Json] = {}
        with _quiet():
            trial = self.study.ask()
            for knob, dimension in self._experiment.space.items():
                if dimension.applies(knobs):
                    known = self.distributions[knob]
                    if isinstance(known, CategoricalDistribution):
                        knobs[knob] = decode(trial.suggest_categorical(knob, known.choices))
                    else:
                        whole = isinstance(known, IntDistribution)
                        suggest = trial.suggest_int if whole else trial.suggest_float
                        knobs[knob] = suggest(knob, known.low, known.high, log=known.log)
        return trial.number - len(self._warm), knobs

    def add(self, point: Point) -> None:
        """Add a point of the ledger as the next number, with its reports. Pruning is not decided again: the
        ledger has the decision."""
        state = TrialState.FAIL if point.refused else TrialState.RUNNING
        self._add(point, state, user_attrs={"arm": point.name})
        number = len(self._trials()) - len(self._warm) - 1
        for step in sorted(point.reports):
            self.report(number, step, point.reports[step])
            self.given_up.pop(number, None)

    def _add(self, point: Point, state: TrialState, **facts: object) -> None:
        params, distributions = self._params(point)
        generation = {}
        if isinstance(self.study.sampler, optuna.samplers.NSGAIISampler):  # else it would be no parent
            generation = {generation_attribute(self.study.sampler): len(self._trials()) // POPULATION}
        facts |= {"params": params, "distributions": distributions, "system_attrs": generation}
        self.study.add_trial(create_trial(state=state, **facts))

    def running(self) -> list[int]:
        """Return the numbers of the points that are not settled."""
        trials = self._trials()[len(self._warm) :]
        return [number for number, trial in enumerate(trials) if trial.state == TrialState.RUNNING]

    def refuse(self, number: int, why: str) -> None:
        """Settle a proposed point that cannot be run."""
        self._storage.set_trial_user_attr(self._trial(number), "refused", why)
        self._settle(number, TrialState.FAIL)

    def report(self, number: int, step: int, value: float) -> None:
        """Report a point's value at a rung, or of the seed at this position, to the pruner, which decides at
        once. A second report for the same step is ignored."""
        trial = self._trial(number)
        known = self._storage.get_trial(trial)
        if self.prunes(number) or known.state.is_finished() or step in known.intermediate_values:
            return
        self._storage.set_trial_intermediate_value(trial, step, value)
        with _quiet():
            if self.study.pruner.prune(self.study, self._storage.get_trial(trial)):
                self.given_up[number] = step

    def prunes(self, number: int) -> bool:
        """Return True if the pruner has given the point up; later reports are ignored."""
        return number in self.given_up

    def tell(
        self,
        number: int,
        values: Sequence[float],
        steps: Mapping[int, float],
        facts: Mapping[str, Json],
        violations: Sequence[float] = (),
        pruned: bool = False,
    ) -> None:
        """Settle a point.

        `values`: mean of each objective; a NaN marks the point as failed. `steps`: mean of the main metric by
        step; ignored for several objectives, and if there is a pruner, whose reports are shown instead.
        `facts`: user attributes, such as arm, seeds, MLflow runs. `violations`: amount by which it breaks
        each constraint, the last of which is ENDED. `pruned`: the pruner gave it up; it then has no values.
        """
        with self._file.together():  # about thirty operations
            trial = self._trial(number)  # of the storage, since to make an optuna.Trial is to ask the sampler
            known = self._storage.get_trial(trial)  # told by a driver that died before it could tell the rest
            for key, fact in facts.items():
                self._storage.set_trial_user_attr(trial, key, fact)
            for key, excess in self._broken(violations).items():
                if key not in known.constraints:
                    optuna.Trial(self.study, trial).set_constraint(key, excess)
            if not self._experiment.prunes and len(values) == 1:
                for step in sorted(steps.keys() - known.intermediate_values.keys()):
                    self._storage.set_trial_intermediate_value(trial, step, steps[step])
            failed = any(map(math.isnan, values))
            state = TrialState.PRUNED if pruned else TrialState.FAIL if failed else TrialState.COMPLETE
            self._settle(number, state, values if state == TrialState.COMPLETE else None)

    def _settle(self, number: int, state: TrialState, values: Sequence[float] | None = None) -> None:
        with _quiet():
            self.study.tell(len(self._warm) + number, values, state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's warnings about experimental features, infinite values, and constraints that a sampler
    ignores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield
