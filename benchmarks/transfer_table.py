"""Tables of transfer.py: pairs of published schemes that a reading orders as the published losses do."""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transfer_schemes import BASELINE, SCHEMES, STRATA, TABLE

Values = NDArray[np.float64]
NAMES = [*SCHEMES]
STRATUM = np.array([scheme.stratum for scheme in SCHEMES.values()])
PAIRS = np.array([(i, j) for i, j in combinations(range(len(NAMES)), 2) if STRATUM[i] == STRATUM[j]])
FACTS = np.array([[*scheme.facts.values()] for scheme in SCHEMES.values()])
FACT_NAMES = [*next(iter(SCHEMES.values())).facts]
TRUTH = "100", 97
"""Millions of parameters and tokens a parameter of the published runs."""
DRAWS, PERMUTATIONS, HALVINGS = 2000, 10_000, 200


# The published losses


def extract(path: Path) -> Iterator[str]:
    """Yield the published table reduced to the schemes: `scheme,millions,tokens a parameter,loss`."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    wanted = {"baseline": BASELINE} | {name: scheme.published for name, scheme in SCHEMES.items()}
    yield "scheme,millions,tokens_a_parameter,loss"
    for row in csv.DictReader(lines):
        for name, columns in wanted.items():
            if all(row[column] == value for column, value in (TABLE | dict(columns)).items()):
                yield f"{name},{row['N_millions']},{round(int(row['D']) / int(row['N']))},{row['final_loss']}"


Published = dict[tuple[str, int], dict[str, list[float]]]
"""Losses by size and length, by scheme; several where a run was repeated."""


def published(path: Path) -> Published:
    """Return what `extract` wrote."""
    cells: Published = defaultdict(lambda: defaultdict(list))
    for row in csv.DictReader(path.read_text().splitlines()):
        cells[row["millions"], int(row["tokens_a_parameter"])][row["scheme"]].append(float(row["loss"]))
    return cells


def truth_of(cell: Mapping[str, Sequence[float]]) -> Values:
    """Return the gap to the baseline by scheme, the first run's if repeated; NaN: not published."""
    return np.array([cell[name][0] - cell["baseline"][0] if name in cell else np.nan for name in NAMES])


def repeat_deviation(cells: Published) -> tuple[float, int]:
    """Return the standard deviation of one published loss, from runs that were repeated; and their number."""
    each = [losses for cell in cells.values() for losses in cell.values() if len(losses) > 1]
    return float(np.sqrt(np.mean([np.var(losses, ddof=1) for losses in each]))), len(each)


def length_deviation(cells: Published) -> float:
    """Return the standard deviation of one published loss from how unevenly it falls with length.

    For each size and scheme with at least 5 lengths, the gap less a parabola in the logarithm of the length;
    of the residuals, what all schemes of a size and length share (the baseline's own noise) is taken out.
    """
    squares, free = 0.0, 0.0
    for millions in {millions for millions, _ in cells}:
        lengths = sorted(length for size, length in cells if size == millions)
        gaps = np.array([truth_of(cells[millions, length]) for length in lengths])
        whole = gaps[:, np.isfinite(gaps).all(axis=0)]
        if len(lengths) < 5 or whole.shape[1] < 5:
            continue
        fit = np.polynomial.polynomial.polyvander(np.log(lengths), 2)
        residuals = whole - fit @ np.linalg.lstsq(fit, whole, rcond=None)[0]
        residuals -= residuals.mean(axis=1, keepdims=True)
        squares += np.sum(residuals**2)
        free += (len(lengths) - 3) * (whole.shape[1] - 1)
    return float(np.sqrt(squares / free))


# The forks


