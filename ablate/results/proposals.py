"""Gate for a loop of proposals: keep a change, discard it, or run it again.

The problem. A person or an agent tries one change after another and keeps what helps. Runs of one
configuration differ by their seed, so among many changes without any effect some look better, and the best
value so far is a lucky one. "Keep if better" therefore keeps noise in almost every loop.

The idea. The noise floor (the deviation of one run) is measured first, on 16 or more reruns of one
configuration. A candidate is then compared with runs of the present baseline that were made for this
proposal alone, as many as its own: nothing lucky is carried over, and slow drift meets both. It is looked at
after 2, 4, 8 and 16 runs each. At a look the candidate is

- kept, if Student's t of the gain exceeds the threshold of this look's share of alpha. Alpha is split evenly
  over a number of proposals that is declared beforehand, and within a proposal over the looks (Bonferroni in
  both cases, so any dependence is allowed, and a look that is skipped costs nothing);
- discarded, if a gain of `effect` noise floors is excluded by a t interval, or at the last look;
- else run again, up to the next look.

The first look can only discard: the spread of two runs is too poorly known to keep anything.

The deviation. The floor is pooled with the spread of the baseline's runs, of this and of earlier proposals.
If those spread more than the floor allows (F test, 1 %), they replace it. The candidate's runs are pooled too
unless they spread more than the median of what they would if the floor were true; then the candidate counts
with its own variance (Welch). That costs little power and bounds the harm of candidates that are noisier than
their baseline. Verdicts of sweeps never pool over configurations; hence the words here are keep, discard and
run again, not better and worse.

Example: `decide(Floor.of(reruns), baseline=[3.21, 3.19], candidate=[3.20, 3.22])`.

Refused: fewer than 16 reruns, values that are not numbers, more proposals than declared. A candidate with a
diverged run is discarded. `benchmarks/gate_loops.py` simulates how often the gate is wrong.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, variance
from typing import Any, Literal

import numpy as np
from scipy import special

from ablate.errors import InputError
from ablate.files import finite
from ablate.results.number_text import counted, number

Word = Literal["keep", "discard", "run again"]
Reason = Literal["better", "excluded", "not shown", "diverged", "undecided", "too few runs"]

FEWEST_RERUNS = 16
"""Least number of reruns that measure a noise floor."""
_STALE = 0.01
"""Level of the F test of the baseline's own spread against the floor."""
_LARGEST = 1e75
"""Magnitude from which a value counts as diverged: its fourth power would soon have no float."""
_TYPICAL = 0.5
"""Chance of a candidate as noisy as its baseline to be judged by its own variance."""


def _usable(value: float) -> bool:
    return abs(value) < _LARGEST


@dataclass(frozen=True)
class Look:
    """One time at which a proposal may be decided."""

    runs: int
    """Runs of the candidate, and as many of the baseline."""
    share: float
    """Share of the proposal's alpha."""
    miss: float
    """Largest chance to discard a gain of exactly `effect` noise floors at this look."""


LOOKS = (Look(2, 0.0, 0.1), Look(4, 0.1, 0.05), Look(8, 0.3, 0.05), Look(16, 0.6, 0.0))
"""Looks at a proposal. Chosen among ten schedules by power at 1 to 4 noise floors and mean number of runs."""


