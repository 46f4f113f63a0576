"""Adaptive group search for the units of a recipe that cause a known gap, or a divergence.

The problem. A recipe is worse than its baseline by 0.003 nats. It quantises 12 blocks, and one of them may
carry all of it, or two, or none in particular. A unit alone is seldom seen in one run, since its damage is
about as large as the deviation between seeds; and trying 12 units one by one finds a false culprit by luck.

The idea: search with groups, prove with fresh seeds.

1. *Gap.* The recipe and its baseline run on `seeds`. Without any sign of a gap there is nothing to blame.
2. *Search.* Rounds of pairs: a random half of the units is quantised in one run, the other half in the next,
   on the same seed, one that takes no part in the proof. Every run says something about every unit: with P
   pairs each unit's damage has the standard error sd / sqrt(P), where one unit at a time would have
   sd sqrt(units / 2 P) (a weighing design, Hotelling 1944; groups against noise: sequential bifurcation,
   Bettonvil and Kleijnen 1997). Damage that all units share cancels within a pair. Forward selection names
   candidates. The search ends early once no other choice of units explains the pairs nearly as well and the
   candidates account for the gap.
3. *Proof.* Each candidate runs alone on `seeds`, of which the search has seen none, so that a candidate which
   does no damage passes with a chance of alpha / candidates, and any of them with alpha (Bonferroni),
   whatever the search did: additivity, its noise and its rule affect only what is missed.
4. *Rest.* The recipe without the culprits runs on `seeds`: what is left of the gap.

A divergence is searched in the same way: the outcome is 1 for a run that diverged, and the proof is an exact
sign test.

`replay` is a function of the outcomes alone. It returns the runs that are wanted next, or the finding, so
that a search which was interrupted continues as if it had not been; `replayed` takes them from a ledger, by
the names of arms. Refused: fewer than two units, and a
budget that leaves fewer than `FEWEST_PAIRS` pairs.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from ablate.experiment.blame_design import ROUND, BlameDesign, BlameNames, GroupRun, Stage
from ablate.results.number_text import around, counted, number
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import OVER

CHANCE = 0.8
"""Chance at which a culprit of the smallest size that is named is found."""
_ENTRY = 0.1
"""Largest p-value, times the units left, of a candidate after the first."""
_MOST_NAMED = 6
"""Largest number of units that a plan lists."""
_GATE = 0.2
"""Chance of searching where there is no gap. It saves runs; the proof alone bounds the error."""
_ODDS = 20.0
"""Odds by which candidates must beat each other choice, times the units, for the search to end early."""


Outcomes = Mapping[GroupRun, float]
"""Harm by run, larger is worse: infinite if it diverged, NaN if it failed for another reason."""


def chance(design: BlameDesign, size: float) -> float:
    """Return the chance of finding one culprit by the plan's formula. `size`: damage in standard deviations
    of one unit's damage between seeds. It assumes normal noise and damage that adds up, and that as many
    candidates as allowed are proved."""
    pairs, seeds = design.pairs, len(design.seeds)
    bound = float(special.stdtrit(seeds - 1, 1 - design.alpha / min(design.most, design.units)))
    missed = special.nctdtr(seeds - 1, size * math.sqrt(seeds), bound)  # NaN far above the bound, for 0
    proved = float(1 - np.nan_to_num(missed))
    if not design.searches:
        return proved
    z = np.linspace(-6, 6, 241)
    below = special.ndtr(z + size * math.sqrt(pairs)) ** (design.units - 1)
    weights = np.exp(-(z**2) / 2)
    return proved * float(np.sum(weights * below) / np.sum(weights))


def smallest(design: BlameDesign) -> float:
    """Return the smallest damage that is found with a chance of `CHANCE`, in standard deviations between
    seeds."""
    low, high = 0.0, 64.0
    while chance(design, high) < CHANCE:
        high *= 2
    while high - low > 0.005:
        middle = (low + high) / 2
        low, high = (low, middle) if chance(design, middle) >= CHANCE else (middle, high)
    return high


@dataclass(frozen=True)
class Effect:
    """Harm of some units beside that of others, over seeds, with a simultaneous interval."""

    mean: float
    low: float
    high: float
    """Ends of a two-sided interval, each of which fails with the chance `tail`."""
    tail: float
    pairs: int
    deviation: float
    """Standard deviation of the paired differences; NaN for a divergence."""
    diverged: int = 0
    """Seeds on which these units diverged and the others did not, if the outcome is a loss: each counts as
    the largest difference of the others."""

    @property
    def level(self) -> float:
        """Confidence of the interval."""
        return 1 - 2 * self.tail


@dataclass(frozen=True)
class Round:
    """Evidence after a round of the search."""

    tests: tuple[GroupRun, ...]
    estimates: tuple[float, ...]
    """Damage of each unit, in units of its standard error, given the candidates."""
    candidates: tuple[int, ...]


@dataclass(frozen=True)
class Search:
    """State of a search: the runs that it wants next, or its finding."""

    design: BlameDesign
    stage: Stage
    wanted: tuple[GroupRun, ...] = ()
    """Runs without an outcome that the stage needs."""
    runs: int = 0
    """Runs that were requested so far."""
    diverges: bool = False
    """True if the outcome is divergence."""
    gap: Effect | None = None
    rounds: tuple[Round, ...] = ()
    candidates: tuple[int, ...] = ()
    proofs: Mapping[int, Effect] | None = None
    """Damage of each candidate alone."""
    rest: Effect | None = None
    """Damage of the recipe without the culprits."""
    together: tuple[frozenset[int], Effect] | None = None
    """Two candidates that harm only together; damage of halves with both beside those with neither."""

    @property
    def culprits(self) -> tuple[int, ...]:
        """Units whose damage was proved, the largest first."""
        proved = {unit: effect for unit, effect in (self.proofs or {}).items() if self.exceeds(effect)}
        return tuple(sorted(proved, key=lambda unit: -proved[unit].mean))

    @property
    def deviation(self) -> float:
        """Deviation of one unit's damage between seeds: of candidates, else of the gap; NaN if unknown."""
        known = [effect.deviation for effect in (self.proofs or {}).values()]
        known = known or [self.gap.deviation if self.gap else math.nan]
        return math.sqrt(sum(each**2 for each in known) / len(known))

    def exceeds(self, effect: Effect) -> bool:
        """Return True if an effect is resolved to be above the margin, or above 0 for a divergence."""
        return effect.low > (0.0 if self.diverges else self.design.margin)