def readings(machines: Sequence[Sequence[Mapping]], times: int, window: int, of: str) -> Values:
    """Return a reading by seed and scheme, mean over positions; only seeds and positions without gaps.

    Args:
        machines: rows of each machine.
        times: amplification.
        window: steps of the forks; 1: readings without training.
        of: `total` or `learnt` damage; or of a fork of one step `reading` or a measurement's name.
    """
    by_seed: dict[int, list[Values]] = defaultdict(list)
    for rows in machines:
        at: dict[tuple[int, int], dict[str, Mapping]] = defaultdict(dict)
        for row in rows:
            if row["window"] == window and row["times"] == (1 if row["arm"] == "bf16" else times):
                at[row["seed"], row["position"]][row["arm"]] = row
        for (seed, _), arms in at.items():
            if all(name in arms for name in NAMES) and (window == 1 or "bf16" in arms):
                by_seed[seed].append(np.array([_value(arms[name], arms.get("bf16"), of) for name in NAMES]))
    table = np.array([np.mean(each, axis=0) for _, each in sorted(by_seed.items())])
    table = table.reshape(-1, len(NAMES))
    if np.isinf(table).any():  # stopped by a guard: worse than all others
        table[np.isinf(table)] = 2 * table[np.isfinite(table)].max()
    return table


def _value(row: Mapping, base: Mapping | None, of: str) -> float:
    if row["loss"] is None:
        return np.inf
    if of == "reading":
        return row["loss"] - row["loss_bf16"]
    if base is None:
        return row[of]
    return row["loss" if of == "total" else "loss_bf16"] - base["loss"]


# Figures


def differences(values: Values) -> Values:
    """Return the difference of each pair's schemes, given one value a scheme; the larger, the worse."""
    return values[PAIRS[:, 0]] - values[PAIRS[:, 1]]


def right(order: Values, truth: Values, weights: Values | None = None, among: Values | None = None) -> float:
    """Return the share of pairs that are ordered as the truth has them; ties count half.

    Args:
        order: difference of each pair's schemes.
        truth: published gap by scheme; pairs without one are left out.
        weights: weight of a scheme; a pair has the product. None: all alike.
        among: True for pairs that count; None: all.
    """
    share = (1 + np.sign(order) * np.sign(differences(truth))) / 2
    own = np.ones(len(PAIRS)) if weights is None else weights[PAIRS].prod(axis=1)
    own = np.where(np.isfinite(share) & (True if among is None else among), own, 0)
    return float(np.nansum(share * own) / np.sum(own))


def permutation_p(order: Values, truth: Values, random: np.random.Generator) -> float:
    """Return how often a permutation of the truth within groups has as many pairs right, one-sided."""
    own, hits, shuffled = right(order, truth), 0, truth.copy()
    for _ in range(PERMUTATIONS):
        for stratum in STRATA:
            members = np.flatnonzero(stratum == STRATUM)
            shuffled[members] = random.permutation(truth[members])
        hits += right(order, shuffled) >= own
    return (1 + hits) / (1 + PERMUTATIONS)


def reliability(table: Values, random: np.random.Generator) -> float:
    """Return the correlation within groups of two halves of the seeds, stepped up to all seeds.

    NaN if all schemes of every group have the same values.
    """
    centred = table.copy()
    for stratum in STRATA:
        members = stratum == STRATUM
        centred[:, members] -= table[:, members].mean(axis=1, keepdims=True)
        centred[:, members] /= centred[:, members].mean(axis=0).std() or 1
    halves = []
    for _ in range(HALVINGS):
        order = random.permutation(len(table))
        one, other = (centred[part].mean(axis=0) for part in np.array_split(order, 2))
        if not one.any():
            return np.nan
        halves.append(np.corrcoef(one, other)[0, 1])
    half = float(np.mean(halves))
    return 2 * half / (1 + half)


def ceiling(truth: Values, deviation: float, random: np.random.Generator) -> float:
    """Return the share of pairs that published losses order as a repetition of themselves would."""
    noise = deviation * random.standard_normal((DRAWS, len(truth)))
    return float(np.mean([right(differences(truth + each), truth) for each in noise]))


def factor_weights(random: np.random.Generator) -> Values:
    """Return one draw of the schemes' weights: products of exponential weights of their factors' levels."""
    levels: dict[tuple[int, str], float] = defaultdict(random.standard_exponential)
    return np.array(
        [np.prod([levels[axis, level] for axis, level in enumerate(s.factors)]) for s in SCHEMES.values()]
    )


