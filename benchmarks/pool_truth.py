"""Tables of validity.py: what sweeps say about a pool of runs, against the mean over all its other seeds."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from zlib import crc32

import numpy as np
from scipy import stats
from simulated_truth import share

from ablate.experiment.schema import Design
from ablate.results.calibration import Candidate, best, measured, parts
from ablate.results.forked import FIFTH, Readings, Values, readings_of
from ablate.results.intervals import ALPHA, SINGLE_LOOK
from ablate.results.paired_stats import Difference, judge, p_value, paired_difference, seeds_needed

SIZES = (3, 5, 8)
BAD = ("mxfp4", "bf16")
EXPERIMENTS = 400
"""Random sweeps drawn from the pool for each figure."""


@dataclass(frozen=True)
class Arm:
    """One arm's values in the pool."""

    name: str
    values: Values
    readings: Readings | None = None


@dataclass
class Side:
    """All runs of one design."""

    arms: dict[str, Arm] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """Mean seconds of a run by arm."""

    def pairs(self) -> list[tuple[str, str]]:
        """Return every two unlike arms: no twins."""
        return list(combinations([name for name in self.arms if "twin" not in name], 2))

    def common(self, *names: str) -> list[int]:
        """Return the seeds that some arms have."""
        return sorted(set.intersection(*(set(self.arms[name].values) for name in names)))


def sides(lines: Sequence[Mapping]) -> dict[str, Side]:
    """Return the pool by design."""
    found: dict[str, Side] = defaultdict(Side)
    members: dict[tuple[str, str], list[tuple[int, Mapping[str, float]]]] = defaultdict(list)
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        key = line["design"], line["arm"]
        members[key].append((line["seed"], line["values"]))
        seconds[key].append(line["seconds"])
    for (design, name), its in members.items():
        readings = readings_of(its, "loss") if design == "forks" else None
        values = {seed: last["val/loss"] for seed, last in its}
        found[design].arms[name] = Arm(name, values, readings)
        found[design].seconds[name] = float(np.mean(seconds[design, name]))
    return dict(found)


def draws(*names: object) -> np.random.Generator:
    """Return a generator that depends on nothing but these names."""
    return np.random.default_rng(crc32(repr(names).encode()))


def only(values: Values, seeds: Sequence[int]) -> dict[int, float]:
    """Return the values of some seeds."""
    return {seed: values[seed] for seed in seeds}


# Coverage


@dataclass
class Count:
    """Outcomes of the intervals of one contrast."""

    covered: int = 0
    resolved: int = 0
    wrong: int = 0
    exaggeration: list[float] = field(default_factory=list)


def contrast(side: Side, one: str, other: str, size: int) -> tuple[Count, int]:
    """Return what random sweeps of some seeds say of two arms, and the seeds that they are drawn from.

    The truth of a sweep is the mean over all other seeds, evaluated on the same data.
    """
    seeds, random, count = side.common(one, other), draws(one, other, size), Count()
    subtrahend, minuend = (side.arms[name].values for name in (one, other))
    for _ in range(EXPERIMENTS):
        chosen = random.choice(seeds, size, replace=False).tolist()
        rest = sorted(set(seeds) - set(chosen))
        difference = paired_difference(only(minuend, chosen), only(subtrahend, chosen))
        truth = paired_difference(only(minuend, rest), only(subtrahend, rest)).mean
        count.covered += difference.low <= truth <= difference.high
        if p_value(difference) < ALPHA:
            count.resolved += 1
            count.wrong += difference.mean * truth < 0
            count.exaggeration.append(abs(difference.mean / truth))
    return count, len(seeds)


def coverage(found: Mapping[str, Side]) -> Iterator[str]:
    """Yield the table of coverage, wrong signs and exaggeration."""
    yield ("| design | seeds of a sweep | covered | worst contrast | resolved | wrong sign | exaggeration |")
    yield "|---|---|---|---|---|---|---|"
    for design, side in found.items():
        for size in SIZES:
            counts = {pair: contrast(side, *pair, size) for pair in side.pairs()}
            all_ = [count for count, _ in counts.values()]
            total = EXPERIMENTS * len(all_)
            pair, (worst, seeds) = min(counts.items(), key=lambda item: item[1][0].covered)
            resolved = sum(count.resolved for count in all_)
            independent = seeds / size
            exaggeration = [ratio for count in all_ for ratio in count.exaggeration]
            yield (
                f"| {design} | {size} | {100 * sum(count.covered for count in all_) / total:.1f} % |"
                f" {share(worst.covered, EXPERIMENTS, independent)} ({pair[1]} - {pair[0]}, {seeds} seeds) |"
                f" {100 * resolved / total:.1f} % | {sum(count.wrong for count in all_)} of {resolved} |"
                f" {np.median(exaggeration):.2f} |"
            )