def replay(design: BlameDesign, outcomes: Outcomes) -> Search:
    """Replay a search from the harm of every run that is over. Runs that the search never asks for have no
    effect."""
    everything, nothing = frozenset(range(design.units)), frozenset[int]()
    asked: list[GroupRun] = []

    def missing(tests: Iterable[GroupRun]) -> tuple[GroupRun, ...]:
        new = [test for test in tests if test not in asked]
        asked.extend(new)
        return tuple(test for test in new if test not in outcomes)

    def effect(units: frozenset[int], tail: float) -> Effect:
        both = [(outcomes[GroupRun(units, seed)], outcomes[GroupRun(nothing, seed)]) for seed in design.seeds]
        pairs = [pair for pair in both if not any(map(math.isnan, pair))]
        return diverged_more(pairs, tail) if search.diverges else damage(pairs, tail)

    search = Search(design, "gap")
    wanted = missing(GroupRun(units, seed) for seed in design.seeds for units in (nothing, everything))
    if wanted:
        return replace(search, wanted=wanted, runs=len(asked))
    lost = sum(math.isinf(outcomes[GroupRun(everything, seed)]) for seed in design.seeds)
    search = replace(search, diverges=2 * lost >= len(design.seeds))
    search = replace(search, gap=effect(everything, design.alpha), runs=len(asked))
    if not (search.exceeds(effect(everything, _GATE)) or (search.gap and search.gap.diverged)):
        return replace(search, stage="over")
    search = replace(search, candidates=tuple(range(design.units)))
    for place in range(0, design.pairs, ROUND):
        pairs = [design.halves(each) for each in range(place, min(place + ROUND, design.pairs))]
        wanted = missing(test for pair in pairs for test in pair)
        search = replace(search, stage="search", runs=len(asked), wanted=wanted)
        if wanted:
            return search
        evidence, settled = screen(design, outcomes, place + len(pairs), search)
        tests = tuple(test for pair in pairs for test in pair)
        evidence = replace(evidence, tests=tests)
        search = replace(search, rounds=(*search.rounds, evidence), candidates=evidence.candidates)
        if settled:
            break
    wanted = missing(GroupRun(frozenset([unit]), seed) for unit in search.candidates for seed in design.seeds)
    search = replace(search, stage="proof", runs=len(asked), wanted=wanted)
    if wanted:
        return search
    tail = design.alpha / max(1, len(search.candidates))
    search = replace(search, proofs={unit: effect(frozenset([unit]), tail) for unit in search.candidates})
    search = replace(search, together=_together(search, outcomes))
    rest = everything - set(search.culprits)
    if search.culprits and rest:
        wanted = missing(GroupRun(rest, seed) for seed in design.seeds)
        search = replace(search, stage="rest", runs=len(asked), wanted=wanted)
        if wanted:
            return search
        search = replace(search, rest=effect(rest, design.alpha))
    return replace(search, stage="over")


