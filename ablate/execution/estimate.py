"""Estimate how long trials take: the only source of the times in `plan`, in the live view and in `status`.

A workload's `cost` counts products and elements for an average processor core. It knows neither this machine
nor the kernels that a recipe needs, so it may be off by a factor of 10. `TimeModel` corrects it by
measurement: the seconds of finished trials in the state folder over the cost of the same trials, from those
most like the trial in question. Where the state folder has nothing as near, trials count that this machine
ran for other state folders (`machine_paces`). Of a trial that went on from a state that another one left,
only the steps that it computed itself count. `time_left` turns seconds of trials into a time until the end.

An estimate that trials overrun is made anew from those that run: `slowdown` of their estimates holds for all
that waits, too.

Trials of other workloads, engines, classes of device or data say nothing and are not read.
"""

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from ablate.experiment.arms import Arm, KnobError
from ablate.experiment.load import Experiment
from ablate.experiment.recorded_spec import RecordedSpec
from ablate.experiment.search_space import Dimension, conditions, size
from ablate.files import Json
from ablate.recipes import Recipe
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.training.fork_design import Forks
from ablate.training.workloads import WORKLOADS

_MOST_READ = 256
"""Newest results that are read: `plan` must answer within a second, however many trials the state folder has.
"""
_NEAREST = 8
_OTHER_RECIPE, _OTHER_PRECISION, _AS_NEAR = math.log(1.5), math.log(4), math.log(2)
"""Distances between trials, on the scale of the logarithm of cost per step."""
_CLOCK_SECONDS = 1.0
_MEASURABLE = 0.1
"""Share of its steps after which a trial's own speed is used to estimate its end."""
_SAME = ("model", "capture")
"""Workload fields that its cost may have to read files for: trials that differ in one of them, or in data,
are not read.
"""


@dataclass(frozen=True)
class Load:
    """Work of one trial: the workload's own cost, and the properties that decide how far that is from the
    time needed.
    """

    kind: tuple[str, str, str]
    """Workload, engine, class of device."""
    recipe: str
    plain: bool
    cost: float
    steps: int

    @classmethod
    def of(cls, arm: Arm, experiment: Experiment, device: str) -> "Load":
        """Return the load of an arm's trials."""
        kind = (experiment.base.workload, experiment.engine, device)
        return cls.made(kind, arm.config, arm.recipe, experiment.forks(arm))

    @classmethod
    def made(
        cls, kind: tuple[str, str, str], config: Any, recipe: Recipe, forks: Forks | None = None
    ) -> "Load":
        """Return the load of a workload's configuration, of a class in WORKLOADS, under a recipe.

        `forks`: windows of a forked trial, whose cost is taken to be that of as many steps of a full run.
        """
        steps = forks.steps if forks else config.steps
        cost = config.cost(not recipe.plain) * steps / config.steps
        return cls(kind, recipe.model_dump_json(), recipe.plain, cost, steps)

    def distance(self, other: "Load") -> float:
        """Return the difference in the logarithm of cost per step, plus a constant if recipe or precision
        differ.
        """
        difference = abs(
            math.log(max(self.cost, 1e-9) / self.steps) - math.log(max(other.cost, 1e-9) / other.steps)
        )
        return difference + (
            _OTHER_PRECISION
            if self.plain != other.plain
            else _OTHER_RECIPE
            if self.recipe != other.recipe
            else 0.0
        )


class TimeModel:
    """Estimated seconds of a trial, by its load, from trials that were measured."""

    def __init__(self, experiment: Experiment, store: Store, device: str) -> None:
        self._measured: list[tuple[Load, float]] = []
        """Load, and seconds divided by cost, oldest first."""
        self._recalled: list[tuple[Load, float]] = []
        """The same of trials of other state folders on this machine, oldest first."""
        self.recalled = 0
        """Number of these trials, once an estimate is based on them."""
        self.learnt: list[tuple[Load, float]] = []
        """Load, and seconds divided by cost, of the trials that ran since."""
        self._scales: dict[Load, tuple[int, float]] = {}
        kind = (experiment.base.workload, experiment.engine, device)
        self._kind = kind
        for load, seconds in reversed(list(_results(store.root, kind, experiment.base.config))):
            self._measured.append((load, _ratio(load, seconds)))

    @property
    def measured(self) -> int:
        """Number of trials that were measured."""
        return len(self._measured)

    def learn(self, load: Load, seconds: float) -> None:
        """Add a trial that has just run and took `seconds` for all of its steps."""
        self._measured.append((load, _ratio(load, seconds)))
        self.learnt.append(self._measured[-1])

    def recall(self, paces: Iterable[tuple[Load, float]]) -> None:
        """Use trials of other state folders where this one has none as near.

        Args:
            paces: load, and seconds divided by cost, of trials on this machine, oldest first.
        """
        self._recalled = [(load, ratio) for load, ratio in paces if load.kind == self._kind]
        self._scales = {}

    def seconds(self, load: Load) -> float:
        """Return the estimated seconds of one trial that starts at its first step."""
        count, scale = self._scales.get(load, (-1, 1.0))
        if (
            count < 0 or self.measured > 1.1 * count
        ):  # each new trial among few, fewer and fewer times among many
            scale = self._scale(load)
            self._scales[load] = self.measured, scale
        return scale * load.cost

    def _scale(self, load: Load) -> float:
        """Return the median of seconds over cost among the trials most like this one; 1 if there are none."""
        near = _nearest(load, self._measured)
        if not near or near[0][0] > _AS_NEAR:
            recalled = _nearest(load, self._recalled)
            if recalled and (not near or recalled[0][0] < near[0][0]):
                near, self.recalled = recalled, len(self._recalled)
        return median(ratio for _, ratio in near) if near else 1.0