@dataclass(frozen=True)
class Plan:
    """Declaration that is made before the first proposal.

    Attributes:
        alpha: Largest chance that a loop without any effect keeps a change.
        proposals: Number of proposals that alpha is split over.
        effect: Gain in noise floors whose exclusion discards a proposal.
        most: Most runs of one candidate: the runs of one of `LOOKS`, from 4 on.
    """

    alpha: float = 0.05
    proposals: int = 50
    effect: float = 2.0
    most: int = LOOKS[-1].runs

    def __post_init__(self) -> None:
        """Refuse values that define no gate, with an InputError."""
        possible = [look.runs for look in LOOKS if look.share]
        problems = []
        if not 0 < self.alpha < 1:
            problems.append(f"alpha is {self.alpha}: it is a probability between 0 and 1, such as 0.05")
        if self.proposals < 1:
            problems.append(f"proposals is {self.proposals}: declare 1 or more")
        if not 0 < self.effect < math.inf:
            problems.append(f"effect is {self.effect}: it is a positive number of noise floors, such as 2")
        if self.most not in possible:
            problems.append(f"most is {self.most}: it is one of {', '.join(map(str, possible))}")
        if problems:
            raise InputError(*problems)

    @cached_property
    def looks(self) -> tuple[Look, ...]:
        """Looks up to `most` runs; their shares add up to 1."""
        looks = [look for look in LOOKS if look.runs <= self.most]
        total = sum(look.share for look in looks)
        return tuple(Look(look.runs, look.share / total, look.miss) for look in looks)

    def level(self, look: int) -> float:
        """Return the probability of a false keep that look number `look`, from 0, may spend."""
        return self.alpha / self.proposals * self.looks[look].share


@dataclass(frozen=True)
class Floor:
    """Noise floor: variance of one run, from reruns of one configuration."""

    variance: float
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Floor":
        """Measure the floor. InputError for fewer than 16 reruns, a value that is not finite, or no spread at
        all."""
        if len(values) < FEWEST_RERUNS:
            raise InputError(
                f"the noise floor has {counted(len(values), 'rerun')}: {FEWEST_RERUNS} or more are needed"
            )
        if wrong := [value for value in values if not _usable(value)]:
            raise InputError(f"the noise floor contains {wrong[0]}: give reruns that finished")
        if not (spread := variance(values)):
            raise InputError(
                "all reruns of the noise floor are equal: rerun it with other seeds, or no gate is needed"
            )
        return cls(spread, len(values))


@dataclass(frozen=True)
class History:
    """Facts about earlier judgements that a decision depends on.

    Attributes:
        proposals: Number of other proposals that were judged before this one.
        looks: Number of looks at this proposal that are over, skipped ones included.
        baselines: Values of the baseline's runs for each other proposal.
    """

    proposals: int = 0
    looks: int = 0
    baselines: Sequence[Sequence[float]] = ()

    def spread(self) -> tuple[float, int]:
        """Return the sum of squares within the baselines, and its degrees of freedom."""
        groups = [(values, fmean(values)) for values in self.baselines if len(values) > 1]
        squares = math.fsum((value - mean) ** 2 for values, mean in groups for value in values)
        return squares, sum(len(values) - 1 for values, _ in groups)


@dataclass(frozen=True)
class Spread:
    """Precision of a gain; every field is a number or an array of one shape.

    Attributes:
        noise: Deviation of one run of the baseline.
        standard_error: Standard error of the gain.
        freedom: Its degrees of freedom.
        own: True if the candidate counts with its own variance.
        stale: True if the baseline spreads more than the floor allows, so that the floor is not used.
    """

    noise: Any
    standard_error: Any
    freedom: Any
    own: Any
    stale: Any


def spread_of(floor: tuple[Any, int], baseline: tuple[Any, Any], candidate: Any, runs: int) -> Spread:
    """Return the precision of the mean of `runs` runs (2 or more) of a candidate minus that of as many of its
    baseline, as numbers or as arrays.

    `floor`: its variance, and number of reruns; `baseline`: sum of squares of its runs around their means,
    and degrees of freedom, 1 or more; `candidate`: variance of its runs.
    """
    (variance_floor, reruns), (squares, seen) = floor, baseline
    stale = squares / seen > variance_floor * special.fdtri(seen, reruns - 1, 1 - _STALE)
    freedom = np.where(stale, seen, seen + reruns - 1)
    base = np.where(stale, squares, squares + (reruns - 1) * variance_floor) / freedom
    own = candidate > base * special.fdtri(runs - 1, freedom, 1 - _TYPICAL)
    pooled = (freedom * base + (runs - 1) * candidate) / (freedom + runs - 1)
    welch = (candidate + base) ** 2 / (candidate**2 / (runs - 1) + base**2 / freedom)
    return Spread(
        noise=np.sqrt(base),
        standard_error=np.sqrt(np.where(own, candidate + base, 2 * pooled) / runs),
        freedom=np.where(own, welch, freedom + runs - 1),
        own=own,
        stale=stale,
    )