def _together(search: Search, outcomes: Outcomes) -> tuple[frozenset[int], Effect] | None:
    """Return two candidates without proof that harm together by more than they do alone; None if none do. A
    pair of halves shows their joint damage if one half has both, and none of it if each has one."""
    proofs, tail = search.proofs or {}, search.design.alpha
    count = sum(len(each.tests) for each in search.rounds) // 2
    matrix, values = _contrasts(search, outcomes, count)
    alone = [*{*proofs} - {*search.culprits}] if len(values) > 2 else []
    for units in map(frozenset, itertools.combinations(alone, 2)):
        joined = matrix[:, sorted(units)].mean(axis=1, keepdims=True)
        both = int(np.abs(joined).sum())
        if not both:
            continue
        (mean,), squares = _fit(joined, values, [0])
        scale = math.sqrt(squares / (len(values) - 1) / both)
        half = float(special.stdtrit(len(values) - 1, 1 - tail)) * scale
        joint = Effect(float(mean), mean - half, mean + half, tail, both, math.nan)
        doubt = math.hypot(half, *(proofs[unit].high - proofs[unit].mean for unit in units))
        if search.exceeds(joint) and mean - math.fsum(proofs[unit].mean for unit in units) > doubt:
            return units, joint
    return None


def damage(pairs: Sequence[tuple[float, float]], tail: float) -> Effect:
    """Return the mean difference of pairs, harm of some units and of the baseline by seed, with Student's t
    interval, each end of which fails with a chance of `tail`.

    A divergence counts as the largest finite difference: at least as bad as what was seen. The interval is
    infinite for fewer than three pairs, or if all differences are equal.
    """
    found = np.array([one - other for one, other in pairs if not math.isnan(one - other)])
    worst, more = np.abs(found[np.isfinite(found)]).max(initial=0.0), int(np.isposinf(found).sum())
    found = np.clip(found, -worst, worst)
    mean = float(found.mean()) if found.size else math.nan
    deviation = float(found.std(ddof=1)) if found.size > 1 else math.nan
    if found.size < 3 or not deviation > 0:
        return Effect(mean, -math.inf, math.inf, tail, found.size, deviation, more)
    half = float(special.stdtrit(found.size - 1, 1 - tail)) * deviation / math.sqrt(found.size)
    return Effect(mean, mean - half, mean + half, tail, found.size, deviation, more)


