"""Time model: how long trials take. The only source of the times in `plan`, in the live line and in `status`.

A workload's `cost` counts products and elements for an average processor core. It knows neither this machine
nor the kernels that a recipe needs, so it may be off by a factor of 10. `TimeModel` corrects it by
measurement: the seconds of finished trials in the state folder over the cost of the same trials, from those
most like the trial in question. Where the state folder has nothing as near, trials count that this machine
ran for other state folders (`MachinePaces`). Of a trial that went on from a state that another one left, only
the steps that it computed itself count.

A sweep's time is that of its trials: those that wait, those that a search may still add (`unproposed`), and
those that run. `time_left` divides them among the slots. `plan` calls it before anything runs; `Countdown`
calls it while the sweep runs, and leaves the result in the ledger for `status`. An estimate that trials
overrun is made anew from those that run.

Trials of other workloads, engines, classes of device or data say nothing and are not read.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ablate import cache, provenance
from ablate.experiment.arms import Arm, KnobError
from ablate.experiment.load import Experiment
from ablate.experiment.recorded_spec import RecordedSpec
from ablate.experiment.roles import GROUPS
from ablate.experiment.search_space import conditions, size
from ablate.files import lock, write
from ablate.recipes import Recipe
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.training.fork_design import Forks
from ablate.training.workloads import WORKLOADS
from ablate.version import __version__

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
are not read."""
_MOST_LOADS, _MOST_PACES = 300, 8


@dataclass(frozen=True)
class Load:
    """Work of one trial: the workload's own cost, and the properties that decide how far that is from the
    time needed."""

    kind: tuple[str, str, str]
    """Workload, engine, class of device."""
    recipe: str
    plain: bool
    cost: float
    steps: int

    @classmethod
    def of(cls, arm: Arm, experiment: Experiment, device: str) -> "Load":
        kind = (experiment.base.workload, experiment.engine, device)
        return cls.made(kind, arm.config, arm.recipe, experiment.forks(arm))

    @classmethod
    def made(
        cls, kind: tuple[str, str, str], config: Any, recipe: Recipe, forks: Forks | None = None
    ) -> "Load":
        """Return the load of a workload's configuration, of a class in WORKLOADS, under a recipe. `forks`:
        windows of a forked trial, whose cost is taken to be that of as many steps of a full run."""
        steps = forks.steps if forks else config.steps
        cost = config.cost(not recipe.plain) * steps / config.steps
        return cls(kind, recipe.model_dump_json(), recipe.plain, cost, steps)

    def distance(self, other: "Load") -> float:
        """Return the difference in the logarithm of cost per step, plus a constant if recipe or precision
        differ."""
        own, others = (math.log(max(one.cost, 1e-9) / one.steps) for one in (self, other))
        difference = abs(own - others)
        if self.plain != other.plain:
            return difference + _OTHER_PRECISION
        return difference + (_OTHER_RECIPE if self.recipe != other.recipe else 0.0)


Measured = tuple[Load, float]
"""Load of a trial that ran, and its seconds divided by its cost."""
Trials = Counter[tuple[Load, float]]
"""Number of trials by load and by the share of its steps that each computes itself."""


class TimeModel:
    """Estimated seconds of a trial, by its load, from trials that were measured."""

    def __init__(self, experiment: Experiment, store: Store, device: str) -> None:
        self._kind = (experiment.base.workload, experiment.engine, device)
        self._measured: list[Measured] = []
        """Trials of this state folder, oldest first."""
        self._recalled: list[Measured] = []
        """Trials of other state folders on this machine, oldest first."""
        self.recalled = 0
        """Number of these trials, once an estimate is based on them."""
        self._scales: dict[Load, tuple[int, float]] = {}
        for load, seconds in reversed([*_results(store.root, self._kind, experiment.base.config)]):
            self.learn(load, seconds)
        self._earlier = self.measured

    @property
    def learnt(self) -> list[Measured]:
        """Trials that ran since."""
        return self._measured[self._earlier :]

    @property
    def measured(self) -> int:
        return len(self._measured)

    def learn(self, load: Load, seconds: float) -> None:
        """Add a trial that has just run and took `seconds` for all of its steps."""
        self._measured.append((load, seconds / max(load.cost, 1e-9)))

    def recall(self, paces: Iterable[Measured]) -> None:
        """Use trials of other state folders, oldest first, where this one has none as near."""
        self._recalled = [(load, pace) for load, pace in paces if load.kind == self._kind]
        self._scales = {}

    def seconds(self, load: Load) -> float:
        """Return the estimated seconds of one trial that starts at its first step."""
        # After each new trial among few, fewer and fewer times among many.
        if load not in self._scales or self.measured > 1.1 * self._scales[load][0]:
            self._scales[load] = self.measured, self._scale(load)
        return self._scales[load][1] * load.cost

    def sum_and_longest(self, trials: Trials) -> tuple[float, float]:
        """Return the seconds of trials, one after the other, and those of the longest of them."""
        each = [(count, part * self.seconds(load)) for (load, part), count in trials.items() if count]
        return sum(count * one for count, one in each), max((one for _, one in each), default=0.0)

    def _scale(self, load: Load) -> float:
        near = _nearest(load, self._measured)
        if not near or near[0][0] > _AS_NEAR:
            recalled = _nearest(load, self._recalled)
            if recalled and (not near or recalled[0][0] < near[0][0]):
                near, self.recalled = recalled, len(self._recalled)
        return median(pace for _, pace in near) if near else 1.0


