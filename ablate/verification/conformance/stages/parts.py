"""A cast taken apart: what a subject returned at each stage, and what the recipe computes from its input."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import pad
from ablate.numerics.scaling import element_scales, encode_scale
from ablate.numerics.select import scales as candidates
from ablate.verification.conformance.computation import RECIPE, exact_scale
from ablate.verification.conformance.examination import Pair
from ablate.verification.conformance.inputs import grid
from ablate.verification.conformance.numbers import FP32_ROUNDINGS, TOLERANCES, over_elements
from ablate.verification.conformance.stages.places import NEAR


@dataclass(frozen=True)
class Parts:
    """One cast taken apart: what the subject returned at each stage, and what its inputs to it were."""

    pair: Pair
    x: Tensor
    """Input, fp32 [rows, columns]."""
    amax: Tensor | None
    """Amax of the subject's second level, fp32 scalar or [rows, 1]; None: the recipe has none."""
    outer: Tensor
    """S of this amax, or of the recipe's if more block scales are made with that."""
    other: bool
    """The block scales are made with another amax than the returned one."""
    block: Tensor
    """Statistic of each block, [rows, blocks]."""
    exact: Tensor
    """Block scale before its rounding, of the subject's S, [rows, blocks]."""
    wanted: Tensor
    """Block scale of the subject's S, [rows, blocks]."""
    scales: Tensor | None
    """Block scale of the subject, [rows, blocks]; None: not returned."""
    codes: Tensor | None
    """Element codes of the subject as numbers, [rows, columns]; None: not returned."""

    def elements(self, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scale of each element, the scaled elements, and their right codes, [rows, columns] each.

        Args:
            scales: Block scales, [rows, blocks].
        """
        quant = self.pair.quant
        spread = over_elements(scales, quant.tile[1], self.x.shape[1])
        scaled = self.x * element_scales(spread, self.outer)
        return spread, scaled, RECIPE.element(scaled, quant)


def apart(pair: Pair) -> Parts | None:
    """Return the stages of a cast, or None if the subject returned too little of them."""
    quant, got, x = pair.quant, pair.got, pair.x.float()
    amax = _own_amax(pair)
    one = torch.ones(())
    outer = one if amax is None else encode_scale(amax, quant)
    high, wide = quant.tile
    padded = pad(x, high, wide)
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)

    def rows(blocks: Tensor) -> Tensor:
        return blocks[:, 0, :, 0].repeat_interleave(high, 0)[: len(x)]

    block = RECIPE.block(tiles, quant)

    def of(outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        level = outer.view(-1, 1, 1, 1) if outer.ndim else outer
        return level, rows(exact_scale(block, level, quant)), rows(RECIPE.scale(block, level, one, quant))

    level, exact, wanted = of(outer)
    scales, codes, other = got.scales, got.codes, False
    if amax is not None and scales is not None and pair.expected.amax is not None:
        right = pair.expected.amax.reshape(-1, 1) if pair.expected.amax.ndim else pair.expected.amax
        made = of(encode_scale(right, quant))
        if int((made[2] == scales).sum()) > int((wanted == scales).sum()):
            (level, exact, wanted), outer, other = made, encode_scale(right, quant), True
    if scales is None and codes is None and got.values is not None and got.dtype == torch.float32:
        scales, codes = _recovered(got.values, pair, amax, wanted)
    if quant.select is not None and scales is not None:
        six, four = (rows(one.block_scale) for one in candidates(tiles, block, level, quant))
        wanted = torch.where(scales == four, four, six)
    return Parts(pair, x, amax, outer, other, rows(block), exact, wanted, scales, codes)


def _own_amax(pair: Pair) -> Tensor | None:
    """Return the amax that the subject's second level shows: the recipe's, if it is the same to rounding."""
    quant, got, expected = pair.quant, pair.got, pair.expected
    if quant.outer is None or expected.amax is None or expected.outer is None:
        return None
    outer = got.outer
    if outer is None and got.values is not None and got.codes is not None and got.scales is not None:
        unit = got.codes * over_elements(got.scales, quant.tile[1], pair.x.shape[1])
        shown = (unit != 0) & unit.isfinite() & got.values.isfinite()
        tolerance = TOLERANCES.get(got.dtype, FP32_ROUNDINGS)
        if shown.any():
            outer = (got.values[shown] / unit[shown]).median()
            if float((outer / expected.outer.reshape(-1)[0] - 1).abs()) <= tolerance:
                outer = None
    wanted = expected.amax.reshape(-1, 1) if expected.amax.ndim else expected.amax
    if outer is None or not bool(outer.isfinite().all()) or not bool((outer > 0).all()):
        return wanted
    own = outer.double() * (ELEMENTS[quant.element].max * quant.outer.bound)
    if not wanted.ndim and own.ndim and bool((own == own[0]).all()):
        own = own.flatten()[0]
    same = bool(((own / wanted - 1).abs() <= NEAR).all())
    magnitudes = pair.x.float().abs().flatten()
    if not same and not own.ndim:  # the element that it came from, without the rounding of the division
        nearest = magnitudes[(magnitudes - own).abs().argmin()]
        own = nearest if abs(float(nearest / own) - 1) <= NEAR else own
    return wanted if same else own.float()


def _recovered(
    values: Tensor, pair: Pair, amax: Tensor | None, wanted: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return block scales and codes of fp32 values: of the scales that fit, the nearest to the recipe's."""
    quant = pair.quant
    assert quant.scale is not None
    length, (rows, columns) = quant.tile[1], values.shape
    expected = pair.expected.outer
    level = 1.0 if expected is None else expected
    unit = torch.nn.functional.pad(values / level, (0, -columns % length)).view(rows, -1, length)
    points = grid(quant.element)
    steps = (
        2.0 ** torch.arange(-8, 9)
        if not SCALES[quant.scale.format].mantissa
        else torch.tensor([m / n for m in range(8, 17) for n in range(8, 17)]).unique()
    )
    best, apart_by = torch.full(wanted.shape, float("nan")), torch.full(wanted.shape, float("inf"))
    for step in steps.tolist():
        s = wanted * step
        code = (unit / s[:, :, None]).abs()
        near = points[torch.bucketize(code, (points[1:] + points[:-1]) / 2)]
        fits = ((code - near).abs() <= 4 * FP32_ROUNDINGS * near).all(2) & (s > 0)
        distance = abs(torch.tensor(step).log2())
        better = fits & (distance < apart_by)
        best, apart_by = torch.where(better, s, best), torch.where(better, distance, apart_by)
    zero = (unit == 0).all(2)
    best = torch.where(zero, wanted, best)
    if float(best.isnan().double().mean()) > 0.05:
        return None, None
    spread = over_elements(best, length, columns)
    codes = torch.where(spread > 0, values / level / spread, 0.0)
    index = torch.bucketize(codes.abs().nan_to_num(0.0), (points[1:] + points[:-1]) / 2)
    return best, points[index].copysign(codes)