def diverged_more(pairs: Sequence[tuple[float, float]], tail: float) -> Effect:
    """Return the share of seeds on which some units diverge and the baseline does not: pairs of their harm,
    infinite if the run diverged.

    The exact sign test decides: without its significance at `tail`, the chance that one end of the interval
    fails, the lower end is 0.
    """
    more = sum(math.isinf(one) and not math.isinf(other) for one, other in pairs)
    less = sum(math.isinf(other) and not math.isinf(one) for one, other in pairs)
    seeds = len(pairs)
    p = float(special.bdtrc(more - 1, more + less, 0.5)) if more else 1.0
    low = float(special.betaincinv(more, seeds - more + 1, tail)) if p <= tail else 0.0
    high = float(special.betaincinv(more + 1, seeds - more, 1 - tail)) if more < seeds else 1.0
    return Effect(more / seeds if seeds else math.nan, low, high, tail, seeds, math.nan)


def screen(design: BlameDesign, outcomes: Outcomes, count: int, search: Search) -> tuple[Round, bool]:
    """Return the evidence of the first `count` pairs, and True if more pairs would hardly change it."""
    matrix, values = _contrasts(search, outcomes, count)
    if len(values) < 2:
        return Round((), (0.0,) * design.units, (0,)), False
    chosen = _forward(matrix, values, design.most)
    coefficients, error = _fit(matrix, values, chosen)
    free = max(1, len(values) - len(chosen))
    scale = math.sqrt(error / free)
    left = values - matrix[:, chosen] @ coefficients
    raw = matrix.T @ left / len(values)
    raw[chosen] += coefficients
    smallest = 1e-12 * (float(np.abs(values).max()) or 1.0)
    estimates = raw * math.sqrt(len(values)) / max(scale, smallest)
    evidence = Round((), tuple(map(float, estimates)), tuple(chosen))
    gap = search.gap
    if gap is None or not chosen or len(values) <= len(chosen) + 1:
        return evidence, False
    doubt = 0.0 if search.diverges else gap.deviation**2 / gap.pairs
    doubt += len(chosen) * scale**2 / len(values)
    explained = gap.mean - float(coefficients.sum()) <= 2 * math.sqrt(doubt) + smallest
    return evidence, explained and _ahead(matrix, values, chosen, error + smallest**2)