def _nearest(load: Load, trials: list[Measured]) -> list[tuple[float, float]]:
    """Return distance, and seconds over cost, of the trials most like a load, the latest of equal ones."""
    near = sorted((load.distance(other), -order, pace) for order, (other, pace) in enumerate(trials))
    return [(distance, pace) for distance, _, pace in near[:_NEAREST] if distance <= near[0][0] + _AS_NEAR]


def _has_speed(estimate: float, spent: float, done: float) -> bool:
    """Return True if a trial's own speed says when it ends: it ran long enough, or longer than estimated."""
    return done >= _MEASURABLE or (done > 0 and spent > estimate)


def time_left(
    waiting: float, longest: float, running: Iterable[tuple[float, float, float]], slots: int
) -> float:
    """Return the seconds until the last trial ends; 0 while a running one takes longer than estimated and
    none has a speed to make the estimate anew from.

    All that waits is taken to be as many times slower than estimated as the running trials with a speed are.
    There, the estimate counts as a tenth of a trial: at first, most of the time that a trial has spent is its
    start. A trial with a speed takes at least another second: it has yet to end. `waiting`: estimated seconds
    of all waiting trials, one after the other; `longest`: those of the longest of them. `running`: of each
    running trial the estimated seconds, the seconds that it has run, and the share of its steps that are
    done, in [0, 1]. `slots`: trials that run at once.
    """
    running = list(running)
    known = [trial for trial in running if _has_speed(*trial)]
    if not known and any(spent > estimate for estimate, spent, _ in running):
        return 0.0
    prior = _MEASURABLE * sum(estimate for estimate, _, _ in known)
    expected = prior + sum(estimate * done for estimate, _, done in known)
    slowdown = (prior + sum(spent for _, spent, _ in known)) / expected if expected else 1.0
    left = [
        max(1.0, spent * (1 - done) / done)
        if _has_speed(slowdown * estimate, spent, done)
        else max(0.0, slowdown * estimate - spent)
        for estimate, spent, done in running
    ]
    return max((slowdown * waiting + sum(left)) / max(1, slots), slowdown * longest, *left, 0.0)


class Timed(NamedTuple):
    """Running trial, as far as its time is concerned."""

    load: Load
    part: float
    """Share of its steps that it computes itself."""
    started: float
    done: float
    """Share of these steps that is done."""


class Countdown:
    """Remaining time of one run of a sweep. It is computed at most once a second and counts down in between.
    The ledger fact `left` has it too, so that `ablate status` shows the same."""

    def __init__(self, experiment: Experiment, ledger: Ledger, store: Store, device: str) -> None:
        self.pace = TimeModel(experiment, store, device)
        self.waiting = Trials()
        self._experiment, self._ledger, self._device = experiment, ledger, device
        self._at, self._seconds = -math.inf, 0.0

    def left(self, running: Iterable[Timed], slots: int, asks: int, confirmed: bool) -> float:
        """Return the seconds until everything that runs, waits or may still be proposed is over; 0 as
        `time_left` says. `slots`: trials that run at once; `asks`: points that a search may still propose;
        `confirmed`: the winner's run on fresh seeds is already among the waiting trials."""
        now = time.time()
        if not 0 <= now - self._at < _CLOCK_SECONDS:  # negative if the clock was set back
            members = self._ledger.members() if self._experiment.keys.blame else ()
            groups = sum(member.role in GROUPS for member in members)
            later = unproposed(self._experiment, self._device, asks, not confirmed, groups)
            parts = [
                (part * self.pace.seconds(load), max(0.0, now - started), done)
                for load, part, started, done in running
            ]
            waiting, longest = self.pace.sum_and_longest(self.waiting + later)
            self._at, self._seconds = now, time_left(waiting, longest, parts, slots)
            self._ledger.facts.left = self._at, self._seconds
        return max(0.0, self._seconds - (now - self._at))


# Measured trials


