"""Choice of the best of several quantisations of each block: Four Over Six, IF4, or a search over scales."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES, Format
from ablate.numerics.rounding import nearest
from ablate.numerics.scaling import element_scales, round_scale
from ablate.numerics.spec import Quant

INT_STEP = 6 / 7
"""IF4 maps INT4's 7 to E2M1's 6, so that both grids share the block scale (fouroversix,
quantize/pytorch/reference.py)."""
_SEARCH = 8
"""Scale codes tried on either side of the first one."""


class Candidate(NamedTuple):
    """One way to quantise every block: its scale, its scaled elements, and the grid values they round to."""

    block_scale: Tensor
    """fp32 [row tiles, 1, column tiles, 1]."""
    scaled: Tensor
    """fp32, like the tiles."""
    codes: Tensor


def select(tiles: Tensor, amaxes: Tensor, scale: Tensor, amax: Tensor | None, quant: Quant) -> Candidate:
    """Return the candidate with the smallest error in each block, the first one if errors are equal.

    `tiles` are fp32 [row tiles, rows, column tiles, columns], `amaxes` the largest magnitude of each block,
    fp32 [row tiles, 1, column tiles, 1]. `scale` is S, fp32, broadcasting to `amaxes`, and `amax` the outer
    statistic from which it was computed; None without one.
    """
    assert quant.select is not None
    candidates = CANDIDATES[quant.select.among](tiles, amaxes, scale, quant)
    best = next(candidates)
    error = block_error(best, tiles, amax, quant)
    for other in candidates:
        other_error = block_error(other, tiles, amax, quant)
        better = other_error < error
        error = torch.where(better, other_error, error)
        best = Candidate(*(torch.where(better, new, old) for old, new in zip(best, other, strict=True)))
    return best


def scales(tiles: Tensor, amaxes: Tensor, scale: Tensor, quant: Quant) -> Iterator[Candidate]:
    """Yield Four Over Six's two candidates (arXiv 2512.02010): the largest magnitude maps to 6, or to 4. Its
    order of operations: (amax / 6) * S, and 1.5 times that; for another pair of `select.map_to`, 6 over its
    values times that."""
    assert quant.scale is not None
    assert quant.select is not None
    base, grid = _base(amaxes, scale), ELEMENTS["e2m1"]
    for value in quant.select.map_to:
        factor = torch.full_like(base, grid.max / value)
        yield _candidate(tiles, round_scale(base * factor, quant.scale), scale, grid)


def grids(tiles: Tensor, amaxes: Tensor, scale: Tensor, quant: Quant) -> Iterator[Candidate]:
    """Yield IF4's two candidates: the E2M1 grid, or seven even steps up to 6, with the same block scale."""
    assert quant.scale is not None
    block_scale = round_scale(_base(amaxes, scale), quant.scale)
    yield _candidate(tiles, block_scale, scale, ELEMENTS["e2m1"])
    scaled = tiles * element_scales(block_scale, scale)
    yield Candidate(block_scale, scaled, nearest(scaled * (1 / INT_STEP), ELEMENTS["int4"]) * INT_STEP)


def search(tiles: Tensor, amaxes: Tensor, scale: Tensor, quant: Quant) -> Iterator[Candidate]:
    """Yield the scale codes around amax / 6, a bound on what any rule for block scales reaches. Slow: this is
    a reference for comparisons, not a recipe."""
    assert quant.scale is not None
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
    """Return the error of each block in the original domain, fp32 [row tiles, 1, column tiles, 1]. In
    Transformer Engine's order: values are q * s * amax / (6 * bound); errors are summed along a row one by
    one, then over 16 rows as a tree."""
    assert quant.select is not None
    values = candidate.codes * candidate.block_scale
    if amax is not None and quant.outer is not None:
        values = values * amax
        values = values / torch.full_like(values, ELEMENTS["e2m1"].max * quant.outer.bound)
    return CRITERIA[quant.select.criterion](values - tiles)


def mse(difference: Tensor) -> Tensor:
    """Return the sum of squares of each block."""
    return _sum(difference * difference)


def mae(difference: Tensor) -> Tensor:
    """Return the sum of magnitudes of each block."""
    return _sum(difference.abs())


def absmax(difference: Tensor) -> Tensor:
    """Return the largest magnitude of each block."""
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