def rule(truth: Values, columns: Values) -> Values:
    """Return each pair's difference by least squares on all other schemes.

    If one scheme alone were left out, two with equal facts would be told apart, always in the wrong order.
    """
    design, known = np.column_stack([np.ones(len(truth)), columns]), np.isfinite(truth)
    used = np.tile(known, (len(PAIRS), 1))
    np.put_along_axis(used, PAIRS, False, axis=1)
    fits = np.linalg.pinv(design * used[..., None], rcond=1e-9) @ np.where(known, truth, 0)
    return np.round(np.sum((design[PAIRS[:, 0]] - design[PAIRS[:, 1]]) * fits, axis=1), 9)


def rule_without(truth: Values, columns: Values, fact: int) -> Values:
    """Return each pair's difference by least squares on the schemes that lack a fact."""
    lacks = (columns[:, fact] == 0) & np.isfinite(truth)
    design = np.column_stack([np.ones(len(truth)), columns])
    return np.round(differences(design @ np.linalg.lstsq(design[lacks], truth[lacks], rcond=None)[0]), 9)


@dataclass(frozen=True)
class Reading:
    """One way to order the schemes."""

    name: str
    table: Values
    """By seed and scheme; one row if no seed took part."""
    order_by: Callable[[Values], Values] = differences
    """Function from the mean over seeds to each pair's difference."""

    @property
    def order(self) -> Values:
        """Return each pair's difference."""
        return self.order_by(self.table.mean(axis=0))

    def draws(self, truth: Values, weigh: bool, seed: int = 0) -> Values:
        """Return bootstrap draws of the share of pairs; the same factors' weights for every reading."""
        seeds, factors = np.random.default_rng([seed, 1]), np.random.default_rng([seed, 2])
        count, own, shares = len(self.table), self.order, []
        for _ in range(DRAWS):
            mean = self.table[seeds.integers(count, size=count)].mean(axis=0)
            weights = factor_weights(factors) if weigh else None
            shares.append(right(own if count == 1 else self.order_by(mean), truth, weights))
        return np.array(shares)


