"""Gain and relative error of a quantised product, and the intervals in which a recipe's draws of them lie.

The problem. A product that is wrong in a layout or a scale is often still close to the exact one: an SQNR of
6 dB passes a loose bound. A bound that is not loose depends on the data, the recipe and its random bits.

The idea. For y, the product of the unquantised operands, and y_q, that of the quantised ones,

    gain    = <y_q, y> / <y, y>      1 is unbiased; a lost factor or scales in a wrong order move it
    rel_l2  = |y_q - y| / |y|

The emulator's product of the same operands, by other random bits, says what they should be. By how much they
may differ follows from the grid: an element that is rounded at random moves by at most one step D of it, and
the gain by D c / <y, y>, where c is the element of y b (b: the other operand). Elements are rounded
independently, so Hoeffding's inequality bounds the difference of two draws: with S = sum (D c)^2, it exceeds

    sqrt(S ln(2 / alpha)) / <y, y>

with a probability of at most alpha, however few elements dominate. A variance that is estimated from some
draws does not: an element that is rarely rounded up was often rounded down in all of them. The product of the
errors of both operands is left out. The relative error of the same products differs by as much, and by a part
`RELATIVE` of itself, which clean trainings stay below (benchmarks/product_gains.py).

    exact = product(Operand(a), Operand(b), torch.float32)
    Expected.of(compare(ours, exact), spread).covers(compare(theirs, exact))

Not modelled: rotations whose signs the emulator does not know, and draws of users' functions (`bounded`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ablate.numerics import gpu_sums
from ablate.numerics.formats import SCALES, element_format
from ablate.numerics.own import Own
from ablate.numerics.quantize import Operand, pad
from ablate.numerics.spec import Quant, rounding_of

ALPHA = 1e-8
"""Probability that the gain of a correct product lies outside: at most 1e-3 over 100,000 comparisons, as in
a run of 100 layers, 3 products and 333 measured steps."""
SLACK = 2.0**-9
"""Half-width that the order of additions and one rounding to bf16 are given: two sums next to a boundary
differ by 2^-8 at most, and few of them are."""
RELATIVE = 0.05
"""Part by which the relative errors of two draws may differ."""
ROWS = 2048
"""Rows of a product that are in memory in fp64 at once."""


@dataclass(frozen=True)
class Sums:
    """Sums over a product y_q and the exact product y."""

    power: float
    """<y, y>."""
    inner: float
    """<y_q, y>."""
    error: float
    """|y_q - y|^2."""

    @property
    def gain(self) -> float:
        """Return <y_q, y> / <y, y>; NaN if the exact product is zero."""
        return self.inner / self.power if self.power else math.nan

    @property
    def rel_l2(self) -> float:
        """Return |y_q - y| / |y|; NaN if the exact product is zero."""
        return math.sqrt(self.error / self.power) if self.power else math.nan

    def __add__(self, other: "Sums") -> "Sums":
        """Return the sums over two parts of a product."""
        return Sums(self.power + other.power, self.inner + other.inner, self.error + other.error)


def compare(y: Tensor, exact: Tensor) -> Sums:
    """Return the sums over a product [rows, columns], of any dtype, and the exact one, fp32 or fp64; squares
    and sums are in fp64."""
    made = gpu_sums.of_product(y, exact)
    if made is not None:
        return Sums(*made.cpu().tolist())
    total = Sums(0.0, 0.0, 0.0)
    for own, true in zip(y.split(ROWS), exact.split(ROWS), strict=True):
        own, true = own.double(), true.double()
        values = (true.square(), own * true, (own - true).square())
        total += Sums(*torch.stack([value.sum() for value in values]).cpu().tolist())
    return total


def bounded(quant: Quant) -> bool:
    """Return False if it is not known by how much draws move a value: those of a function of the user's, and
    those whose errors are amplified or permuted."""
    scale_rounding = None if quant.scale is None else quant.scale.rounding
    functions = [word for word in (quant.own, quant.rounding) if isinstance(word, Own)]
    scale_draws = isinstance(scale_rounding, Own) and scale_rounding.draws
    return not quant.draws or not (functions or scale_draws or quant.altered)


def spread(y: Tensor, a: Sequence[Operand], b: Sequence[Operand]) -> float:
    """Return S of the roundings of both operands: the sum of the squares by which each can move <y_q, y>.

    `y` is the exact product of the unquantised two [rows, columns]: a draw of it may lack what was rounded to
    zero, and with it the width for all that other draws have there. `a` and `b` are parts whose sums are the
    operands [rows, contraction] and [columns, contraction].
    """
    y, total = y.to(torch.float32), 0.0
    for one, other, z in ((a, b, y), (b, a, y.t())):
        for own in one:
            if own.quant is not None and own.quant.draws:
                first, *rest = (_to_width(_values(part), own.values.shape[1]) for part in other)
                total += moved_by(own, z @ sum(rest, first))
    return total


def _to_width(z: Tensor, width: int) -> Tensor:
    """Return a matrix with so many columns: padded with zeros, or without its padding."""
    return pad(z, 1, width or 1)[:, :width]


def moved_by(operand: Operand, weights: Tensor) -> float:
    """Return the sum over an operand's random roundings of the squared change of <operand, weights>."""
    quant = operand.quant
    assert quant is not None
    scale_draws = quant.scale is not None and rounding_of(quant.scale.rounding).draws
    if not scale_draws and gpu_sums.can_sum(operand):
        return gpu_sums.of_moves(operand, weights).item()
    weights = weights.double()
    if quant.rounding == "ms_eden":  # moves the scale of a block by one step of its format
        assert quant.scale is not None
        moves = tiles(operand, _values(operand) * weights).sum((1, 3))
        moves = moves * 2.0 ** -SCALES[quant.scale.format].mantissa
    else:
        moves = steps(operand) * weights
        if scale_draws:  # a whole block at once
            moves = 2 * tiles(operand, moves.abs()).sum((1, 3))
    return moves.square().sum().item()


