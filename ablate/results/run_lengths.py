"""Finished runs that are not comparable or not distinct, and the steps of a run until it reaches a loss.

A function that returns at step 50 of 100 has finished, and its last loss is that of step 50. Beside a run of
100 steps it looks worse, whatever the recipe does. Built-in workloads take the steps of their spec.

Runs with the same values: copies of one run, or seeds that did nothing.

Five runs that agree to the last digit at every step are one run, five times: their script ignored its seed,
or one file was copied. An interval that takes them for five seeds rests on the spread of the baseline alone.
Runs are compared at the steps that both have, by the metric of the question; those of fewer than three steps
by all their losses and scores. Times, memory and learning rates are not compared: they differ between copies,
or are equal between runs. A number that another file rounds is the same number.

    seeds 0, 1: 3.71689, 3.41516, 3.10841    the same values: sure
    seeds 2, 3: 0.91234                      the same value, as two runs may have by chance: a remark

Two runs are surely one if they agree at three values of five significant digits, or at six of four, that are
not all one number.
"""

import functools
import itertools
import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from ablate.store.judged import FOREIGN
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.training.metric_names import parse, target_of
from ablate.training.workloads import abilities

_SURE = {5: 3, 4: 6}
"""Number of values from which runs are not equal by chance, by the significant digits of each."""
_FEW = 3
"""Steps below which other metrics are compared, too."""
_OUTCOMES = (
    "loss",
    "acc",
    "ppl",
    "perplex",
    "bpb",
    "nll",
    "entropy",
    "err",
    "score",
    "mse",
    "auc",
    "f1",
    "bleu",
)
"""Parts of the names of losses and scores, of which copies have the same."""

_Points = Mapping[str, Mapping[int, float]]
"""Values by step, by metric."""
Lasts = Mapping[int, Mapping[str, float]]
"""Last values by number of the trial, and by metric."""


@dataclass(frozen=True)
class Copies:
    """Two or more runs with the same values."""

    members: tuple[Member, ...]
    where: str
    """Steps at which the first two are equal, as text: `at all 5 steps`."""
    sure: bool
    """True if they cannot be equal by chance, so that they count as one."""

    @property
    def again(self) -> list[int]:
        """Trials that count no more, since an earlier one has the same values."""
        return [member.trial for member in self.members[1:]] if self.sure else []

    @property
    def seeds(self) -> dict[str, list[int]]:
        """Seeds by name of the arm."""
        arms = dict.fromkeys(member.name for member in self.members)
        return {arm: sorted(each.seed for each in self.members if each.name == arm) for arm in arms}

    def text(self, noun: str = "seed") -> str:
        """Return that they have the same values, and where: `seeds 0 to 4 of nvfp4 have ... at all 5 steps`.
        `noun`: `run` if the source names no seeds, so that their numbers are given here."""
        parts = []
        for arm, seeds in self.seeds.items():
            whole = len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1
            listed = f"{seeds[0]} to {seeds[-1]}" if whole else " and ".join(map(str, seeds))
            parts.append(f"{noun}{'s' * (len(seeds) > 1)} {listed} of {arm}")
        return f"{' and '.join(parts)} have the same values {self.where}"


@dataclass(frozen=True)
class Lengths:
    """Finished runs whose last record stands before the last step of their spec, by number of the trial, and
    those with the same values."""

    early: dict[int, tuple[int, int]]
    """Step of the last record, and the spec's steps."""
    uneven: frozenset[int]
    """Those of them with a longer run of the same seed and the same spec's steps beside them."""
    copies: Sequence[Copies] = ()
    """Runs of an arm with the same values."""


def lengths(ledger: Ledger, groups: Mapping[int, Sequence[Member]], lasts: Lasts, metric: str) -> Lengths:
    """Return the runs that ended early, and those with the same values. `groups`: members of arms that are
    compared with each other, by number of the arm."""
    early: dict[int, tuple[int, int]] = {}
    beside: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    if ledger.facts.design is not None:  # windows have steps of their own
        return Lengths({}, frozenset())
    for member in itertools.chain.from_iterable(groups.values()):
        spec = member.resolved
        foreign = spec.workload == FOREIGN
        if not abilities(spec.workload).own_code and not foreign:
            break  # a sweep has one workload
        if member.status != "done":
            continue
        steps, last = spec.config["steps"], spec.config["last"] if foreign else ledger.last_step(member.trial)
        beside[-1 if foreign else member.seed, steps][member.trial] = last
        if last < steps:
            early[member.trial] = last, steps
    ends = [(group, max(group.values())) for group in beside.values()]
    uneven = frozenset(trial for group, most in ends for trial, last in group.items() if last < most)
    same = [each for members in groups.values() for each in copies(ledger, members, lasts, metric)]
    return Lengths(early, uneven, same)