def interval(draws: Values) -> tuple[float, float]:
    """Return the central 95 %."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


def rivals(truth: Values) -> list[Reading]:
    """Return the readings that need no run: the last two are fitted on published losses."""
    count = FACTS[:, 0] * 10 + FACTS[:, 1]
    return [
        Reading("forward bit", FACTS[None, :, 0]),
        Reading("forward bit, backward products", count[None]),
        Reading("rule of four facts", count[None], lambda _: rule(truth, FACTS[:, :4])),
        Reading("rule of five facts", count[None], lambda _: rule(truth, FACTS)),
    ]


def trained(machines: Sequence[Sequence[Mapping]], window: int) -> list[Reading]:
    """Return the readings of forks and of single steps that have seeds; the first is the headline."""
    parts = [
        ("damage, a = 3, w", 3, window, "total"),
        ("damage, a = 1, w", 1, window, "total"),
        ("damage, a = 3, 2w", 3, 2 * window, "total"),
        ("learnt damage, a = 3, w", 3, window, "learnt"),
        ("learnt damage, a = 1, w", 1, window, "learnt"),
        ("product error", 1, 1, "products"),
        ("operand error", 1, 1, "operands"),
        ("gradient error", 1, 1, "gradient"),
        ("reading", 1, 1, "reading"),
    ]
    found = [Reading(name, readings(machines, times, steps, of)) for name, times, steps, of in parts]
    return [reading for reading in found if len(reading.table)]


def tables(machines: Sequence[Sequence[Mapping]], path: Path, window: int) -> Iterator[str]:
    """Yield the lines of all tables.

    Args:
        machines: rows of each machine.
        path: the published losses, as `extract` wrote them.
        window: w in steps.
    """
    cells = published(path)
    truth, random = truth_of(cells[TRUTH]), np.random.default_rng(0)
    (repeated, repeats), deviation = repeat_deviation(cells), length_deviation(cells)
    of_runs, of_facts = trained(machines, window), rivals(truth)
    headline, best = of_runs[0], max(of_facts, key=lambda one: right(one.order, truth))
    apart = np.abs(differences(truth)) > 2 * np.sqrt(2) * deviation
    yield f"Published repeats: {repeats}, deviation {repeated:.6f} nats: hardly other runs."
    yield f"Deviation of a published loss by its course over lengths: {deviation:.4f} nats."
    yield f"Ceiling of the pairs by that noise: {ceiling(truth, deviation, random):.3f}."
    yield ""
    yield (
        "| reading | seeds | "
        + " | ".join(f"{name}, {_count(name)} pairs" for name in STRATA)
        + f" | all, {len(PAIRS)} | share (95 %, seeds) | 95 %, seeds and factors | tau | p"
        f" | {apart.sum()} apart | reliability |"
    )
    yield "|" + "---|" * 12
    for one in (*of_runs, *of_facts):
        yield "| " + " | ".join(_cells(one, truth, random, apart)) + " |"
    yield ""
    yield from _claims(headline, best, truth)
    for error in (one for one in of_runs if one.name == "operand error"):
        yield from _less(error, best, truth)
        yield from _less(error, headline, truth)
        yield from _agreement(error, headline, truth)
    yield ""
    yield from _left_out(truth)
    yield ""
    yield from _elsewhere(cells, headline)
    yield ""
    yield from _by_scheme(of_runs, truth)


def _count(stratum: str) -> int:
    return int(np.sum(stratum == STRATUM[PAIRS[:, 0]]))


def _cells(one: Reading, truth: Values, random: np.random.Generator, apart: Values) -> Iterator[str]:
    order, sampled = one.order, len(one.table) > 1
    yield one.name
    yield str(len(one.table)) if sampled else ""
    for stratum in STRATA:
        among = stratum == STRATUM[PAIRS[:, 0]]
        yield f"{right(order, truth, among=among) * among.sum():g}"
    share = right(order, truth)
    yield f"{share * len(PAIRS):g}"
    low, high = interval(one.draws(truth, weigh=False))
    yield f"{share:.2f} ({low:.2f} to {high:.2f})" if sampled else f"{share:.2f}"
    low, high = interval(one.draws(truth, weigh=True))
    yield f"{low:.2f} to {high:.2f}"
    yield f"{2 * share - 1:.2f}"
    yield f"{permutation_p(order, truth, random):.4f}" if sampled else ""
    yield f"{right(order, truth, among=apart):.2f}"
    yield f"{reliability(one.table, random):.2f}" if len(one.table) > 3 else ""


def _claims(headline: Reading, best: Reading, truth: Values) -> Iterator[str]:
    """Yield the two comparisons with the best rule, and the precision."""
    columns = FACTS if "five" in best.name else FACTS[:, :4]

    def both(mean: Values) -> Values:
        return rule(truth, np.column_stack([columns, mean / mean.std()]))

    joint = Reading(f"{best.name} and {headline.name}", headline.table, both)
    for one in (headline, joint):
        yield from _less(one, best, truth)
    for weigh, over in ((False, "seeds"), (True, "seeds and factors")):
        low, high = interval(headline.draws(truth, weigh))
        yield f"Half-width of {headline.name} over {over}: {(high - low) / 2:.3f}"


def _less(one: Reading, other: Reading, truth: Values) -> Iterator[str]:
    """Yield the difference of two readings' shares with both intervals."""
    difference = right(one.order, truth) - right(other.order, truth)
    for weigh, over in ((False, "seeds"), (True, "seeds and factors")):
        low, high = interval(one.draws(truth, weigh) - other.draws(truth, weigh))
        yield (
            f"{one.name} less {other.name}: {difference:+.3f} ({low:+.3f} to {high:+.3f} over {over})"
            f", {right(one.order, truth) * len(PAIRS):g} pairs"
        )


