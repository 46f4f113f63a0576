"""Calibration: which design tells most per hour for one model, and how narrow its intervals will be.

The problem. Whether full runs or forks are sharper, how long windows must be and how many seeds a question
takes depend on the model, its data and its rate. A design that is chosen by its results makes them look
better than they are.

The idea. A small sweep on seeds of its own runs a known-bad arm, a few unlike arms and the baseline in the
longest design. Every smaller one is part of it, so each candidate's noise and cost can be read off it:

    sharpness = |damage of the known-bad arm| / deviation of contrasts of unlike arms / sqrt(hours a seed)

which is Student's t of the known-bad arm after one hour. Contrasts are of unlike arms, never of twins, whose
noise is smaller. The width of an interval follows from deviation, seeds and the error of the evaluation.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import special

from ablate.errors import InputError
from ablate.experiment.forked_design import CALIBRATION, FEWEST_SEEDS, FULL_CALIBRATION
from ablate.experiment.load import Experiment
from ablate.experiment.roles import BAD, NULL
from ablate.experiment.schema import Design
from ablate.results.forked import FIFTH, Readings, mean_by_seed, views
from ablate.results.intervals import SINGLE_LOOK, Interval
from ablate.results.paired_stats import Difference, common, paired_difference
from ablate.results.summary import ArmSummary, summaries
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger import Ledger

MOST_SEEDS = 32
"""Largest number of seeds that is proposed."""
_SURE = 0.9
_CAREFUL = 0.8
"""Probability with which the width at the proposed number of seeds is kept, as far as the deviation goes."""


class Unfinished(InputError, ValueError):
    """A calibration in which too few trials have finished, or too few of the known-bad arm."""


@dataclass(frozen=True)
class Candidate:
    """A design with what a calibration found of it."""

    name: str
    design: Design | None
    """None: full runs."""
    effect: float
    """Damage, or gap, of the known-bad arm; positive if it is worse than its baseline."""
    effect_error: float
    """Its standard error."""
    deviation: float
    """Standard deviation of a paired difference of unlike arms, pooled over the contrasts."""
    largest: float
    """The largest of the contrasts' deviations."""
    seeds: int
    """Seeds that it was estimated from."""
    error: float
    """Standard error of the evaluation, which all seeds share; 0 if it is not known."""
    steps: float
    """Steps of one arm at one seed."""
    trunk: float
    """Steps of the trunk at one seed."""
    step_seconds: float
    """Mean seconds of a step over the arms."""
    trunk_step_seconds: float

    def seconds(self, arms: int) -> float:
        """Return the seconds that one seed of all arms takes, one after the other."""
        return arms * self.steps * self.step_seconds + self.trunk * self.trunk_step_seconds

    def sharpness(self, arms: int) -> float:
        """Return Student's t of the known-bad arm after one hour.

        The effect is the lower end of its one-sided 90 % interval, since the best of many candidates owes
        something to chance; 0 if the arm looks better than its baseline.
        """
        bound = float(special.stdtrit(self.seeds - 1, _SURE)) * self.effect_error
        effect = max(0.0, self.effect - bound)
        noise = math.hypot(self.deviation * math.sqrt(self.seconds(arms) / 3600), self.error)
        return effect / noise if noise else math.inf if effect else 0.0

    def half_width(self, seeds: int, careful: bool = False, interval: Interval = SINGLE_LOOK) -> float:
        """Return half the width of a 95 % interval of one comparison with 2 seeds or more, of the kind that
        the sweep will have.

        `careful`: use the deviation that is exceeded with a probability of 20 % only, or the largest of the
        contrasts' deviations: some comparisons spread more than others.
        """
        deviation = self.deviation
        if careful:
            free = self.seeds - 1
            deviation *= math.sqrt(free / float(special.chdtri(free, _CAREFUL)))
            deviation = max(deviation, self.largest)
        return math.hypot(deviation, self.error * math.sqrt(seeds)) * interval.half_width(seeds)

    @property
    def goal(self) -> float:
        """A fifth of the known-bad arm's effect: the smallest that matters."""
        return FIFTH * abs(self.effect)

    def proposed_seeds(self) -> int:
        """Return the number of seeds that make the interval as narrow as the smallest effect that matters."""
        enough = (n for n in range(FEWEST_SEEDS, MOST_SEEDS) if self.half_width(n, True) <= self.goal)
        return next(enough, MOST_SEEDS)


