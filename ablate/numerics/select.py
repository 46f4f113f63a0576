"""Per block, the best of several candidates: Four Over Six, IF4, or a search that shows what a block scale can do at best."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES, Format
from ablate.numerics.rounding import nearest
from ablate.numerics.scaling import element_scales, round_scale
from ablate.numerics.spec import Quant

INT_STEP = 6 / 7
"""IF4 maps INT4's 7 to E2M1's 6, so that both grids share the block scale (fouroversix, quantize/pytorch/reference.py)."""
_SEARCH = 8
"""Scale codes tried on either side of the first guess."""


@dataclass(frozen=True)
class Candidate:
    """One way to quantise every block: a scale, and the values that its elements are rounded to (before the scale)."""

    block_scale: Tensor
    """fp32 [row tiles, 1, column tiles, 1]."""
    scaled: Tensor
    """fp32, like the tiles."""
    codes: Tensor


def select(tiles: Tensor, amaxes: Tensor, scale: Tensor, amax: Tensor | None, quant: Quant) -> Candidate:
    """The candidate with the strictly smallest error in each block; of equal ones the first.

    `scale` is S and `amax` the outer statistic that it comes from, if any.
    """
    found = CANDIDATES[quant.select.among](tiles, amaxes, scale, quant)
    best = next(found)
    error = block_error(best, tiles, amax, quant)
    for other in found:
        challenge = block_error(other, tiles, amax, quant)
        better = challenge < error
        error = torch.where(better, challenge, error)
        pairs = (
            (best.block_scale, other.block_scale),
            (best.scaled, other.scaled),
            (best.codes, other.codes),
        )
        best = Candidate(*(torch.where(better, new, old) for old, new in pairs))
    return best


def scales(tiles: Tensor, amaxes: Tensor, scale: Tensor, quant: Quant) -> Iterator[Candidate]:
    """Four Over Six (arXiv 2512.02010): the largest magnitude at 6, or at 4. Its order: (amax / 6) * S, times 1.5."""
    base = _base(amaxes, scale)
    for guess in (base, base * 1.5):
        yield _candidate(tiles, round_scale(guess, quant.scale), scale, ELEMENTS["e2m1"])


def grids(tiles: Tensor, amaxes: Tensor, scale: Tensor, quant: Quant) -> Iterator[Candidate]:
    """IF4: the E2M1 grid, or seven even steps up to 6, on one scale."""
    block_scale = round_scale(_base(amaxes, scale), quant.scale)
    yield _candidate(tiles, block_scale, scale, ELEMENTS["e2m1"])
    scaled = tiles * element_scales(block_scale, scale)
    yield Candidate(block_scale, scaled, nearest(scaled * (1 / INT_STEP), ELEMENTS["int4"]) * INT_STEP)


def search(tiles: Tensor, amaxes: Tensor, scale: Tensor, quant: Quant) -> Iterator[Candidate]:
    """The scale codes around amax / 6: what no rule for one scale a block can beat. Slow; a yardstick, not a recipe."""
    grid = SCALES[quant.scale.format]
    base = round_scale(_base(amaxes, scale), quant.scale)
    lower = upper = base
    yield _candidate(tiles, base, scale, ELEMENTS["e2m1"])
    for _ in range(_SEARCH):
        upper = (upper + grid.step(upper)).clamp(max=grid.max)
        yield _candidate(tiles, upper, scale, ELEMENTS["e2m1"])
        below = lower - grid.step(lower)
        crossed = lower == 2.0 ** torch.floor(
            torch.log2(lower.clamp(min=2.0**-126))
        )  # the binade below has the finer step
        lower = torch.where(crossed, lower - grid.step(lower * 0.75), below).clamp(
            min=2.0 ** (grid.emin - grid.mantissa)
        )
        yield _candidate(tiles, lower, scale, ELEMENTS["e2m1"])


def _base(amaxes: Tensor, scale: Tensor) -> Tensor:
    return amaxes / torch.full_like(amaxes, ELEMENTS["e2m1"].max) * scale


def _candidate(tiles: Tensor, block_scale: Tensor, scale: Tensor, element: Format) -> Candidate:
    scaled = tiles * element_scales(block_scale, scale)
    return Candidate(block_scale, scaled, nearest(scaled, element))


# --- errors ---------------------------------------------------------------------------------------


def block_error(candidate: Candidate, tiles: Tensor, amax: Tensor | None, quant: Quant) -> Tensor:
    """The error of each block in the original domain, fp32 [row tiles, 1, column tiles, 1], in Transformer Engine's order:
    q * s * amax / (6 * bound), summed along a row in turn, then over 16 rows as a tree."""
    values = candidate.codes * candidate.block_scale
    if amax is not None:
        values = values * amax
        values = values / torch.full_like(values, ELEMENTS["e2m1"].max * quant.outer.bound)
    return CRITERIA[quant.select.criterion](values - tiles)


def mse(difference: Tensor) -> Tensor:
    """The sum of squares."""
    return _sum(difference * difference)


def mae(difference: Tensor) -> Tensor:
    """The sum of magnitudes."""
    return _sum(difference.abs())


def absmax(difference: Tensor) -> Tensor:
    """The largest magnitude."""
    return difference.abs().amax(dim=(1, 3), keepdim=True)


def _sum(error: Tensor) -> Tensor:
    total = error[..., 0]
    for column in range(1, error.shape[3]):
        total = total + error[..., column]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total.unsqueeze(3)


CRITERIA = {function.__name__: function for function in (mse, mae, absmax)}
CANDIDATES = {function.__name__: function for function in (scales, grids, search)}