def _agreement(one: Reading, other: Reading, truth: Values) -> Iterator[str]:
    """Yield how often two readings are right on the same pairs, and how much agreement adds to one.

    A pair that a reading ties is right for neither.
    """
    signs = np.sign(differences(truth))
    hits = [np.sign(reading.order) == signs for reading in (one, other)]
    counts = {
        "both right": hits[0] & hits[1],
        f"{one.name} alone": hits[0] & ~hits[1],
        f"{other.name} alone": ~hits[0] & hits[1],
        "neither": ~hits[0] & ~hits[1],
    }
    each = ", ".join(f"{what} {int(np.sum(pairs & (signs != 0)))}" for what, pairs in counts.items())
    yield f"{one.name} and {other.name} on {len(PAIRS)} pairs: {each}"
    low, high = interval(_gains(one, other, truth))
    agree = np.sign(one.order) == np.sign(other.order)
    yield (
        f"They agree on {agree.sum()}, {right(one.order, truth, among=agree):.3f} of these right; "
        f"{one.name} alone {right(one.order, truth):.3f}: {_gain(one.order, other.order, truth):+.3f}"
        f" ({low:+.3f} to {high:+.3f} over seeds and factors)"
    )


def _gain(order: Values, second: Values, truth: Values, weights: Values | None = None) -> float:
    """Return how much more often an order is right where a second one agrees."""
    agree = np.sign(order) == np.sign(second)
    return right(order, truth, weights, agree) - right(order, truth, weights)


def _gains(one: Reading, other: Reading, truth: Values) -> Values:
    """Return bootstrap draws of `_gain` over seeds of each reading, and factors."""
    seeds, factors = np.random.default_rng([0, 1]), np.random.default_rng([0, 2])
    found = []
    for _ in range(DRAWS):
        means = [
            reading.table[seeds.integers(len(reading.table), size=len(reading.table))].mean(axis=0)
            for reading in (one, other)
        ]
        orders = [reading.order_by(mean) for reading, mean in zip((one, other), means, strict=True)]
        found.append(_gain(*orders, truth, factor_weights(factors)))
    return np.array(found)


def _left_out(truth: Values) -> Iterator[str]:
    yield "Rules fitted without the schemes that have a fact, pairs right of all:"
    for name, columns in (("four", FACTS[:, :4]), ("five", FACTS)):
        shares = [
            f"{FACT_NAMES[fact]} {right(rule_without(truth, columns, fact), truth) * len(PAIRS):g}"
            for fact in range(columns.shape[1])
        ]
        yield f"- {name} facts: {', '.join(shares)}"


def _elsewhere(cells: Published, headline: Reading) -> Iterator[str]:
    """Yield the share of pairs by size and length of the published runs."""
    yield f"| millions | tokens a parameter | pairs | {headline.name} | rule of four | rule of five |"
    yield "|---|---|---|---|---|---|"
    for (millions, ratio), cell in sorted(cells.items(), key=lambda item: (int(item[0][0]), item[0][1])):
        truth = truth_of(cell)
        pairs = int(np.sum(np.isfinite(truth[PAIRS]).all(axis=1)))
        four, five = (right(rule(truth, columns), truth) for columns in (FACTS[:, :4], FACTS))
        own = right(headline.order, truth)
        yield f"| {millions} | {ratio} | {pairs} | {own:.2f} | {four:.2f} | {five:.2f} |"


def _mean(values: Values) -> str:
    return f"{values.mean():.5f} ({values.std(ddof=1) / len(values) ** 0.5:.5f})"


def _by_scheme(of_runs: Sequence[Reading], truth: Values) -> Iterator[str]:
    shown = [one for one in of_runs if one.name.startswith("damage") and len(one.table) > 1]
    yield "| scheme | published gap | " + " | ".join(one.name for one in shown) + " |"
    yield "|" + "---|" * (2 + len(shown))
    for number in sorted(
        range(len(NAMES)), key=lambda number: (STRATA.index(STRATUM[number]), truth[number])
    ):
        damages = [_mean(one.table[:, number]) for one in shown]
        yield f"| {NAMES[number]} | {truth[number]:.4f} | " + " | ".join(damages) + " |"
