"""Evidence for `ablate rank`: how often does the error of operands order recipes as training does?

    python benchmarks/rank_evidence.py published     # 26 schemes, 102 pairs within groups
    python benchmarks/rank_evidence.py predict       # pairs of other publications, rank_predictions.csv
    python benchmarks/rank_evidence.py elsewhere     # those, joined with their outcomes

The text below is the design. It was committed before a published loss was joined with a number of this
command.

Measure. The model is the command's built-in one: 6 blocks of width 128, trained in bf16 for 240 steps at a
constant rate, seed 0. Its operands x, w and g are captured on the 3 batches after that. An operand's error is
|q - t|^2 / |t|^2: t is the bf16 tensor of the capture, q what the product receives in its place, rotated
back. An operand that is quantised from the forward pass's copy, or is that copy, is compared with t as well,
so the copy's error counts. A layer's error is the sum over its six operands, 0 for those in bf16; a recipe's
is the mean over all layers and batches. Bias is the same with E q in place of q, over 4 draws of bits and
signs: with b1 and b2 the mean errors of two halves of the draws, it is <b1, b2> / |t|^2. An operand without
draws has its error as bias. Signs that last a whole run are not drawn again.

Rule. Recipes stand in groups by the passes that they quantise: forward, backward, both. Two recipes of one
group are compared layer by layer, each layer's value being its mean over batches. "Lower" needs both: the
95 % t interval of the mean difference over layers excludes 0, and the difference is at least `MARGIN`, 5 %,
of the smaller of the two errors. The same rule, with the same scale, says if a bias is higher. Then:

- errors not apart: too close to call;
- recipes that differ in the rotation of dgrad or wgrad alone: not ordered;
- one error lower and its bias not higher: ordered, this is what counts as decided;
- one error lower and its bias higher: not ordered, training decides.

Published schemes (transfer_schemes.py). The order of the losses at 100 M parameters and 97 tokens a parameter
within groups, 102 pairs. Each pair is in one of three columns, by facts of the recipes alone:

- nested: the quantised operands of one are among those of the other, with equal quantisers and rotations, or
  the passes' quantisers differ only in that one chooses for each block between two scales (4/6) where the
  other has none: the sum of errors orders these by construction;
- facts: not nested, and of the facts (set of operands, 16x16 weights, 4/6, MS-EDEN in place of stochastic
  rounding) all that differ point to the same scheme;
- rest: no fact differs, or facts contradict each other. This column is the headline.

Pairs whose losses are closer than .0010, about the noise of a loss, are given again apart. Figures: decided n
of N, right m of n, refused N - n by reason; interval of m / n by bootstrap over the two factors of each
scheme, as in transfer_table.py. Curve: the margin from 0 to 1. Beside it the plain order of the error, which
refuses nothing, and the same on all other sizes and lengths.

Other publications (rank_published.csv: facts and outcomes with sources). All settings with at least two
quantised recipes that can be written as recipes of this package; all pairs of a setting, within groups.
Predictions are committed first (rank_predictions.csv), outcomes joined after. Recipes without quantisation
take no part, since everything is above them. What a table does not state is the same for all rows of its
setting: that of `nvfp4` or, of MXFP4, nearest, 32x32 weights if so stated. Layers kept in bf16 are left out
if all rows keep the same. Pairs that compile to one recipe count as refused. An outcome is the published
metric; equal values and the word `same` are ties, counted apart; `diverged` and `unstable` come after
`converged`; rows with words against a reference are compared with the reference alone. Rivals on the same
pairs: fewer quantised operands first; finer blocks (elements a scale, mean over quantised operands) first.
Interval: bootstrap over sources.

Known before: the error of each operand against what it was cast from, summed over six, orders 88.5 of these
102 pairs on another small model (transfer.py), read there after the outcome as the best of eight; a prose
summary of outcomes of the other publications. No rule tried on them was discarded.
"""