def steps_to(losses: Mapping[int, float], target: float) -> float:
    """Return the steps after which a loss, by ascending step, is down to a target for the first time; NaN if
    it never is. Between two evaluations the loss is taken to fall with the logarithm of the steps, which an
    evaluation before the first step does not have."""
    earlier: tuple[int, float] | None = None
    for step, loss in losses.items():
        if loss <= target:
            if earlier is None or loss == target:
                return float(step)
            share = (earlier[1] - target) / (earlier[1] - loss)
            return math.exp(math.log(earlier[0]) + share * math.log(step / earlier[0]))
        earlier = (step, loss) if step and math.isfinite(loss) else earlier
    return math.nan


def copies(ledger: Ledger, members: Iterable[Member], lasts: Lasts, metric: str) -> list[Copies]:
    """Return the groups of finished runs with the same values, among members that are compared with each
    other by the metric of the question. Only runs with nearly equal last values are read."""
    name = metric if target_of(metric) is None else "val/loss"
    found: list[Copies] = []
    placed: dict[int, list[tuple[float, int]]] = {}  # last value and place in `found`, sorted, by decimals
    points = functools.cache(lambda trial: _points(ledger, trial, name))
    for member in () if parse(name).of_machine else members:
        last = lasts[member.trial].get(name, math.nan)
        if member.status != "done" or not math.isfinite(last):
            continue
        places = _decimals(last)
        for place in _nearby(placed, last, places):
            each = found[place]
            first = each.members[0].trial
            same = _near(last, lasts[first][name]) and _same(points(first), points(member.trial))
            if same:
                found[place] = Copies((*each.members, member), same[0], each.sure and same[1])
                break
        else:
            insort(placed.setdefault(places, []), (last, len(found)))
            found.append(Copies((member,), "", True))
    return [each for each in found if len(each.members) > 1]


def _nearby(placed: Mapping[int, list[tuple[float, int]]], value: float, places: int) -> list[int]:
    """Return the places of all values that may be near one with so many decimals, ascending: of thousands of
    runs, few are looked at."""
    found = []
    for others, rows in placed.items():
        reach = 0.51 * 10.0 ** -min(places, others)
        found += rows[bisect_left(rows, (value - reach, 0)) : bisect_left(rows, (value + reach, 0))]
    return sorted(place for _, place in found)


def _points(ledger: Ledger, trial: int, metric: str) -> _Points:
    """Return the finite values of a run's metric; of one with few steps, those of all losses and scores."""
    names = [metric]
    if len(ledger.series(trial, metric)) < _FEW:
        names += [name for name in ledger.names().values() if any(part in name.lower() for part in _OUTCOMES)]
    each = {name: ledger.series(trial, name).items() for name in names}
    return {name: {step: value for step, value in each[name] if math.isfinite(value)} for name in names}


def _same(one: _Points, other: _Points) -> tuple[str, bool] | None:
    """Return where two runs are equal, and if that is sure; None unless all values that both have are equal,
    and either it is sure or all have five digits."""
    values: list[float] = []
    digits: list[int] = []
    for name in one.keys() & other.keys():
        places = min(max(map(_decimals, each[name].values()), default=0) for each in (one, other))
        shared = [(one[name][step], other[name][step]) for step in one[name].keys() & other[name].keys()]
        if not all(_near(*pair, places) for pair in shared):
            return None
        values += [value for value, _ in shared]
        digits += [places + math.floor(math.log10(abs(value) or 1)) + 1 for value, _ in shared]
    many = any(sum(count >= least for count in digits) >= most for least, most in _SURE.items())
    sure = many and len({*values}) > 1
    if not sure and min(digits, default=0) < max(_SURE):
        return None
    several = f"of all {len(values)} losses and scores" if len(one) > 1 else f"at all {len(values)} steps"
    return several if len(values) > 1 else "at one step", sure


def _near(a: float, b: float, places: int | None = None) -> bool:
    """Return True for two numbers of which one may be the other, rounded to these or to its own places."""
    places = min(_decimals(a), _decimals(b)) if places is None else places
    return abs(a - b) <= 0.500001 * 10.0**-places


def _decimals(value: float) -> int:
    """Return the decimal places of a number as it is written, in 12 digits; negative for a multiple of 10."""
    return -int(Decimal(f"{value:.12g}").normalize().as_tuple().exponent)