def _ratio(load: Load, seconds: float) -> float:
    return seconds / max(load.cost, 1e-9)


def _nearest(load: Load, trials: list[tuple[Load, float]]) -> list[tuple[float, float]]:
    """Return distance, and seconds over cost, of the trials most like a load, the latest of equal ones."""
    near = sorted((load.distance(other), -order, ratio) for order, (other, ratio) in enumerate(trials))
    return [(distance, ratio) for distance, _, ratio in near[:_NEAREST] if distance <= near[0][0] + _AS_NEAR]


def _has_speed(estimate: float, spent: float, done: float) -> bool:
    """Return True if a trial's own speed says when it ends: it ran long enough, or longer than estimated."""
    return done >= _MEASURABLE or (done > 0 and spent > estimate)


def slowdown(running: Iterable[tuple[float, float, float]]) -> float:
    """Return how many times as long as estimated trials take, by those that run; 1 while none has a speed.

    The estimate counts as a tenth of a trial: at first, most of the time that a trial has spent is its start.

    Args:
        running: of each trial the arguments of `trial_left`.
    """
    known = [trial for trial in running if _has_speed(*trial)]
    prior = _MEASURABLE * sum(estimate for estimate, _, _ in known)
    expected = prior + sum(estimate * done for estimate, _, done in known)
    return (prior + sum(spent for _, spent, _ in known)) / expected if expected else 1.0


def trial_left(estimate: float, spent: float, done: float) -> float:
    """Return the seconds until a trial ends, at least one once its own speed is used: it has yet to end.

    Args:
        estimate: seconds that it was estimated to take.
        spent: seconds that it has run.
        done: share of its steps that are done, in [0, 1]; once it is large enough, or the estimate is
            overrun, the trial's own speed is used.
    """
    own = _has_speed(estimate, spent, done)
    return max(1.0, spent * (1 - done) / done) if own else max(0.0, estimate - spent)


def time_left(waiting: float, longest: float, running: Iterable[float], slots: int) -> float:
    """Return the seconds until the last trial ends.

    Args:
        waiting: seconds of all waiting trials.
        longest: seconds of the longest of them.
        running: remaining seconds of each running trial.
        slots: trials that run at once.
    """
    running = list(running)
    return max((waiting + sum(running)) / max(1, slots), longest, *running, 0.0)


class Timed(Protocol):
    """Running trial, as far as its time is concerned."""

    @property
    def load(self) -> Load: ...
    @property
    def part(self) -> float: ...

    started: float
    begun: int
    """Step from which it resumed."""
    step: int
    steps: int


class Countdown:
    """Remaining time of one run of a sweep.

    It is computed at most once a second and counts down in between. The ledger fact `left` has it too, so
    that `ablate status` shows the same.
    """

    def __init__(self, experiment: Experiment, ledger: Ledger, store: Store, device: str) -> None:
        self.pace = TimeModel(experiment, store, device)
        self._experiment, self._ledger, self._device = experiment, ledger, device
        self._waiting: dict[Load, float] = defaultdict(float)
        """Waiting trials by load, each counted by the share of its steps that it computes."""
        self._at, self._seconds = -math.inf, 0.0

    def count(self, load: Load, part: float) -> None:
        """Add a waiting trial that computes the share `part` of its steps; a negative `part` removes one."""
        self._waiting[load] += part

    def left(self, running: Iterable[Timed], slots: int, asks: int, confirmed: bool) -> float:
        """Return the seconds until everything that runs, waits or may still be proposed is over; 0 while that
        takes longer than estimated and no trial that runs has a speed to make the estimate anew from.

        Args:
            running: trials in flight.
            slots: trials that run at once.
            asks: points that a search may still propose.
            confirmed: True if the winner's run on fresh seeds is already among the waiting trials.
        """
        now = time.time()
        if not 0 <= now - self._at < _CLOCK_SECONDS:  # negative if the clock was set back
            later = unproposed(self._experiment, asks, not confirmed, self._device)
            self._at = now
            self._seconds = self._computed(running, slots, later)
            self._ledger.facts.left = self._at, self._seconds
        return max(0.0, self._seconds - (now - self._at))

    def _computed(self, running: Iterable[Timed], slots: int, later: Mapping[Load, int]) -> float:
        seconds = {load: self.pace.seconds(load) for load, parts in self._waiting.items() if parts > 1e-9}
        waiting = sum(self._waiting[load] * each for load, each in seconds.items())
        longest = max((min(1.0, self._waiting[load]) * each for load, each in seconds.items()), default=0.0)
        waiting += sum(count * self.pace.seconds(load) for load, count in later.items())
        parts = [
            (
                item.part * self.pace.seconds(item.load),
                max(0.0, self._at - item.started),
                (item.step - item.begun) / max(1, item.steps - item.begun),
            )
            for item in running
        ]
        if any(spent > estimate for estimate, spent, _ in parts) and not any(_has_speed(*p) for p in parts):
            return 0.0
        times = slowdown(parts)
        left = [trial_left(times * estimate, spent, done) for estimate, spent, done in parts]
        return time_left(times * waiting, times * longest, left, slots)