import argparse
import csv
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from rank_recipes import SETTINGS
from transfer_schemes import SCHEMES, STRATA
from transfer_table import (
    DRAWS,
    NAMES,
    PAIRS,
    STRATUM,
    TRUTH,
    Values,
    differences,
    factor_weights,
    published,
    right,
    truth_of,
)

from ablate.recipes.recipe import Recipe
from ablate.training.operand_capture import Capture, built_in, of_model
from ablate.training.operand_errors import Cast, RecipeErrors, casts, measure
from ablate.verification.operand_order import MARGIN, Order, compare

HERE = Path(__file__).parent
NOISE = 0.0010
"""Difference of two published losses that is about their noise, in nats."""


@dataclass(frozen=True)
class Pair:
    """Two recipes of one group whose training was compared."""

    order: Order
    gap: float
    """Outcome of the first less that of the second; the lower trains better."""
    names: tuple[str, str]
    column: str = ""
    source: str = ""

    @property
    def right(self) -> bool:
        """True if the order is decided and is that of the outcomes; a tie is not."""
        return self.order is (Order.FIRST if self.gap < 0 else Order.SECOND) and self.gap != 0


def column_of(first: Recipe, second: Recipe) -> str:
    """Return `nested`, `facts` or `rest`: what orders two recipes without a measurement."""
    one, other = (set(casts(recipe.products)) for recipe in (first, second))
    if one < other or other < one:
        return "nested"
    chosen = [any(quant.select for _, quant in recipe.products.quantised()) for recipe in (first, second)]
    if {_without_choice(cast) for cast in one} == {_without_choice(cast) for cast in other} and chosen[
        0
    ] != chosen[1]:
        return "nested"
    signs = {_sign(*pair) for pair in zip(_facts(first), _facts(second), strict=True)} - {0}
    return "facts" if signs in ({1}, {-1}) else "rest"


def _without_choice(cast: Cast) -> Cast:
    """Return a cast without a choice between two scales and its outer bound."""
    quant = cast.quant and cast.quant.model_copy(update={"select": None, "outer": None})
    return cast._replace(quant=quant, copy=cast.copy and _without_choice(cast.copy))


def _facts(recipe: Recipe) -> tuple[frozenset[str], ...]:
    """Return sets that are the larger, the more errors they are known to bring."""
    quants = dict(recipe.products.quantised())
    return (
        frozenset(quants),
        frozenset(["16x16"] if any(quant.block == "16x16" for quant in quants.values()) else []),
        frozenset([] if any(quant.select for quant in quants.values()) else ["no 4/6"]),
        frozenset(["stochastic"] if any(quant.rounding == "stochastic" for quant in quants.values()) else []),
    )


def _sign(first: frozenset[str], second: frozenset[str]) -> int | None:
    """Return the sign of two sets' order by inclusion; None if neither holds the other."""
    if first == second:
        return 0
    return -1 if first < second else 1 if first > second else None


def score(pairs: Sequence[Pair]) -> str:
    """Return decided, right and refused pairs as cells of a table; ties of the outcome are apart."""
    decided = [pair for pair in pairs if pair.order.decided]
    ties = sum(pair.gap == 0 for pair in decided)
    refused = Counter(str(pair.order) for pair in pairs if not pair.order.decided)
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items()))
    share = f"{sum(pair.right for pair in decided) / max(1, len(decided) - ties):.2f}"
    right = sum(pair.right for pair in decided)
    return f"{len(pairs)} | {len(decided)} | {right} | {share} | {ties} | {reasons}"


def pairs_of(measured: Sequence[RecipeErrors], truth: Values, margin: float = MARGIN) -> list[Pair]:
    """Return the pairs of published schemes whose losses are known.

    Args:
        measured: errors of the schemes, in their order.
        truth: gaps to the baseline, NaN if not published.
        margin: least difference of errors that orders two schemes.
    """
    return [
        Pair(
            compare(measured[i], measured[j], margin),
            truth[i] - truth[j],
            (NAMES[i], NAMES[j]),
            column_of(measured[i].recipe, measured[j].recipe),
            STRATUM[i],
        )
        for i, j in PAIRS
        if np.isfinite(truth[i] - truth[j])
    ]