def _contrasts(search: Search, outcomes: Outcomes, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the units in the first half of each of the first `count` pairs as signs, and the difference of
    both harms. If one half diverged it is at least as bad as the worst."""
    signs, contrasts = [], []
    for place in range(count):
        pair = search.design.halves(place)
        one, other = (outcomes[test] for test in pair)
        if search.diverges:
            one, other = float(math.isinf(one)), float(math.isinf(other))
        if not math.isnan(one - other):
            signs.append([1.0 if unit in pair[0].units else -1.0 for unit in range(search.design.units)])
            contrasts.append(one - other)
    values = np.array(contrasts)
    worst = np.abs(values[np.isfinite(values)]).max(initial=1.0)
    return np.array(signs), np.clip(values, -worst, worst)


def _ahead(matrix: np.ndarray, values: np.ndarray, chosen: list[int], error: float) -> bool:
    """Return True if no candidate could be replaced by another unit at nearly the same fit."""
    needed = error * (_ODDS * matrix.shape[1]) ** (2 / len(values))
    others = [unit for unit in range(matrix.shape[1]) if unit not in chosen]
    for unit in chosen:
        kept = [each for each in chosen if each != unit]
        both = np.column_stack([values, matrix[:, others]])
        if kept:
            both = both - matrix[:, kept] @ np.linalg.lstsq(matrix[:, kept], both, rcond=None)[0]
        left, columns = both[:, 0], both[:, 1:]
        gained = (columns.T @ left) ** 2 / np.maximum((columns**2).sum(axis=0), 1e-9)
        if (left @ left - gained < needed).any():
            return False
    return True


def _forward(matrix: np.ndarray, values: np.ndarray, most: int) -> list[int]:
    """Return the units that forward selection takes into the fit: the best, and others that improve it."""
    chosen: list[int] = []
    left, error = values, float(values @ values)
    while len(chosen) < min(most, len(values) - 1):
        scores = matrix.T @ left
        scores[chosen] = -math.inf
        best = int(np.argmax(scores))
        coefficients, smaller = _fit(matrix, values, [*chosen, best])
        free = len(values) - len(chosen) - 1
        t = math.sqrt(max(0.0, error - smaller) * free / smaller) if smaller > 0 else math.inf
        p = 1 - float(special.stdtr(free, t)) if math.isfinite(t) else 0.0
        others = matrix.shape[1] - len(chosen)
        if chosen and (scores[best] <= 0 or p * others > _ENTRY or error <= 1e-18 * float(values @ values)):
            break
        chosen.append(best)
        left, error = values - matrix[:, chosen] @ coefficients, smaller
    return chosen


def _fit(matrix: np.ndarray, values: np.ndarray, units: Sequence[int]) -> tuple[np.ndarray, float]:
    """Return the least-squares damage of some units, and the squared error that is left."""
    part = matrix[:, list(units)]
    coefficients = np.linalg.lstsq(part, values, rcond=None)[0]
    left = values - part @ coefficients
    return coefficients, float(left @ left)


# From a ledger to the answer


def names_of(ledger: Ledger) -> BlameNames:
    """Return the names of units and arms of a ledger with a search for a cause."""
    names = ledger.facts.blame["names"]
    return BlameNames(tuple(names["units"]), names["baseline"], names["whole"])


def replayed(ledger: Ledger) -> Search:
    """Return the state of a search for a cause, by the ledger of a sweep whose file has `blame`."""
    names, metric, harms = names_of(ledger), ledger.facts.metric, _harms(ledger)
    declared = ledger.facts.blame["design"]
    design = BlameDesign(**declared | {"seeds": tuple(declared["seeds"])})
    levels = [harms.get((names.baseline, seed), math.nan) for seed in design.seeds]
    finite = [level for level in levels if math.isfinite(level)]
    level = math.fsum(finite) / len(finite) if finite else 0.0
    design = replace(design, margin=metric.margin(level) or 0.0)  # in the metric's unit
    outcomes: dict[GroupRun, float] = {}
    while True:
        search = replay(design, outcomes)
        keys = {run: (names.arm(search.stage, run.units), run.seed) for run in search.wanted}
        over = {run: harms[key] for run, key in keys.items() if key in harms}
        if not over:
            return search
        outcomes |= over


def _harms(ledger: Ledger) -> dict[tuple[str, int], float]:
    """Return the harm of each run that is over, by arm and seed: infinite if it diverged, NaN without a
    value."""
    metric = ledger.facts.metric
    sign = 1 if metric.direction == "minimize" else -1
    return {
        (member.name, member.seed): math.inf
        if member.status == "diverged"
        else sign * ledger.last_values(member.trial).get(metric.name, math.nan)
        if member.status == "done"
        else math.nan
        for member in ledger.members()
        if member.status in OVER
    }


def planned(design: BlameDesign, names: BlameNames) -> str:
    """Return what a search may do, its error rate and the smallest damage that it finds, before it runs."""
    count, first, pairs = len(names.units), 2 * len(design.seeds), 2 * design.pairs
    listed = ", ".join(names.units[:_MOST_NAMED]) + ", ..." * (count > _MOST_NAMED)
    steps = f"First {names.whole} and {names.baseline} run ({first} runs)."
    if design.searches:
        steps += f" If there is a gap, up to {design.pairs} pairs of random halves follow ({pairs} runs)."
    tried = f"at most {design.most} candidates" if design.searches else "each unit"
    proof = design.runs - first - pairs
    steps += f" Then {tried} run alone, and all others, on fresh seeds ({proof} runs)."
    return (
        f"Blame: which of {count} units causes the gap: {listed}. {steps} In all, at most {design.runs} runs."
        f" {_rate(design)} One with damage of {smallest(design):.2g} standard deviations"
        f" between seeds is found with a chance of {CHANCE:.0%}.".replace("0%", "0 %")
    )


def _rate(design: BlameDesign) -> str:
    rate = f"{design.alpha:.3g}" if design.alpha < 0.01 else f"{100 * design.alpha:.3g} %"
    return f"A unit without damage is named in at most {rate} of such searches."


def news(search: Search, names: BlameNames) -> str:
    """Return what a search does next, for a line of news."""
    candidates = ", ".join(names.units[unit] for unit in search.candidates)
    texts = {
        "gap": f"{names.whole} and {names.baseline}",
        "search": f"round {len(search.rounds) + 1} of random halves",
        "proof": f"candidates alone on fresh seeds: {candidates}",
        "rest": f"all units but {', '.join(names.units[unit] for unit in search.culprits)}",
    }
    runs = counted(len(search.wanted), "run")
    return f"{texts[search.stage]}; {runs}, {search.runs} of at most {search.design.runs}"


def sentences(search: Search, names: BlameNames, unit: str) -> tuple[str, str]:
    """Return lead and text of the answer. `unit`: unit of the metric; empty if it has no name."""
    total = counted(len(names.units), "unit")
    if search.gap is None or search.stage != "over":
        text = f"the search has requested {search.runs} runs; it is at its {search.stage}."
        return "Not answered yet:", text
    arms = f"arm {names.whole}, against {names.baseline}"
    gap = f"All {total} together ({arms}): {amount(search, search.gap, unit)}"
    spent = f"The search took {search.runs} of at most {search.design.runs} runs. {_rate(search.design)}"
    pair = " and ".join(names.units[each] for each in sorted(search.together[0])) if search.together else ""
    joint = (
        f"{pair} harm only together: {amount(search, search.together[1], unit)}. " if search.together else ""
    )
    if not search.candidates:
        return "No gap.", f"{gap}, so there is nothing to blame. {spent}"
    proofs = search.proofs or {}
    if not search.culprits:
        each = "; ".join(f"{names.units[one]} {amount(search, proofs[one], unit)}" for one in proofs)
        tried = f" (tried alone: {each})" if proofs else ""
        text = (
            f"{gap}. No one of {total} is proved to cause it{tried}. {joint}{_findable(search, unit)} {spent}"
        )
        return "No culprit found.", text
    found = "; ".join(
        f"{names.units[one]} alone: {amount(search, proofs[one], unit)}" for one in search.culprits
    )
    share = ""
    if not search.diverges and search.gap.mean > 0:
        part = math.fsum(proofs[one].mean for one in search.culprits) / search.gap.mean
        over = " (over 100 %: noise, or units that offset it)" if round(part, 2) > 1 else ""
        share = f", {100 * part:.0f} % of the damage of all units{over}"
    lead = "Culprit:" if len(search.culprits) == 1 else "Culprits:"
    more = _rest(search, names, unit) + joint + _findable(search, unit)
    return lead, f"{found}{share}. {gap}. {more} {spent}"


def amount(search: Search, effect: Effect, unit: str) -> str:
    """Return an effect with its interval: of damage, or of the share of runs that diverged."""
    if search.diverges:
        count = round(effect.mean * effect.pairs) if effect.pairs else 0
        return f"diverges on {count} of {counted(effect.pairs, 'seed')}"
    lost = f", and diverges on {effect.diverged} of {counted(effect.pairs, 'seed')}" * (effect.diverged > 0)
    if not math.isfinite(effect.low):
        return f"{number(effect.mean)} {unit}".strip() + f", without an interval{lost}"
    level = f"{effect.level:.0%}".replace("%", " %")
    return f"{around(effect.mean, effect.high - effect.mean)} {unit} ({level})".replace("  ", " ") + lost


def _rest(search: Search, names: BlameNames, unit: str) -> str:
    if search.rest is None:
        return ""
    without = f"Without {'it' if len(search.culprits) == 1 else 'them'}"
    remains = search.exceeds(search.rest) or search.rest.diverged
    left = " a gap is left" if remains else ", no gap is resolved"
    return f"{without}{left}: {amount(search, search.rest, unit)}. "


def _findable(search: Search, unit: str) -> str:
    """Return a sentence on the smallest damage that the search finds; empty for a divergence."""
    if search.diverges or not search.deviation > 0:
        return ""
    size = smallest(search.design) * search.deviation + search.design.margin
    return f"A unit with damage of {size:.2g} {unit} is found with a chance of {CHANCE:.0%}.".replace(
        "%", " %"
    ).replace("  ", " ")