# Measured trials


def _results(root: Path, kind: tuple[str, str, str], config: Any) -> Iterator[tuple[Load, float]]:
    """Yield load and seconds of the newest finished trials of this kind, newest first; seconds as if it
    computed all steps. `config`: the experiment's workload, of a class in WORKLOADS.
    """
    ours, data = config.model_dump(mode="json"), config.fingerprint()
    for folder in _newest(root / "trials"):
        with suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # of another version, or damaged: whoever adopts it says so
            spec = RecordedSpec.parse((folder / "spec.json").read_bytes())
            result = json.loads((folder / "result.json").read_bytes())
            if (spec.workload, spec.engine, spec.device) != kind or result["status"] != "done":
                continue
            theirs = spec.config
            if spec.data != data or any(theirs.get(name) != ours.get(name) for name in _SAME):
                continue
            moved = {"data": ours["data"]} if "data" in theirs else {}
            load = _load(
                kind, json.dumps({**theirs, **moved}), json.dumps(spec.recipe), json.dumps(spec.forks)
            )
            computed = result["steps"] - _start(folder, result["attempt"])
            if computed > 0:
                yield load, result["seconds"] * load.steps / computed


def _newest(trials: Path) -> list[Path]:
    """Return the folders of the trials that ended last."""
    ended: list[tuple[float, Path]] = []
    for folder in trials.iterdir() if trials.exists() else ():
        with suppress(FileNotFoundError, NotADirectoryError):
            ended.append(((folder / "result.json").stat().st_mtime, folder))
    return [folder for _, folder in sorted(ended, reverse=True)[:_MOST_READ]]


@lru_cache(maxsize=4 * _MOST_READ)
def _load(kind: tuple[str, str, str], config: str, recipe: str, forks: str) -> Load:
    return Load.made(
        kind,
        WORKLOADS[kind[0]].model_validate_json(config),
        Recipe.model_validate_json(recipe),
        None if forks == "null" else Forks.model_validate_json(forks),
    )


def _start(folder: Path, attempt: int) -> int:
    """Return the step from which the attempt that finished the trial resumed."""
    trunk = folder / f"trunk-{attempt}.json"
    if trunk.exists():
        return json.loads(trunk.read_bytes())["step"]
    if attempt == 1:
        return 0
    with (folder / f"events-{attempt}.jsonl").open() as events:
        return json.loads(events.readline()).get("resumed") or 0


# Trials that a search has yet to propose


def unproposed(experiment: Experiment, asks: int, confirms: bool, device: str) -> Counter[Load]:
    """Return the largest number of trials that a search may still add, by load.

    Repeated points add no trial, so the size of a finite space is a limit. If knobs change the workload, each
    of its values needs a baseline of its own.

    Args:
        experiment: the experiment.
        asks: points that the search may still propose.
        confirms: include the winner's run on fresh seeds.
        device: class of device, `cpu` or `cuda`.
    """
    search = experiment.keys.search
    again = (search.confirm or 0) if search and confirms else 0
    if search is None or (asks <= 0 and not again):
        return Counter()
    points = min(max(0, asks), experiment.most_searched)
    workload = [knob for knob in experiment.space if knob.startswith("workload.")]
    needed = {*workload, *(other for knob in workload for other in conditions(knob, experiment.space))}
    own = (
        size({knob: one for knob, one in experiment.space.items() if knob in needed}, points)
        if workload
        else 0
    )
    counts = (points * len(experiment.seeds) + again, own * len(experiment.seeds) + again)
    found: Counter[Load] = Counter()
    for arm, count in zip(_typical(experiment), counts, strict=True):
        found[Load.of(arm, experiment, device)] += count
    return found


def _typical(experiment: Experiment) -> tuple[Arm, Arm]:
    """Return an arm and its baseline, with each unconditional knob at its middle value; the file's own values
    if that fails.
    """
    knobs = {knob: _middle(dimension) for knob, dimension in experiment.space.items() if not dimension.when}
    try:
        return experiment.propose(knobs)
    except KnobError:
        return experiment.base.arm({}), experiment.base.arm({"recipe": "bf16"})


def _middle(dimension: Dimension) -> Json:
    if dimension.kind == "choice":
        return dimension.choices[len(dimension.choices) // 2]
    middle = (
        math.sqrt(dimension.low * dimension.high) if dimension.log else (dimension.low + dimension.high) / 2
    )
    return round(middle) if dimension.kind == "int" else middle
