"""Stochastic rounding: each draw, its distribution, and how draws of elements, calls and seeds relate.

Draws are counted, so the intervals are those of the binomial distribution: five standard deviations, which a
right implementation leaves once in 1.7 million cases. The recipe's 8 random bits move a probability by up to
1/256 toward zero; that much is allowed to the mean, and reported with its sign by `bias`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError, Property, reference
from ablate.verification.conformance.numbers import Numbers, far, over_elements
from ablate.verification.conformance.result import Block, Outcome, Row, decided

SIGMAS = 5.0
POSITIONS = (7 / 64, 15 / 64, 1 / 2, 47 / 64, 55 / 64)
"""Positions between two neighbours at which draws are counted: exact in bf16, and all but 1/2 just below a
multiple of 1/8, 1/16 and 1/32, to which a rounding by so few random bits would move them."""
CALLS = 8
_ROWS, _COLUMNS = 128, 256


@dataclass(frozen=True)
class Draws:
    """Draws of one tensor of known positions, in units of the step between the two neighbours."""

    position: Tensor
    """Position of each element between its neighbours, [rows, columns]; 0 for the blocks' largest element."""
    drawn: tuple[Tensor, ...]
    """For each call, (value - lower neighbour) / step; 0 or 1 if the draw is adjacent."""


def _drawn(bench: Examination, x: Tensor, seed: int) -> tuple[Tensor, Numbers]:
    return bench.values(x, bench.stochastic, "cast_stochastic", seed=seed)


def _values(bench: Examination, x: Tensor, seed: int) -> Tensor:
    return _drawn(bench, x, seed)[0]