HEAD = "| pairs | N | decided | right | share | ties | refused |\n|---|---|---|---|---|---|---|"


def published_tables(measured: Sequence[RecipeErrors]) -> Iterator[str]:
    """Yield the tables of the published schemes."""
    cells = published(HERE / "transfer_published.csv")
    truth = truth_of(cells[TRUTH])
    pairs = pairs_of(measured, truth)
    yield HEAD
    yield f"| all | {score(pairs)} |"
    for column in ("nested", "facts", "rest"):
        yield f"| {column} | {score([pair for pair in pairs if pair.column == column])} |"
    for stratum in STRATA:
        yield f"| {stratum} | {score([pair for pair in pairs if pair.source == stratum])} |"
    yield f"| closer than .0010 | {score([pair for pair in pairs if abs(pair.gap) < NOISE])} |"
    yield f"| at least .0010 apart | {score([pair for pair in pairs if abs(pair.gap) >= NOISE])} |"
    yield "\n".join(_intervals(pairs))
    wrong = [pair for pair in pairs if pair.order.decided and not pair.right]
    yield from (
        f"wrong: {' < '.join(pair.names)} said {pair.order}, gap {pair.gap:+.4f}, {pair.column}"
        for pair in wrong
    )
    plain = np.array([each.by_layer().mean() for each in measured])
    whole = right(differences(plain), truth) * len(PAIRS)
    yield f"plain order of the error, nothing refused: {whole:g} of {len(PAIRS)}"
    yield "\nDecided, right by margin:\n| margin | all | rest | all, bias ignored |\n|---|---|---|---|"
    for margin in (0, 0.02, MARGIN, 0.1, 0.2, 0.5, 1):
        curve = pairs_of(measured, truth, margin)
        unbiased = pairs_of([replace(each, bias=each.error) for each in measured], truth, margin)
        rest = [pair for pair in curve if pair.column == "rest"]
        yield f"| {margin:.0%} | " + " | ".join(_count(each) for each in (curve, rest, unbiased)) + " |"
    yield "\nDecided, right of N:\n| millions | tokens a parameter | all | rest |\n|---|---|---|---|"
    for (millions, ratio), cell in sorted(cells.items(), key=lambda item: (int(item[0][0]), item[0][1])):
        found = pairs_of(measured, truth_of(cell))
        rest = [pair for pair in found if pair.column == "rest"]
        yield f"| {millions} | {ratio} | {_count(found)} of {len(found)} | {_count(rest)} of {len(rest)} |"


def _changes(measured: Sequence[RecipeErrors], other: Sequence[RecipeErrors]) -> Iterator[str]:
    """Yield the score on another model, and the pairs of which it says something else."""
    truth = truth_of(published(HERE / "transfer_published.csv")[TRUTH])
    both = [pairs_of(each, truth) for each in (measured, other)]
    yield f"| another model | {score(both[1])} |"
    yield f"| another model, rest | {score([pair for pair in both[1] if pair.column == 'rest'])} |"
    changed = [(one, two) for one, two in zip(*both, strict=True) if one.order != two.order]
    opposite = sum(one.order.decided and two.order.decided for one, two in changed)
    yield f"pairs with another order or refusal: {len(changed)}, of these opposite orders: {opposite}"


def _count(pairs: Sequence[Pair]) -> str:
    return f"{sum(pair.order.decided for pair in pairs)}, {sum(pair.right for pair in pairs)}"