def judge_look(gain: Any, spread: Spread, plan: Plan, look: int) -> tuple[Any, Any, Any]:
    """Return the threshold of t, and True if a candidate is kept, and if it is discarded, at one look,
    numbered from 0. `gain`: mean gain, positive if the candidate is better; a number or an array."""
    level, last = plan.level(look), look == len(plan.looks) - 1
    threshold = special.stdtrit(spread.freedom, 1 - level) if level else np.full_like(spread.freedom, np.inf)
    keep = gain > threshold * spread.standard_error
    if last:
        return threshold, keep, ~keep
    reach = special.stdtrit(spread.freedom, 1 - plan.looks[look].miss) * spread.standard_error
    return threshold, keep, ~keep & (gain + reach < plan.effect * spread.noise)


@dataclass(frozen=True)
class Evidence:
    """Numbers of one look.

    Attributes:
        runs: Runs of each side that were compared.
        gain: Mean gain in the metric's unit, positive if the candidate is better. After a keep it is biased
            upward, since lucky candidates are kept more often.
        standard_error: Its standard error.
        freedom: Degrees of freedom of t.
        threshold: Value that t must exceed; infinite at a look that cannot keep.
        noise: Deviation of one run of the baseline.
        excluded: Gain whose exclusion discards, in the metric's unit.
        own: True if the candidate counts with its own variance.
        stale: True if the floor was not used.
    """

    runs: int
    gain: float
    standard_error: float
    freedom: float
    threshold: float
    noise: float
    excluded: float
    own: bool
    stale: bool

    @property
    def t(self) -> float:
        """Student's t of the gain."""
        return self.gain / self.standard_error

    @property
    def text(self) -> str:
        """Gain with t, threshold and what the spread was estimated from, in words."""
        needed = f"{self.threshold:.2f} needed" if math.isfinite(self.threshold) else "no keep at this look"
        spread = "the candidate's own spread" if self.own else "spread pooled over configurations"
        measured = number(self.gain, self.standard_error)
        return f"gain {measured} over {self.runs} runs each, t {self.t:.2f}, {needed}, {spread}"


@dataclass(frozen=True)
class Decision:
    """Decision on a proposal.

    Attributes:
        word: keep, discard or run again.
        reason: Why.
        runs_candidate: Further runs of the candidate that the next look needs; 0 if it is decided.
        runs_baseline: The same for the baseline.
        looks: Looks at this proposal that are over.
        alpha: Probability of a false keep that was spent by this decision.
        diverged: Runs of the candidate that diverged.
        evidence: Numbers of the look; None if there was none.
    """

    word: Word
    reason: Reason
    runs_candidate: int = 0
    runs_baseline: int = 0
    looks: int = 0
    alpha: float = 0.0
    diverged: int = 0
    evidence: Evidence | None = None

    @property
    def sentence(self) -> str:
        """The decision in one or two sentences."""
        return f"{self.word.capitalize()}: {' '.join(self._sentences())}"

    def _sentences(self) -> Iterator[str]:
        more = (
            f"Add {counted(self.runs_candidate, 'run')} of the candidate and {self.runs_baseline} of the"
            f" baseline{', made in turns' * bool(self.runs_candidate and self.runs_baseline)}."
        )
        if self.reason == "diverged":
            yield f"{counted(self.diverged, 'run')} of the candidate diverged."
        elif self.evidence is None:
            yield f"there are too few runs for the next look. {more}"
        else:
            yield {
                "better": "better than the baseline",
                "excluded": f"a gain of {number(self.evidence.excluded)} or more is excluded",
                "not shown": "no gain is shown, and this was the last look",
                "undecided": "undecided",
            }[self.reason] + f" ({self.evidence.text})."
            if self.word == "discard":
                yield "A smaller gain may have been missed."
            if self.word == "run again":
                yield more
            if self.evidence.stale:
                yield "The baseline spreads more than the noise floor: measure the floor again."

    def document(self) -> dict[str, Any]:
        """Return the decision as JSON: infinite thresholds are null."""
        document = asdict(self)
        if self.evidence is not None:
            document["evidence"]["threshold"] = finite(self.evidence.threshold)
        return document

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> "Decision":
        """Return the decision that `document` describes."""
        evidence = document["evidence"]
        if evidence is not None:
            known = evidence["threshold"]
            evidence = Evidence(**evidence | {"threshold": math.inf if known is None else known})
        return cls(**{**document, "evidence": evidence})


