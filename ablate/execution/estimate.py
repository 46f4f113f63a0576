"""Estimate how long trials take: the only source of the times in `plan`, in the live view and in `status`.

A workload's `cost` counts products and elements for an average processor core. It knows neither this machine nor the kernels
that a recipe needs, so it may be off by a factor of 10. `Pace` corrects it by measurement: the seconds of finished trials in the
state folder over the cost of the same trials, from those most like the trial in question. Of a trial that went on from a state
that another one left, only the steps that it computed itself count. `time_left` turns seconds of trials into a time until the end.

Trials of other workloads, engines, classes of device or data say nothing and are not read.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from ablate.experiment.arms import Arm, KnobError
from ablate.experiment.load import Experiment
from ablate.experiment.search_space import Dimension, conditions, size
from ablate.numerics.spec import Spec
from ablate.recipes import Recipe
from ablate.results.ledger import Ledger
from ablate.results.trial_store import Store
from ablate.training.workloads import WORKLOADS

_MOST_READ = 256
"""Newest results that are read: `plan` must answer within a second, however many trials the state folder has."""
_NEAREST = 8
_OTHER_RECIPE, _OTHER_PRECISION, _AS_NEAR = math.log(1.5), math.log(4), math.log(2)
"""Distances between trials, on the scale of the logarithm of cost per step."""
_CLOCK_SECONDS = 1.0
_MEASURABLE = 0.1
"""The part of its steps after which a trial's own speed says when it ends."""
_SAME = ("model", "capture")
"""Fields of a workload that its cost may need to open: trials that differ in one of them, or in their data, are not read."""


@dataclass(frozen=True)
class Load:
    """One trial's work: its seconds by the workload's own cost, and what decides how far that is off."""

    kind: tuple[str, str, str]
    """Workload, engine, class of device."""
    recipe: str
    plain: bool
    cost: float
    steps: int

    @classmethod
    def of(cls, arm: Arm, experiment: Experiment, device: str) -> "Load":
        """The load of an arm's trials."""
        return cls.made((experiment.base.workload, experiment.engine, device), arm.config, arm.recipe)

    @classmethod
    def made(cls, kind: tuple[str, str, str], config: Spec, recipe: Recipe) -> "Load":
        """The load of this workload under this recipe."""
        return cls(kind, recipe.model_dump_json(), recipe.plain, config.cost(not recipe.plain), config.steps)

    def distance(self, other: "Load") -> float:
        """Difference in size, and more where recipe or precision differ."""
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


class Pace:
    """Seconds of trials, by their loads and by the trials that were measured."""

    def __init__(self, experiment: Experiment, store: Store, device: str) -> None:
        self._measured: list[tuple[Load, float]] = []
        """Load and seconds over cost, oldest first."""
        self._scales: dict[Load, tuple[int, float]] = {}
        kind = (experiment.base.workload, experiment.engine, device)
        for load, seconds in reversed(list(_results(store.root, kind, experiment.base.config))):
            self.learn(load, seconds)

    @property
    def measured(self) -> int:
        """Trials that were measured."""
        return len(self._measured)

    def learn(self, load: Load, seconds: float) -> None:
        """Count a whole trial in that took so many seconds."""
        self._measured.append((load, seconds / max(load.cost, 1e-9)))

    def seconds(self, load: Load) -> float:
        """Seconds of one trial, computed from its first step."""
        count, scale = self._scales.get(load, (0, 1.0))
        if self.measured > 1.1 * count:  # each new trial among few, fewer and fewer times among many
            scale = self._scale(load)
            self._scales[load] = self.measured, scale
        return scale * load.cost

    def _scale(self, load: Load) -> float:
        """Median of seconds over cost among the trials most like this one."""
        near = sorted(
            (load.distance(other), -order, ratio) for order, (other, ratio) in enumerate(self._measured)
        )
        return median(ratio for distance, _, ratio in near[:_NEAREST] if distance <= near[0][0] + _AS_NEAR)


def trial_left(estimate: float, spent: float, done: float) -> float:
    """Seconds until a trial ends that took `spent` seconds for the part `done` of its steps: at its own speed once that
    is measurable, as estimated before."""
    return spent * (1 - done) / done if done >= _MEASURABLE else max(0.0, estimate - spent)


def time_left(waiting: float, longest: float, running: Iterable[float], slots: int) -> float:
    """Seconds until the last trial ends. `waiting`: seconds of all trials that wait, `longest`: of the longest of them;
    `running`: seconds left of each trial that runs; `slots`: trials at once."""
    running = list(running)
    return max((waiting + sum(running)) / max(1, slots), longest, *running, 0.0)


class Timed(Protocol):
    """A trial that runs."""

    estimate: float
    """Seconds that it was estimated to take when it started."""
    started: float
    begun: int
    """The step that it went on from."""
    step: int
    steps: int