def _intervals(pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield intervals of the share of right pairs, by bootstrap over the schemes' factors."""
    random, names = np.random.default_rng(0), {name: number for number, name in enumerate(NAMES)}
    weights = [factor_weights(random) for _ in range(DRAWS)]
    for column in ("", "nested", "facts", "rest"):
        used = [pair for pair in pairs if pair.order.decided and column in ("", pair.column)]
        if not used:
            continue
        ends = np.array([[names[name] for name in pair.names] for pair in used])
        hits = np.array([pair.right for pair in used])
        each = np.array([own[ends].prod(axis=1) for own in weights])
        low, high = np.percentile((each @ hits) / each.sum(axis=1), [2.5, 97.5])
        yield f"share right, {column or 'all'}: {hits.mean():.2f} ({low:.2f} to {high:.2f} over schemes)"


def predictions(capture: Capture) -> Iterator[str]:
    """Yield the pairs of the recipes of other publications as CSV, with the order of each rule.

    Rivals: the number of quantised operands, mean over layers, and the mean number of elements that share a
    scale; `first` and `second` as the command, `close` if they do not differ.
    """
    yield (
        "setting,first,second,order,fewer_operands,finer_blocks,"
        "error_first,error_second,bias_first,bias_second"
    )
    rows = [(setting, row, recipe) for setting, rows in SETTINGS.items() for row, recipe in rows.items()]
    distinct = [*dict.fromkeys(recipe for *_, recipe in rows)]
    measured = dict(zip(distinct, measure(distinct, capture.batches, capture.layers), strict=True))
    for (setting, first, one), (other, second, two) in combinations(rows, 2):
        if setting != other:
            continue
        both = measured[one], measured[two]
        order = compare(*both)
        rivals = [
            _ordered(*(rule(each) for each in both)) if order is not Order.GROUP else order
            for rule in (_operands, _elements)
        ]
        values = [each.by_layer(bias).mean() for bias in (False, True) for each in both]
        yield ",".join([setting, first, second, order, *rivals, *(f"{value:.5f}" for value in values)])


def _ordered(first: float, second: float) -> Order:
    return Order.CLOSE if first == second else Order.FIRST if first < second else Order.SECOND


def _operands(measured: RecipeErrors) -> float:
    return float((measured.error > 0).sum())


def _elements(measured: RecipeErrors) -> float:
    quants = [quant for _, quant in measured.recipe.products.quantised()]
    return sum(math.inf if quant.block is None else math.prod(quant.tile) for quant in quants) / len(quants)


WORDS = {"reference": 0.0, "same": 0.0, "better": -1.0, "slightly better": -1.0, "worse": 1.0}
"""Outcomes against the reference row of a setting."""
ENDS = {"converged": 0.0, "diverged": math.inf, "unstable": math.inf}


def elsewhere() -> Iterator[str]:
    """Yield the tables of the other publications: committed predictions joined with outcomes."""
    facts = {row["row"]: row for row in _rows("rank_published.csv")}
    predicted = _rows("rank_predictions.csv")
    by_rule: dict[str, list[Pair]] = {}
    for rule in ("order", "fewer_operands", "finer_blocks"):
        by_rule[rule] = []
        for row in predicted:
            first, second = (facts[row[name]] for name in ("first", "second"))
            words = [one["value"] in WORDS for one in (first, second)]
            if all(words) and "reference" not in (first["value"], second["value"]):
                continue
            gap = _outcome(first) - _outcome(second)
            names = row["first"], row["second"]
            by_rule[rule].append(
                Pair(
                    Order(row[rule]),
                    0.0 if math.isnan(gap) else gap,
                    names,
                    row["setting"],
                    publication(first),
                )
            )
    yield f"settings {len({row['setting'] for row in predicted})}, rows {len(facts)}"
    yield HEAD
    for rule, pairs in by_rule.items():
        yield f"| all, {rule} | {score(pairs)} |"
    yield "\n" + HEAD
    for setting in dict.fromkeys(row["setting"] for row in predicted):
        yield f"| {setting} | {score([pair for pair in by_rule['order'] if pair.column == setting])} |"
    debug = [pair for pair in by_rule["order"] if not pair.column.startswith("alto_debug")]
    yield f"| without alto_debug, whose loss floor suggests random tokens | {score(debug)} |"
    errors = {
        (row["first"], row["second"]): float(row["error_first"]) - float(row["error_second"])
        for row in predicted
    }
    for order in (Order.BIAS, Order.ROTATION, Order.CLOSE):
        own = [pair for pair in by_rule["order"] if pair.order is order and pair.gap]
        plain = sum(errors[pair.names] * pair.gap > 0 for pair in own)
        level = sum(not errors[pair.names] for pair in own)
        found = f"the lower error trains better in {plain}, errors are equal in {level}"
        yield f"refused for {order}, without ties: {len(own)}; {found}"
    yield "\nShare right of decided pairs without ties, 95 % over publications, and as a mean of theirs:"
    for rule, pairs in by_rule.items():
        yield f"{rule}: {_over_sources(pairs)}"
    wrong = [pair for pair in by_rule["order"] if pair.order.decided and pair.gap and not pair.right]
    yield from (f"wrong: {pair.column}, {' and '.join(pair.names)}, gap {pair.gap:+.4g}" for pair in wrong)


def publication(row: dict[str, str]) -> str:
    """Return the publication of a row, without the place in it."""
    return re.split(r",| \(", row["source"])[0]


def _rows(name: str) -> list[dict[str, str]]:
    return [*csv.DictReader((HERE / name).read_text().splitlines())]


def _outcome(row: dict[str, str]) -> float:
    """Return an outcome; the lower trains better."""
    value = row["value"]
    if value in WORDS or value in ENDS:
        return (WORDS | ENDS)[value]
    return -float(value) if row["better"] == "higher" else float(value)


def _over_sources(pairs: Sequence[Pair]) -> str:
    """Return the share of right pairs, and its mean over sources, with bootstrap intervals over sources."""
    counted = [pair for pair in pairs if pair.order.decided and pair.gap]
    sources = [*dict.fromkeys(pair.source for pair in counted)]
    hits = np.array([sum(pair.right for pair in counted if pair.source == own) for own in sources])
    counts = np.array([sum(pair.source == own for pair in counted) for own in sources])
    drawn = np.random.default_rng(0).integers(len(sources), size=(DRAWS, len(sources)))
    pooled = hits[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    alike = (hits / counts)[drawn].mean(axis=1)
    shares = (hits.sum() / counts.sum(), pooled), ((hits / counts).mean(), alike)
    texts = [
        f"{share:.2f} ({np.percentile(each, 2.5):.2f} to {np.percentile(each, 97.5):.2f})"
        for share, each in shares
    ]
    return f"{texts[0]}; {texts[1]}, {len(sources)} publications"


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["published", "predict", "elsewhere"])
    parser.add_argument("--model", help="`published`: also compare with a model of transformers, one batch.")
    parser.add_argument("--seed", type=int, help="`published`: also compare with this seed of the model.")
    given = parser.parse_args()
    what = given.what
    if what == "elsewhere":
        print("\n".join(elsewhere()))
        return 0
    model = built_in(3, lambda line: print(line, file=sys.stderr))
    if what == "predict":
        print("\n".join(predictions(model)))
        return 0
    measured = measure([scheme.recipe for scheme in SCHEMES.values()], model.batches, model.layers)
    print("\n".join(published_tables(measured)))
    others = [] if given.model is None else [of_model(given.model, 1)]
    if given.seed is not None:
        others.append(built_in(3, lambda line: print(line, file=sys.stderr), given.seed))
    for other in others:
        recipes = [scheme.recipe for scheme in SCHEMES.values()]
        print("\n".join(_changes(measured, measure(recipes, other.batches, other.layers))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