def decide(
    floor: Floor,
    baseline: Sequence[float],
    candidate: Sequence[float],
    history: History = History(),
    plan: Plan = Plan(),
    minimize: bool = True,
) -> Decision:
    """Decide on a proposal: keep it, discard it, or run it again.

    The largest look that the runs suffice for is taken, on the first runs of each side in the order given;
    others wait for the next look. The order must not depend on the values. The baseline's runs are those that
    were made for this proposal.

    InputError if there are more proposals than declared, all looks are over, or a run of the baseline
    diverged.
    """
    if history.proposals >= plan.proposals:
        raise InputError(
            f"{plan.proposals} proposals were declared and judged; one more would not be covered by the"
            " chance of a false keep that was declared. Start a new history with a larger number"
        )
    if history.looks >= len(plan.looks):
        raise InputError("all looks at this proposal are over: it is decided")
    if wrong := [value for value in baseline if not _usable(value)]:
        raise InputError(
            f"a run of the baseline is {wrong[0]}: the baseline must finish; run it again under another id"
        )
    if diverged := sum(not _usable(value) for value in candidate):
        return Decision("discard", "diverged", looks=history.looks, diverged=diverged)

    def more(reason: Reason, looks: int, alpha: float = 0.0, evidence: Evidence | None = None) -> Decision:
        runs = plan.looks[looks].runs
        # what the next look lacks
        lacking = (max(0, runs - len(candidate)), max(0, runs - len(baseline)))
        return Decision("run again", reason, *lacking, looks=looks, alpha=alpha, evidence=evidence)

    have = min(len(baseline), len(candidate))
    possible = [n for n, look in enumerate(plan.looks) if n >= history.looks and look.runs <= have]
    if not possible:
        return more("too few runs", history.looks)
    look = possible[-1]
    runs = plan.looks[look].runs
    ours, theirs = candidate[:runs], baseline[:runs]
    gain = (fmean(theirs) - fmean(ours)) * (1 if minimize else -1)
    squares, freedom = history.spread()
    spread = spread_of(
        (floor.variance, floor.runs),
        (squares + (runs - 1) * variance(theirs), freedom + runs - 1),
        variance(ours),
        runs,
    )
    threshold, keep, discard = judge_look(gain, spread, plan, look)
    error, freedom_of_t, noise = float(spread.standard_error), float(spread.freedom), float(spread.noise)
    numbers = runs, gain, error, freedom_of_t, float(threshold), noise, plan.effect * noise
    evidence = Evidence(*numbers, bool(spread.own), bool(spread.stale))
    level, last = plan.level(look), look == len(plan.looks) - 1
    if keep:
        return Decision("keep", "better", looks=look + 1, alpha=level, evidence=evidence)
    if discard:
        reason: Reason = "not shown" if last else "excluded"
        return Decision("discard", reason, looks=look + 1, alpha=level, evidence=evidence)
    return more("undecided", look + 1, level, evidence)