def _results(root: Path, kind: tuple[str, str, str], config: Any) -> Iterator[tuple[Load, float]]:
    """Yield load and seconds of the newest finished trials of this kind, newest first; seconds as if it
    computed all steps. `config`: the experiment's workload, of a class in WORKLOADS."""
    ours, data = config.model_dump(mode="json"), config.fingerprint()
    ended: list[tuple[float, Path]] = []
    for folder in (root / "trials").iterdir() if (root / "trials").exists() else ():
        with suppress(FileNotFoundError, NotADirectoryError):
            ended.append(((folder / "result.json").stat().st_mtime, folder))
    for _, folder in sorted(ended, reverse=True)[:_MOST_READ]:
        # Of another version, or damaged: whoever adopts it says so.
        with suppress(OSError, ValueError, KeyError, TypeError):
            spec = RecordedSpec.parse((folder / "spec.json").read_bytes())
            result = json.loads((folder / "result.json").read_bytes())
            if (spec.workload, spec.engine, spec.device) != kind or result["status"] != "done":
                continue
            theirs = spec.config
            if spec.data != data or any(theirs.get(name) != ours.get(name) for name in _SAME):
                continue
            moved = {"data": ours["data"]} if "data" in theirs else {}
            parts = ({**theirs, **moved}, spec.recipe, spec.forks)
            load = _load(kind, *map(json.dumps, parts))
            computed = result["steps"] - _start(folder, result["attempt"])
            if computed > 0:
                yield load, result["seconds"] * load.steps / computed


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


class MachinePaces:
    """Measured trials of this machine, kept in the cache from one state folder to the next: one small file
    for this processor, class of device and version of the package.

    A new state folder has no finished trial, and its first estimate could be wrong by a factor of five on a
    machine that had run the same recipes an hour before. Not kept: trials of a user's own code, whose cost is
    a guess, and trials of a cluster, which ran elsewhere. The file can be deleted at any time.
    """

    def __init__(self, device: str) -> None:
        """`device`: class of device, `cpu` or `cuda`."""
        name = cache.key_of("paces", __version__, provenance.cpu_model(), device)
        self._path = cache.root() / "paces" / f"{name}.json"

    @classmethod
    def of(cls, experiment: Experiment, device: str, cluster: bool) -> "MachinePaces | None":
        """Return the paces that an experiment's trials can be compared with. None if there are none: for a
        user's own code, and for trials that run on a cluster, whose machines may be others."""
        return None if cluster or experiment.base.config.own_code else cls(device)

    def read(self) -> list[Measured]:
        """Return the remembered trials, oldest first; of a damaged file, those before the damage."""
        found: list[Measured] = []
        with suppress(OSError, KeyError, TypeError, ValueError):
            for entry in json.loads(self._path.read_bytes())["paces"]:
                load = Load(**entry["load"] | {"kind": tuple(entry["load"]["kind"])})
                found += [(load, float(pace)) for pace in entry["ratios"]]
        return found

    def keep(self, learnt: Iterable[Measured]) -> None:
        """Add trials that have run here. Does nothing if the cache cannot be written: an estimate is worth no
        error."""
        if not (new := [*learnt]):
            return
        with suppress(OSError), lock(self._path.with_suffix(".lock")):
            kept: dict[Load, list[float]] = {}
            for load, pace in (*self.read(), *new):
                kept[load] = [*kept.pop(load, []), pace][-_MOST_PACES:]  # those of now come last
            entries = [{"load": asdict(load), "ratios": paces} for load, paces in kept.items()]
            write(self._path, {"time": time.time(), "paces": entries[-_MOST_LOADS:]})


def unproposed(experiment: Experiment, device: str, asks: int, confirms: bool, groups: int) -> Trials:
    """Return the largest number of trials that a search may still add.

    Repeated points add no trial, so the size of a finite space is a limit. If knobs change the workload, each
    of its values needs a baseline of its own. `asks`: points that the search may still propose. `confirms`:
    include the winner's run on fresh seeds. `groups`: number of runs of groups of units that a search for a
    cause has requested.
    """
    search, found = experiment.keys.search, Trials()
    if experiment.blamed:
        load = Load.of(experiment.arms[-1], experiment, device)
        found[load, 1.0] = max(0, experiment.blamed[0].runs - 2 * len(experiment.seeds) - groups)
    again = (search.confirm or 0) if search and confirms else 0
    if search is None or (asks <= 0 and not again):
        return found
    points = min(max(0, asks), experiment.most_searched)
    workload = [knob for knob in experiment.space if knob.startswith("workload.")]
    needed = {*workload, *(other for knob in workload for other in conditions(knob, experiment.space))}
    space = {knob: one for knob, one in experiment.space.items() if knob in needed}
    own = size(space, points) if workload else 0
    counts = (points * len(experiment.seeds) + again, own * len(experiment.seeds) + again)
    # An arm and its baseline, each unconditional knob at its middle; the file's own values if that fails.
    knobs = {knob: dimension.middle for knob, dimension in experiment.space.items() if not dimension.when}
    try:
        typical = experiment.propose(knobs)
    except KnobError:
        typical = experiment.base.arm({}), experiment.base.arm({"recipe": "bf16"})
    for arm, count in zip(typical, counts, strict=True):
        found[Load.of(arm, experiment, device), 1.0] += count
    return found