def candidates_of(experiment: Experiment, state: Path) -> list[Candidate]:
    """Return the designs that an experiment's calibration compares; none without a calibration."""
    config, found = experiment.base.config, list[Candidate]()
    shape = config.steps, config.tokens_per_step
    for suffix in (CALIBRATION, FULL_CALIBRATION):
        name = f"{experiment.name}{suffix}"
        if not (state / "sweeps" / name / "ledger.db").exists():
            continue
        with closing(open_ledger(state, name)) as ledger:
            if design := ledger.facts.design:
                found += from_forks(ledger, design, *shape, design.bad or "")
            else:
                bad = [arm.name for arm in ledger.arms() if arm.name.startswith(BAD)]
                found.append(from_full_runs(ledger, *shape, "".join(bad)))
    return found


def planned(experiment: Experiment, state: Path) -> Candidate | None:
    """Return what the calibration found of the design that an experiment has; None if it does not know it."""
    wanted = experiment.keys.design and experiment.keys.design.shape
    try:
        candidates = candidates_of(experiment, state)
    except Unfinished:
        return None
    return next((one for one in candidates if (one.design and one.design.shape) == wanted), None)


def from_full_runs(ledger: Ledger, steps: int, tokens_per_step: int, bad: str) -> Candidate:
    """Return the full runs of a calibration as a candidate; Unfinished if too few are finished. `bad`: name
    of the known-bad arm."""
    arms = summaries(ledger)
    values = {arm.name: arm.values for arm in arms}
    return _candidate(ledger, "full runs", None, arms, values, bad, (steps, 0), tokens_per_step, 0.0)


def from_forks(ledger: Ledger, design: Design, steps: int, tokens_per_step: int, bad: str) -> list[Candidate]:
    """Return the designs that are part of a calibration's forks: fewer positions, shorter windows.

    A candidate has three horizons, 1, 2 and 4 times its shortest window. `steps`: those of the trunk's
    schedule; `bad`: name of the known-bad arm. Unfinished if too few trials are finished.
    """
    arms = summaries(ledger)
    known = next((arm.readings for arm in arms if arm.readings and arm.readings.cells), None)
    if known is None:
        raise Unfinished("no forked trial is finished")
    error = _evaluation_error(arms)
    found = []
    for part in parts(design, known, steps):
        values = {arm.name: part.values(arm.readings) for arm in arms}
        # Known for the mean over all positions; over fewer it is larger by up to the root of their ratio.
        own_error = error * math.sqrt(len(known.positions) / len(part.positions))
        own = (part.name, part.design, arms, values, bad, part.shape, tokens_per_step, own_error)
        found.append(_candidate(ledger, *own))
    return found


class Part(NamedTuple):
    """Smaller design that is part of a calibration's forks."""

    design: Design
    positions: list[int]
    longest: int
    """Steps of its longest window."""
    shape: tuple[float, float]
    """Steps of one arm at one seed, and steps of the trunk."""

    @property
    def name(self) -> str:
        count = len(self.positions)
        return f"{count} position{'s' if count > 1 else ''}, windows up to {self.longest} steps"

    def values(self, readings: Readings | None) -> dict[int, float]:
        """Return an arm's means over the positions, by seed; seeds that lack a position are left out."""
        cells = readings.cells if readings else {}
        own = (cell for cell in cells if cell.window == self.longest and cell.position in self.positions)
        return mean_by_seed([cells[cell] for cell in own])


def parts(design: Design, known: Readings, steps: int) -> Iterator[Part]:
    """Yield a design and the smaller ones that are part of it: fewer positions, shorter windows. `known`:
    readings of one of the design's arms; `steps`: those of the trunk's schedule."""
    for longest in known.windows[1:] or known.windows:  # a shorter one would have windows of a few steps
        for positions in _subsets(known.positions):
            shortest, same = longest / design.horizons[-1], positions == known.positions
            # As a file writes them: their number if they are those of the calibration.
            shares = len(positions) if same else tuple(round(each / steps, 4) for each in positions)
            smaller = design.model_copy(update={"window": round(shortest / steps, 6), "positions": shares})
            shape = len(positions) * sum(shortest * times for times in design.horizons), positions[-1]
            yield Part(smaller, positions, longest, shape)