# Twins and planted effects


def disjoint(seeds: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Yield disjoint groups of seeds."""
    yield from (seeds[first : first + size] for first in range(0, len(seeds) - size + 1, size))


def found_share(side: Side, one: str, other: str, size: int, rounds: int) -> tuple[int, int, int]:
    """Return resolved experiments, all of them, and how many are disjoint; after the first round the seeds
    are dealt anew."""
    seeds, random = side.common(one, other), draws("disjoint", one, other, size)
    resolved = whole = 0
    for turn in range(rounds):
        dealt = seeds if turn == 0 else random.permutation(seeds).tolist()
        for group in disjoint(dealt, size):
            difference = paired_difference(
                only(side.arms[other].values, group), only(side.arms[one].values, group)
            )
            resolved += p_value(difference) < ALPHA
            whole += 1
    return resolved, whole, len(seeds) // size


def twins(found: Mapping[str, Side]) -> Iterator[str]:
    """Yield the table of experiments without an effect."""
    yield "| design | twin of | pairs | experiments, disjoint | resolved |"
    yield "|---|---|---|---|---|"
    for design, side in found.items():
        for name in side.arms:
            if "twin" not in name:
                continue
            for size in SIZES:
                resolved, whole, _ = found_share(side, name.removesuffix(" twin"), name, size, 1)
                yield (
                    f"| {design} | {name.removesuffix(' twin')} | {size} | {whole} | {resolved}:"
                    f" {share(resolved, whole)} |"
                )


def power(effect: float, deviation: float, size: int) -> float:
    """Return the chance that a t interval over normal differences excludes zero."""
    limit = float(stats.t.ppf(1 - ALPHA / 2, size - 1))
    shift = abs(effect) / deviation * math.sqrt(size)
    chance = float(stats.nct.sf(limit, size - 1, shift) + stats.nct.cdf(-limit, size - 1, shift))
    return 1.0 if math.isnan(chance) else chance  # scipy's tails of a shift that is certain to be seen


def planted(found: Mapping[str, Side]) -> Iterator[str]:
    """Yield the table of arms against bf16, planted ones among them: chance of a verdict, predicted and
    found."""
    yield "| design | arm | effect | deviation | seeds | predicted | found | points |"
    yield "|---|---|---|---|---|---|---|---|"
    for design, side in found.items():
        for name in side.arms:
            if name == "bf16" or "twin" in name:
                continue
            whole = paired_difference(side.arms[name].values, side.arms["bf16"].values)
            for size in SIZES:
                expected = power(whole.mean, whole.deviation, size)
                resolved, count, independent = found_share(side, "bf16", name, size, 40)
                yield (
                    f"| {design} | {name} | {whole.mean:+.5f} | {whole.deviation:.5f} | {size} |"
                    f" {100 * expected:.1f} % | {share(resolved, count, independent)} |"
                    f" {100 * (resolved / count - expected):+.1f} |"
                )


# Promises


def kept_seeds(side: Side, one: str, other: str, size: int, margin: float) -> tuple[int, int, int]:
    """Return promises kept, promises made, and numbers beyond the pool, of sweeps that are undecided."""
    seeds, random = side.common(one, other), draws("seeds", one, other, size)
    kept = made = beyond = 0
    for _ in range(EXPERIMENTS // 4):
        dealt = random.permutation(seeds).tolist()

        def gap(count: int, dealt: list[int] = dealt) -> Difference:
            return paired_difference(
                only(side.arms[other].values, dealt[:count]), only(side.arms[one].values, dealt[:count])
            )

        verdict = judge([(gap(size), margin)], True)[0]
        if verdict.kind != "undecided":
            continue
        needed = seeds_needed(*verdict.planned, ranged=False) if verdict.planned else None
        if needed is None or needed.count is None or needed.count > len(seeds) // 2:
            beyond += 1
            continue
        made += 1
        kept += judge([(gap(needed.count), margin)], True, plan=False)[0].decided
    return kept, made, beyond


def promised_seeds(found: Mapping[str, Side]) -> Iterator[str]:
    """Yield the table of promised numbers of seeds."""
    yield "| design | `min_effect` | undecided after | promises | kept | beyond half of the pool |"
    yield "|---|---|---|---|---|---|"
    for design, side in found.items():
        damage = abs(paired_difference(*(side.arms[name].values for name in BAD)).mean)
        for times in (FIFTH, 0.5):
            for size in SIZES:
                counts = [kept_seeds(side, *pair, size, times * damage) for pair in side.pairs()]
                kept, made, beyond = (sum(column) for column in zip(*counts, strict=True))
                yield (
                    f"| {design} | {times:g} of the known-bad arm's: {times * damage:.4f} | {size} | {made} |"
                    f" {share(kept, made, made / 4)} | {beyond} |"
                )


def candidates(
    found: Mapping[str, Side], chosen: Mapping[str, Sequence[int]], design: Design, steps: int
) -> list[tuple[Candidate, Callable[[str], dict[int, float]], str]]:
    """Return the designs that a calibration on some seeds compares, with the pool's values of each arm."""
    listed: list[tuple[Candidate, Callable[[str], dict[int, float]], str]] = []
    for kind, side in found.items():
        pairs = side.pairs()
        step = float(np.mean([side.seconds[name] for name in side.arms if "twin" not in name]))

        def add(
            name: str,
            shape: tuple[float, float],
            values: Callable[[str], dict[int, float]],
            own: Design | None,
            kind: str = kind,
            pairs: list[tuple[str, str]] = pairs,
            each: float = step,
            base: float = side.seconds["bf16"],
        ) -> None:
            whole = shape[0] + shape[1] if kind == "full" else _steps(design, steps)
            table = {arm: only(values(arm), chosen[kind]) for pair in pairs for arm in pair}
            seconds = each / whole, base / whole
            listed.append((measured(name, own, table, BAD, pairs, shape, seconds), values, kind))

        if kind == "full":
            add("full runs", (steps, 0), lambda arm, side=side: dict(side.arms[arm].values), None)
            continue
        known = side.arms["bf16"].readings
        assert known
        for part in parts(design, known, steps):
            add(
                part.name,
                part.shape,
                lambda arm, side=side, part=part: part.values(side.arms[arm].readings),
                part.design,
            )
    return listed


def _steps(design: Design, steps: int) -> float:
    """Return the steps of a forked trial, with its trunk."""
    count = design.positions if isinstance(design.positions, int) else len(design.positions)
    return count * sum(round(design.window * steps) * times for times in design.horizons) + 0.8 * steps


def calibrated(found: Mapping[str, Side], design: Design, steps: int) -> Iterator[str]:
    """Yield the table of what calibrations promise: widths, and the choice of the design."""
    yield (
        "| seeds of a calibration | widths kept | proposed seeds, median | sharpness of the chosen design /"
        " best | in the worst tenth | chooses full runs |"
    )
    yield "|---|---|---|---|---|---|"
    pools = {
        kind: sorted(set.intersection(*(set(arm.values) for arm in side.arms.values())))
        for kind, side in found.items()
    }
    truth = {one.name: one for one, _, _ in candidates(found, pools, design, steps)}
    arms = 4
    for size in SIZES:
        random = draws("calibration", size)
        kept = count = full = 0
        ratios, proposed = [], []
        for _ in range(EXPERIMENTS // 2):
            chosen = {
                kind: random.choice(seeds, size, replace=False).tolist() for kind, seeds in pools.items()
            }
            listed = candidates(found, chosen, design, steps)
            pick = best([one for one, _, _ in listed], arms)
            values, kind = next((values, kind) for one, values, kind in listed if one is pick)
            most = max(one.sharpness(arms) for one in truth.values())
            ratios.append(truth[pick.name].sharpness(arms) / most)
            full += pick.design is None
            seeds = pick.proposed_seeds()
            proposed.append(seeds)
            fresh = sorted(set(pools[kind]) - set(chosen[kind]))
            group = random.choice(fresh, seeds, replace=False).tolist()
            for one, other in found[kind].pairs():
                came = paired_difference(only(values(other), group), only(values(one), group))
                kept += came.deviation * SINGLE_LOOK.half_width(seeds) <= pick.half_width(seeds, True)
                count += 1
        experiments = EXPERIMENTS // 2
        yield (
            f"| {size} | {share(kept, count, experiments)} | {np.median(proposed):.0f} |"
            f" {np.mean(ratios):.2f} | {np.quantile(ratios, 0.1):.2f} | {share(full, experiments)} |"
        )


def tables(lines: Sequence[Mapping], design: Design, steps: int) -> Iterator[str]:
    """Yield all tables of a pool.

    Args:
        lines: runs of the pool.
        design: design of its forks.
        steps: steps of a full run.
    """
    found = sides(lines)
    yield "| design | arm | seeds | minus bf16 | deviation | seconds a run |"
    yield "|---|---|---|---|---|---|"
    for kind, side in found.items():
        for name, arm in side.arms.items():
            gap = paired_difference(arm.values, side.arms["bf16"].values)
            yield (
                f"| {kind} | {name} | {len(arm.values)} | {gap.mean:+.5f} | {gap.deviation:.5f} |"
                f" {side.seconds[name]:.1f} |"
            )
    for table in (coverage, twins, planted, promised_seeds):
        yield ""
        yield from table(found)
    yield ""
    yield from calibrated(found, design, steps)