def grid(bench: Examination, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the lower neighbour of each element, the step above it, and its position, as values of x."""
    quant = bench.stochastic
    if quant.outer is not None and quant.outer.granularity == "block:128":
        raise NotApplicableError("the recipe has a second level for every 128 elements")
    exact = reference(x, inputs.to_nearest(quant))
    if exact.scales is None:
        raise NotApplicableError("the recipe has no block scales")
    factor = over_elements(exact.scales, quant.tile[1], x.shape[1]).double()
    factor = factor if exact.outer is None else factor * exact.outer.double()
    element = ELEMENTS[quant.element]
    scaled = (x.double() / factor).abs().nan_to_num(0.0).clamp(max=element.max)
    near = (scaled * 2**18).round() / 2**18  # the fp32 roundings of the scale, far below the grid's step
    step = element.step(near.float()).double()
    lower = torch.where(near >= element.max, element.max, (near / step).floor() * step)
    position = torch.where(near >= element.max, 0.0, (near - lower) / step)
    return lower * factor * x.sign(), step * factor * torch.where(x < 0, -1.0, 1.0), position


def draws(bench: Examination) -> Draws:
    """Return CALLS draws of a tensor whose elements lie at POSITIONS, made once for all properties."""
    if bench.drawn is None:
        quant = bench.stochastic
        if quant.scale is None or quant.block is None:
            raise NotApplicableError("the recipe has no block scales")
        bench.function("cast_stochastic")
        rows, columns = bench.size(_ROWS, _COLUMNS, quant)
        top = ELEMENTS[quant.element].max
        amax = inputs.exact_amax([(quant, None)]) or top
        lower = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])
        steps = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0])
        generator = torch.Generator().manual_seed(bench.seed + 11)
        cell = torch.randint(len(lower), (rows, columns), generator=generator)
        where = torch.tensor(POSITIONS)[torch.randint(len(POSITIONS), (rows, columns), generator=generator)]
        signs = 1.0 - 2.0 * torch.randint(2, (rows, columns), generator=generator)
        x = (lower[cell] + where * steps[cell]) * signs
        x[:, :: quant.tile[1]] = top
        x = bench.typed(x * (amax / top))
        below, step, position = grid(bench, x)
        drawn = tuple((_values(bench, x, seed).double() - below) / step for seed in range(CALLS))
        bench.drawn = Draws(position, drawn)
    made: Draws = bench.drawn
    return made


def _normal(bench: Examination, rows: int, columns: int, seed: int = 0) -> Tensor:
    bench.function("cast_stochastic")
    return bench.normal(rows, columns, bench.stochastic, seed)


def _adjacent(bench: Examination) -> Row:
    """Compare every draw with the two neighbours of its element, up to the roundings of dequantisation."""
    x = _normal(bench, 64, 128)
    below, step, position = grid(bench, x)
    differ = cases = 0
    block = None
    for seed in range(4):
        values, got = _drawn(bench, x, seed)
        wrong = far(values, below.float(), got.dtype) & far(values, (below + step).float(), got.dtype)
        # At a grid value, the fp32 roundings of the scale decide on which side the scaled element lies.
        wrong &= (position > 0) | far(values, (below - step).float(), got.dtype)
        differ, cases = differ + int(wrong.sum()), cases + wrong.numel()
        if wrong.any() and block is None:
            row, column = (int(i) for i in wrong.nonzero()[0])
            lower, upper = float(below[row, column]), float((below + step)[row, column])
            block = Block(
                f"row {row}, column {column}",
                (float(x[row, column]),),
                (lower, upper),
                (float(values[row, column]),),
                f"neighbours {lower:.6g} and {upper:.6g}",
            )
    return decided(cases, differ, block)


def _kept(bench: Examination) -> Row:
    """Compare draws of values on the grid with the values, up to the roundings of dequantisation."""
    quant = bench.stochastic
    amax = inputs.exact_amax([(quant, None)])
    if amax is None:
        raise NotApplicableError("the recipe's headroom leaves no tensor of bf16 numbers on the grid")
    x = bench.typed(inputs.permuted_tiles(*bench.size(64, 128, quant), bench.seed, amax))
    differ = sum(int(far(_values(bench, x, seed), x.float()).sum()) for seed in range(CALLS))
    return decided(CALLS * x.numel(), differ)


def _moment(
    of: Callable[[Tensor, float], Tensor], expected: Callable[[float], float], allowed: Callable[..., float]
) -> Callable[[Examination], Row]:
    """Return the comparison of a moment of draws at each position: five standard deviations of the counts,
    and 2^-8 for the random bits.

    `of` takes draws, 1 for those that round up, and their position to the numbers whose mean is the moment;
    `expected`: moment of a position; `allowed`: largest difference, of the position, the number of draws and
    the random bits.
    """

    def compare(bench: Examination) -> Row:
        made, off, texts, cases = draws(bench), False, [], 0
        for position in POSITIONS:
            hit = (made.position - position).abs() < 1e-6
            if not hit.any():
                continue
            ups = torch.cat([drawn[hit] for drawn in made.drawn])
            cases += len(ups)
            got, right = float(of(ups, position).mean()), expected(position)
            reach = allowed(position, len(ups), bench.stochastic.bits)
            off |= not abs(got - right) <= reach
            texts.append(f"{got:.4f} at {position:g} of a step, not {right:.4f} +- {reach:.4f}")
        return decided(cases, int(off), detail="; ".join(texts) if off else "")

    return compare


def _variance_reach(position: float, count: int, bits: int) -> float:
    """Return the largest difference of a variance; at 1/2 every draw has the same square, so that only the
    values' own rounding is left."""
    variance, skew = position * (1 - position), abs(1 - 2 * position)
    return SIGMAS * skew * math.sqrt(variance / count) + skew * 2.0**-bits + 1e-2 * variance


def _bias(bench: Examination) -> Row:
    """Report the mean error in steps, and the gain of normal numbers, with their 95 % intervals."""
    made = draws(bench)
    inner = made.position > 0
    error = torch.cat([(drawn - made.position)[inner] for drawn in made.drawn])
    half = SIGMAS / 2.5 * float(error.std()) / math.sqrt(len(error))
    x = _normal(bench, 128, 256, 3)
    gains = []
    for seed in range(CALLS):
        values = _values(bench, x, seed).double()
        gains.append(float((values * x.double()).sum() / x.double().square().sum()))
    mean = sum(gains) / CALLS
    spread = 2 * math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (CALLS - 1) / CALLS)
    detail = f"mean error {float(error.mean()):+.4f} +- {half:.4f} step; gain of normal data"
    return Row("", Outcome.REPORT, len(error), 0, detail=f"{detail} {mean:.4f} +- {spread:.4f}")