def _subsets(positions: Sequence[int]) -> Iterator[list[int]]:
    """Yield all positions, the first and the last, and the middle one."""
    yield list(positions)
    if len(positions) > 2:
        yield [positions[0], positions[-1]]
    if len(positions) > 1:
        yield [positions[len(positions) // 2]]


def _evaluation_error(arms: Sequence[ArmSummary]) -> float:
    """Return the root of the mean square of the evaluation's error over all contrasts; 0 if it is unknown."""
    pairs = list(_pairs(arms))

    def differences(those: list[ArmSummary]) -> list[Difference]:
        by_name = {arm.name: arm for arm in those}
        return [paired_difference(by_name[one].values, by_name[other].values) for one, other in pairs]

    errors = [view.error for view in views(arms, differences, len(pairs)) if view]
    known = [error for error in errors if math.isfinite(error)]
    return math.sqrt(math.fsum(error**2 for error in known) / len(known)) if known else 0.0


def _pairs(arms: Sequence[ArmSummary]) -> Iterator[tuple[str, str]]:
    """Yield every two arms that are unlike: all but twins."""
    names = [arm.name for arm in arms if arm.role != "null"]
    yield from itertools.combinations(names, 2)


def _candidate(
    ledger: Ledger,
    name: str,
    design: Design | None,
    arms: Sequence[ArmSummary],
    values: Mapping[str, Mapping[int, float]],
    bad: str,
    shape: tuple[float, float],
    tokens_per_step: int,
    error: float,
) -> Candidate:
    by_name = {arm.name: arm for arm in arms}
    minimize = ledger.facts.metric.direction == "minimize"
    baseline = by_name[bad].baseline if bad in by_name else None
    if baseline is None:
        raise Unfinished(f"the calibration has no arm {bad} with a baseline")
    speeds = {arm.name: arm.tokens_per_s for arm in arms if arm.tokens_per_s > 0}
    unlike = [tokens_per_step / speed for name, speed in speeds.items() if by_name[name].role != "null"]
    rest = _beside_steps(ledger, {name: tokens_per_step / speed for name, speed in speeds.items()}, baseline)
    seconds = (
        rest * math.fsum(unlike) / len(unlike) if unlike else math.nan,
        rest * tokens_per_step / speeds[baseline] if baseline in speeds else math.nan,
    )
    one = measured(name, design, values, (bad, baseline), list(_pairs(arms)), shape, seconds, error)
    return one if minimize else replace(one, effect=-one.effect)


def _beside_steps(ledger: Ledger, step_seconds: Mapping[str, float], baseline: str) -> float:
    """Return the seconds of trials over those of their steps: evaluations and checkpoints take time too. The
    baseline is left out, since its trials train the trunk. 1 without a finished trial."""
    whole = steps = 0.0
    left_out = {baseline, *(arm.name for arm in ledger.arms() if arm.name.startswith(NULL))}
    for member in ledger.members():
        if member.status == "done" and member.seconds and member.name in step_seconds.keys() - left_out:
            spec = member.resolved
            count = spec.config.get("steps", math.nan)
            if forks := spec.forks:
                count = len(forks["positions"]) * sum(forks["windows"])
            whole += member.seconds
            steps += count * step_seconds[member.name]
    return whole / steps if steps > 0 else 1.0


def measured(
    name: str,
    design: Design | None,
    values: Mapping[str, Mapping[int, float]],
    known: tuple[str, str],
    pairs: Sequence[tuple[str, str]],
    shape: tuple[float, float],
    seconds: tuple[float, float],
    error: float = 0.0,
) -> Candidate:
    """Return a candidate with the effect and the noise that values have, losses by arm and seed; Unfinished
    if too few seeds are finished.

    `design`: None for full runs; `known`: the known-bad arm and its baseline; `pairs`: unlike arms, whose
    contrasts give the noise; `shape`: steps of one arm at one seed, and steps of the trunk; `seconds`: mean
    seconds of a step over the arms, and of a step of the trunk; `error`: standard error of the evaluation.
    """
    bad, baseline = known
    effect = paired_difference(values[bad], values[baseline])
    if effect.pairs < FEWEST_SEEDS:
        raise Unfinished(
            f"{bad} and {baseline} have finished on {effect.pairs} common seeds; a calibration takes"
            f" {FEWEST_SEEDS} or more: give an arm that does not diverge (--bad)"
        )
    differences = [
        [values[one][seed] - values[other][seed] for seed in common(values[one], values[other])]
        for one, other in pairs
    ]
    variances = [float(np.var(each, ddof=1)) for each in differences if len(each) > 1]
    return Candidate(
        name,
        design,
        effect.mean,
        effect.deviation / math.sqrt(effect.pairs),
        math.sqrt(math.fsum(variances) / len(variances)),
        math.sqrt(max(variances)),
        effect.pairs,
        error,
        *shape,
        *seconds,
    )


def best(candidates: Sequence[Candidate], arms: int) -> Candidate:
    """Return the candidate with the greatest sharpness for a sweep of so many arms, its baselines
    included."""
    return max(candidates, key=lambda candidate: candidate.sharpness(arms))