def steps(operand: Operand) -> Tensor:
    """Return the distance from each value of an operand to the next larger one, fp32 [rows, columns]."""
    assert operand.quant is not None
    scale = (
        torch.ones((), device=operand.values.device) if operand.block_scale is None else operand.block_scale
    )
    values = tiles(operand, operand.values.to(torch.float32))
    codes = torch.where(scale == 0, 0, values / scale).abs().contiguous()
    made = (element_format(operand.quant.element).step(codes) * scale).flatten(2).flatten(0, 1)
    return made[: operand.values.shape[0], : operand.values.shape[1]] * _factor(operand)


def tiles(operand: Operand, z: Tensor) -> Tensor:
    """Return a matrix like an operand's values as its tiles [row tiles, rows, column tiles, columns]."""
    assert operand.quant is not None
    rows, columns = operand.quant.tile if operand.block_scale is not None else (1, 1)
    padded = pad(z, rows, columns)
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _factor(operand: Operand) -> Tensor | float:
    return (1.0 if operand.amax is None else operand.amax) / operand.divisor


def _values(operand: Operand) -> Tensor:
    """Return code times scales, fp32."""
    if operand.values.is_cuda and operand.quant is not None:
        return operand.dequantize()  # in one launch, and as exact
    return operand.values.to(torch.float32) * _factor(operand)


@dataclass(frozen=True)
class Expected:
    """Expected gain and relative error of a product, each with half the width of its interval."""

    gain: float
    gain_margin: float
    rel_l2: float
    rel_l2_margin: float

    @classmethod
    def of(cls, drawn: Sums, spread: float = 0.0, slack: float = SLACK, alpha: float = ALPHA) -> "Expected":
        """Return the intervals of another draw of the product whose emulated draw is `drawn`. `spread` is
        what `spread` returns, 0 if the recipe draws nothing; `slack` a half-width that is always given;
        `alpha` the probability that the gain of a correct product lies outside."""
        width = math.sqrt(spread * math.log(2 / alpha)) / drawn.power if drawn.power else 0.0
        relative = RELATIVE * drawn.rel_l2 if spread else 0.0
        return cls(drawn.gain, width + slack, drawn.rel_l2, relative + width + slack)

    def over(self, errors: Sequence[float]) -> "Expected":
        """Return the intervals with that of the relative error widened by the range of some draws' errors."""
        middle, half = (max(errors) + min(errors)) / 2, (max(errors) - min(errors)) / 2
        return replace(self, rel_l2=middle, rel_l2_margin=self.rel_l2_margin + half)

    def beyond(self, measured: Sums) -> dict[str, float]:
        """Return the distances of the measured values from the expected ones, in half-widths: 1 is the end
        of the interval. Keys are `gain` and `rel_l2`."""
        return {
            "gain": abs(measured.gain - self.gain) / self.gain_margin,
            "rel_l2": abs(measured.rel_l2 - self.rel_l2) / self.rel_l2_margin,
        }

    def covers(self, measured: Sums) -> bool:
        """Return True if both values lie in their intervals; False if one of them is NaN."""
        return all(distance <= 1 for distance in self.beyond(measured).values())