def _seeds(bench: Examination) -> Row:
    """Compare draws of equal and of other seeds, seed 0 included, exactly."""
    x = _normal(bench, 32, 128)
    drawn = {seed: _values(bench, x, seed) for seed in (0, 1, 2, 12345)}
    same = [(a, b) for a in drawn for b in drawn if a < b and torch.equal(drawn[a], drawn[b])]
    changed = [seed for seed in drawn if not torch.equal(_values(bench, x, seed), drawn[seed])]
    if same:
        detail = f"seeds {same[0][0]} and {same[0][1]} give the same draws"
    elif changed and bench.subject.seeded:
        detail = f"seed {changed[0]} gives other draws the second time"
    else:
        return decided(len(drawn), 0)
    pairs = len(drawn) * (len(drawn) - 1) // 2
    return decided(pairs + len(drawn), len(same) + len(changed), detail=detail)


def _independent(bench: Examination) -> Row:
    """Correlate draws of neighbours, rows, blocks, halves and seeds: five standard deviations."""
    made = draws(bench)
    inner = made.position > 0
    residual = [torch.where(inner, drawn - made.position, 0.0) for drawn in made.drawn]
    rows, columns = made.position.shape
    length = bench.stochastic.tile[1]
    shifts = {
        "neighbouring columns": (0, 1),
        "every second column": (0, 2),
        "columns 8 apart": (0, 8),
        "neighbouring blocks": (0, length),
        "the two halves of a row": (0, columns // 2),
        "neighbouring rows": (1, 0),
        "rows 16 apart": (16, 0),
        "the two halves of the tensor": (rows // 2, 0),
    }
    looks: list[tuple[str, list[tuple[Tensor, Tensor]]]] = [
        (what, [(one[: rows - down, : columns - across], one[down:, across:]) for one in residual])
        for what, (down, across) in shifts.items()
        if down < rows and across < columns
    ]
    looks += [("two seeds", [(residual[a], residual[b])]) for a in range(CALLS) for b in range(a)]
    worst, text, cases = 1.0, "", 0
    for what, pairs in looks:
        ratio, number = _correlation(pairs)
        if number < 64:
            continue
        cases += number
        # The 28 pairs of seeds and 8 shifts are 36 looks at five standard deviations. The bits' floor shifts
        # each residual by up to 2^-bits, which correlates by its square.
        size = abs(ratio) / (SIGMAS / math.sqrt(number) + 2.0**-8)
        if size > worst:
            worst, text = size, f"draws of {what} correlate: {ratio:.3f}"
    return decided(cases, int(bool(text)), detail=text)


def _correlation(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """Return the correlation of residuals about zero, and the number of pairs in which neither is zero."""
    one = torch.cat([a.flatten() for a, _ in pairs])
    other = torch.cat([b.flatten() for _, b in pairs])
    both = (one != 0) & (other != 0)
    one, other = one[both], other[both]
    power = math.sqrt(float(one.square().sum()) * float(other.square().sum()))
    return float((one * other).sum()) / power if power else 0.0, int(both.sum())


def _halves(bench: Examination) -> Row:
    """Compare the draws of two equal tensors in one call, one above the other: five standard deviations."""
    half = _normal(bench, 64, 256)
    values = _values(bench, torch.cat((half, half)), 5)
    _, _, position = grid(bench, half)
    inner = position > 0
    share = float((values[: len(half)] == values[len(half) :])[inner].double().mean())
    # Two independent draws of a cell agree with probability f^2 + (1 - f)^2, at least 1/2.
    expected = float((position**2 + (1 - position) ** 2)[inner].mean())
    limit = expected + SIGMAS * math.sqrt(expected * (1 - expected) / int(inner.sum()))
    differ = share > limit
    detail = f"{100 * share:.1f} % of draws agree, not {100 * expected:.1f} %" if differ else ""
    return decided(int(inner.sum()), int(differ), detail=detail)


_mean = _moment(
    lambda ups, position: ups,
    lambda position: position,
    lambda position, count, bits: 2.0**-bits + SIGMAS * math.sqrt(position * (1 - position) / count),
)
_variance = _moment(
    lambda ups, position: (ups - position).square(),
    lambda position: position * (1 - position),
    _variance_reach,
)
PROPERTIES = (
    Property("adjacent_draws", "cast_stochastic", _adjacent),
    Property("exact_values_kept", "cast_stochastic", _kept),
    Property("mean_of_draws", "cast_stochastic", _mean),
    Property("variance_of_draws", "cast_stochastic", _variance),
    Property("bias_of_draws", "cast_stochastic", _bias),
    Property("seeds", "cast_stochastic", _seeds),
    Property("independent_draws", "cast_stochastic", _independent),
    Property("calls_differ", "cast_stochastic", _halves),
)
