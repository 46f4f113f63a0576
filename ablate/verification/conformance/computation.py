"""Cast of a matrix in replaceable steps: the recipe's, or with those that a subject declares.

The recipe's own steps are those of `ablate.numerics`. A declared variant replaces one of them:

    replace(RECIPE, outer=lambda amax, quant: torch.ones_like(amax))       # no tensor scale
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import pad
from ablate.numerics.rounding import away, nearest
from ablate.numerics.scaling import (
    FLT_MAX,
    block_amax,
    block_scales,
    block_statistic,
    element_scales,
    encode_scale,
    round_scale,
)
from ablate.numerics.select import Candidate, block_error
from ablate.numerics.spec import Quant, argument, tag
from ablate.verification.conformance.numbers import Numbers


class NoComputationError(Exception):
    """A recipe or input for which a computation is not defined."""


def top(quant: Quant) -> float:
    """Return the element value that a block's largest magnitude is mapped to."""
    return quant.range.map_to or ELEMENTS[quant.element].max


def rounded_scale(exact: Tensor, quant: Quant) -> Tensor:
    """Return exact block scales rounded to the scales' format."""
    assert quant.scale is not None
    return round_scale(exact.clamp(max=FLT_MAX), quant.scale)


def exact_scale(a: Tensor, outer: Tensor, quant: Quant) -> Tensor:
    """Return the block scales before they are rounded to their format, fp32."""
    return (a * (outer * torch.full_like(outer, 1 / top(quant)) * quant.range.headroom)).clamp(max=FLT_MAX)


def _tensor_amax(x: Tensor, quant: Quant) -> Tensor:
    """Return the largest magnitude of the tensor, or of each row; fp32, broadcasting to tiles."""
    assert quant.outer is not None
    if tag(quant.outer.statistic) == "static":
        return torch.tensor(float(argument(quant.outer.statistic) or 0))
    if quant.outer.granularity == "tensor":
        return x.abs().amax()
    if quant.outer.granularity == "row" and quant.tile[0] == 1:
        return x.abs().amax(dim=1).view(-1, 1, 1, 1)
    raise NoComputationError(f"granularity {quant.outer.granularity}")


def _scaled(tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return tiles * element_scales(s, outer)


def _element(y: Tensor, quant: Quant) -> Tensor:
    rule = away if quant.rounding == "away" else nearest
    return rule(y, ELEMENTS[quant.element])


def _decode(codes: Tensor, s: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant) -> Tensor:
    """Return code x ((s x amax) / (6 bound))."""
    divisor = quant.range.prescale
    if amax is None or quant.outer is None:
        return codes * (s / divisor)
    divisor *= ELEMENTS[quant.element].max * quant.outer.bound
    return codes * (s * amax * (1.0 / torch.tensor(divisor)))


@dataclass(frozen=True)
class Computation:
    """Steps of a cast, each a function. Tiles are [row tiles, rows, column tiles, columns], fp32."""

    source: Callable[[Tensor], Tensor] = Tensor.float
    """Elements that are read, fp32 [rows, columns]."""
    outer: Callable[[Tensor, Quant], Tensor] = encode_scale
    """S of the statistic."""
    scale: Callable[[Tensor, Tensor, Tensor, Quant], Tensor] = lambda a, outer, amax, quant: block_scales(
        a, outer, quant
    )
    """Block scale of a block's statistic, S and the tensor's statistic."""
    scaled: Callable[[Tensor, Tensor, Tensor, Tensor, Quant], Tensor] = _scaled
    """Scaled elements of tiles, block scale, S and the tensor's statistic."""

    def run(self, x: Tensor, quant: Quant) -> Numbers:
        """Cast x [rows, columns], bf16 or fp32; NoComputationError if the recipe has something that these
        steps have not."""
        if (
            quant.scale is None
            or quant.scale.micro_exponents
            or (quant.select is not None and quant.select.among != "scales")
        ):
            raise NoComputationError("no block scales, micro-exponents or other candidates")
        rows, columns = x.shape
        z = self.source(x)
        high, wide = quant.tile
        padded = pad(z, high, wide)
        tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        amax = None if quant.outer is None else _tensor_amax(z, quant)
        one = torch.ones(())
        outer = one if amax is None else self.outer(amax, quant)
        a = block_statistic(tiles, block_amax(tiles), quant.range.statistic)
        if quant.select is not None:
            s, codes = self._selected(tiles, a, outer, amax, quant)
        else:
            known = one if amax is None else amax
            s = self.scale(a, outer, known, quant)
            y = self.scaled(tiles, s, outer, known, quant)
            codes = _element(y if quant.range.prescale == 1 else y * quant.range.prescale, quant)
        values = _decode(codes, s, outer, amax, quant)
        return Numbers(
            values.reshape(padded.shape)[:rows, :columns],
            codes.reshape(padded.shape)[:rows, :columns],
            s[:, 0, :, 0].repeat_interleave(high, 0)[:rows],
        )

    def _selected(
        self, tiles: Tensor, a: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant
    ) -> tuple[Tensor, Tensor]:
        assert quant.select is not None
        assert quant.scale is not None
        largest = ELEMENTS[quant.element].max
        base = a / torch.full_like(a, largest) * outer
        made = []
        for value in quant.select.map_to:
            s = round_scale(base * torch.full_like(base, largest / value), quant.scale)
            y = self.scaled(tiles, s, outer, torch.ones(()) if amax is None else amax, quant)
            codes = _element(y, quant)
            made.append((s, codes, block_error(Candidate(s, y, codes), tiles, amax, quant)))
        second = made[1][2] < made[0][2]
        return torch.where(second, made[1][0], made[0][0]), torch.where(second, made[1][1], made[0][1])


RECIPE = Computation()
"""The recipe's own steps."""