class Clock:
    """Time left of one run of a sweep. It is computed at most once a second and counts down between; the ledger fact `left`
    has it too, so that `ablate status` shows the same."""

    def __init__(self, experiment: Experiment, ledger: Ledger, store: Store, device: str) -> None:
        self.pace = Pace(experiment, store, device)
        self._experiment, self._ledger, self._device = experiment, ledger, device
        self._waiting: Counter[Load] = Counter()
        """Trials that wait, by load, each counted by the part of its steps that it computes."""
        self._at, self._seconds = -math.inf, 0.0

    def count(self, load: Load, part: float) -> None:
        """Count a trial in that waits from now on, or with a negative part one out that does not any more."""
        self._waiting[load] += part

    def left(self, running: Iterable[Timed], slots: int, asks: int, confirmed: bool) -> float:
        """Seconds until all is over that waits, runs or may still be proposed: `asks` points, and the run of a winner on fresh
        seeds unless it is `confirmed`."""
        now = time.time()
        if now - self._at >= _CLOCK_SECONDS:
            later = unproposed(self._experiment, asks, not confirmed, self._device)
            self._at = now
            self._seconds = self._computed(running, slots, later)
            self._ledger.describe(left=json.dumps([self._at, self._seconds]))
        return max(0.0, self._seconds - (now - self._at))

    def _computed(self, running: Iterable[Timed], slots: int, later: Mapping[Load, int]) -> float:
        seconds = {load: self.pace.seconds(load) for load, parts in self._waiting.items() if parts > 1e-9}
        waiting = sum(self._waiting[load] * each for load, each in seconds.items())
        longest = max((min(1.0, self._waiting[load]) * each for load, each in seconds.items()), default=0.0)
        waiting += sum(count * self.pace.seconds(load) for load, count in later.items())
        parts = [(item, (item.step - item.begun) / max(1, item.steps - item.begun)) for item in running]
        return time_left(
            waiting,
            longest,
            [trial_left(item.estimate, self._at - item.started, done) for item, done in parts],
            slots,
        )


# Measured trials


def _results(root: Path, kind: tuple[str, str, str], config: Spec) -> Iterator[tuple[Load, float]]:
    """Load and seconds of the newest finished trials like these, newest first; seconds as if all steps had been computed."""
    ours, data = config.model_dump(mode="json"), config.fingerprint()
    for folder in _newest(root / "trials"):
        with suppress(
            OSError, ValueError, KeyError, TypeError
        ):  # of another version, or damaged: whoever adopts it says so
            result, spec = (json.loads((folder / name).read_bytes()) for name in ("result.json", "spec.json"))
            if (*spec["workload"], spec["engine"], spec["device"]) != kind or result["status"] != "done":
                continue
            theirs = spec["workload"][kind[0]]
            if spec["data"] != data or any(theirs.get(name) != ours.get(name) for name in _SAME):
                continue
            moved = {"data": ours["data"]} if "data" in theirs else {}
            load = _load(kind, json.dumps(theirs | moved), json.dumps(spec["recipe"]))
            computed = result["steps"] - _start(folder, result["attempt"])
            if computed > 0:
                yield load, result["seconds"] * load.steps / computed


def _newest(trials: Path) -> list[Path]:
    """Folders of the trials that ended last."""
    ended: list[tuple[float, Path]] = []
    for folder in trials.iterdir() if trials.exists() else ():
        with suppress(FileNotFoundError, NotADirectoryError):
            ended.append(((folder / "result.json").stat().st_mtime, folder))
    return [folder for _, folder in sorted(ended, reverse=True)[:_MOST_READ]]


@lru_cache(maxsize=4 * _MOST_READ)
def _load(kind: tuple[str, str, str], config: str, recipe: str) -> Load:
    return Load.made(kind, WORKLOADS[kind[0]].model_validate_json(config), Recipe.model_validate_json(recipe))


def _start(folder: Path, attempt: int) -> int:
    """The step that the attempt which ended the trial went on from."""
    trunk = folder / f"trunk-{attempt}.json"
    if trunk.exists():
        return json.loads(trunk.read_bytes())["step"]
    if attempt == 1:
        return 0
    with (folder / f"events-{attempt}.jsonl").open() as events:
        return json.loads(events.readline()).get("resumed") or 0


# Trials that a search has yet to propose


def unproposed(experiment: Experiment, asks: int, confirms: bool, device: str) -> Counter[Load]:
    """The most trials that a search still brings with so many proposals, by load; `confirms`: the winner's run on fresh seeds too.

    A point that was proposed before brings no trial, so the size of a finite space is a limit. Where knobs turn the
    workload, each value of it needs a baseline of its own.
    """
    search = experiment.search
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
    """An arm and its baseline at the middle of each knob that always exists, or at the file's own values."""
    knobs = {knob: _middle(dimension) for knob, dimension in experiment.space.items() if not dimension.when}
    try:
        return experiment.propose(knobs)
    except KnobError:
        return experiment.base.arm({}), experiment.base.arm({"recipe": "bf16"})


def _middle(dimension: Dimension) -> Any:
    if dimension.kind == "choice":
        return dimension.choices[len(dimension.choices) // 2]
    middle = (
        math.sqrt(dimension.low * dimension.high) if dimension.log else (dimension.low + dimension.high) / 2
    )
    return round(middle) if dimension.kind == "int" else middle
