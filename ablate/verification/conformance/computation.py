"""Cast of a matrix in replaceable steps, for computations that a subject may make in place of the recipe's.

The recipe's own steps are those of `ablate.numerics`. A wrong computation replaces one of them:

    replace(RECIPE, outer=lambda amax, quant: torch.ones_like(amax))       # no tensor scale

If its result is what a subject returned, bit for bit, that is what the subject computes.
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
from ablate.verification.conformance.numbers import Numbers, over_elements


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


def _source(x: Tensor, quant: Quant) -> Tensor:
    return x.float()


def _tensor_amax(x: Tensor, previous: Tensor | None, quant: Quant) -> Tensor:
    """Return the largest magnitude of the tensor, or of each row; fp32, broadcasting to tiles."""
    assert quant.outer is not None
    if tag(quant.outer.statistic) == "static":
        return torch.tensor(float(argument(quant.outer.statistic) or 0))
    if quant.outer.granularity == "tensor":
        return x.abs().amax()
    if quant.outer.granularity == "row" and quant.tile[0] == 1:
        return x.abs().amax(dim=1).view(-1, 1, 1, 1)
    raise NoComputationError(f"granularity {quant.outer.granularity}")


def _scale(a: Tensor, outer: Tensor, amax: Tensor, quant: Quant) -> Tensor:
    return block_scales(a, outer, quant)


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


def _candidate_scale(base: Tensor, value: float, quant: Quant) -> Tensor:
    """Return the scale of a candidate that maps the largest magnitude to `value`."""
    assert quant.scale is not None
    return round_scale(base * torch.full_like(base, ELEMENTS[quant.element].max / value), quant.scale)


def _error(
    codes: Tensor, s: Tensor, scaled: Tensor, tiles: Tensor, amax: Tensor | None, quant: Quant
) -> Tensor:
    return block_error(Candidate(s, scaled, codes), tiles, amax, quant)


def _same(z: Tensor, quant: Quant) -> Tensor:
    return z


@dataclass(frozen=True)
class Computation:
    """Steps of a cast, each a function. Tiles are [row tiles, rows, column tiles, columns], fp32."""

    source: Callable[[Tensor, Quant], Tensor] = _source
    """Elements that are read, fp32 [rows, columns]."""
    quant: Callable[[Quant], Quant] = lambda quant: quant
    """Recipe that is computed in place of the named one."""
    amax: Callable[[Tensor, Tensor | None, Quant], Tensor] = _tensor_amax
    """Statistic of the second level, of the elements and of the tensor of the call before."""
    outer: Callable[[Tensor, Quant], Tensor] = encode_scale
    """S of the statistic."""
    block: Callable[[Tensor, Quant], Tensor] = lambda tiles, quant: block_statistic(
        tiles, block_amax(tiles), quant.range.statistic
    )
    scale: Callable[[Tensor, Tensor, Tensor, Quant], Tensor] = _scale
    """Block scale of a block's statistic, S and the tensor's statistic."""
    scaled: Callable[[Tensor, Tensor, Tensor, Tensor, Quant], Tensor] = _scaled
    """Scaled elements of tiles, block scale, S and the tensor's statistic."""
    element: Callable[[Tensor, Quant], Tensor] = _element
    candidate: Callable[[Tensor, float, Quant], Tensor] = _candidate_scale
    error: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Quant], Tensor] = _error
    prefers: Callable[[Tensor, Tensor], Tensor] = torch.lt
    """Comparison of the second candidate's error with the first's."""
    decode: Callable[[Tensor, Tensor, Tensor, Tensor | None, Quant], Tensor] = _decode
    stored_codes: Callable[[Tensor, Quant], Tensor] = _same
    """Codes [rows, columns] as they are read back from the bytes."""
    stored_scales: Callable[[Tensor, Quant], Tensor] = _same
    """Block scales [rows, blocks] as they are read back."""
    swizzled: bool | None = None
    """Layout that the subject has to declare for this fault: True, that of tensor cores; None, any."""

    @property
    def of_bytes(self) -> bool:
        """True if only the stored codes or scales differ from the recipe's."""
        return self.stored_codes is not _same or self.stored_scales is not _same

    def run(self, x: Tensor, given: Quant, previous: Tensor | None = None) -> Numbers:
        """Cast x [rows, columns].

        Args:
            x: bf16 or fp32.
            given: Quantiser of the recipe.
            previous: Tensor of the call before, or None.

        Raises:
            NoComputationError: the recipe has something that these steps have not.
        """
        quant = self.quant(given)
        if (
            quant.scale is None
            or quant.scale.micro_exponents
            or (quant.select is not None and quant.select.among != "scales")
        ):
            raise NoComputationError("no block scales, micro-exponents or other candidates")
        rows, columns = x.shape
        z = self.source(x, quant)
        high, wide = quant.tile
        padded = pad(z, high, wide)
        tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
        amax = None if quant.outer is None else self.amax(z, previous, quant)
        one = torch.ones(())
        outer = one if amax is None else self.outer(amax, quant)
        known = one if amax is None else amax
        a = self.block(tiles, quant)
        if quant.select is not None:
            s, codes = self._selected(tiles, a, outer, amax, quant)
        else:
            s = self.scale(a, outer, known, quant)
            y = self.scaled(tiles, s, outer, known, quant)
            codes = self.element(y if quant.range.prescale == 1 else y * quant.range.prescale, quant)
        return self._numbers(codes, s, outer, amax, quant, given, rows, columns)

    def _selected(
        self, tiles: Tensor, a: Tensor, outer: Tensor, amax: Tensor | None, quant: Quant
    ) -> tuple[Tensor, Tensor]:
        assert quant.select is not None
        base = a / torch.full_like(a, ELEMENTS[quant.element].max) * outer
        made = []
        for value in quant.select.map_to:
            s = self.candidate(base, value, quant)
            y = self.scaled(tiles, s, outer, torch.ones(()) if amax is None else amax, quant)
            codes = self.element(y, quant)
            made.append((s, codes, self.error(codes, s, y, tiles, amax, quant)))
        second = self.prefers(made[1][2], made[0][2])
        return torch.where(second, made[1][0], made[0][0]), torch.where(second, made[1][1], made[0][1])

    def _numbers(
        self,
        codes: Tensor,
        s: Tensor,
        outer: Tensor,
        amax: Tensor | None,
        quant: Quant,
        given: Quant,
        rows: int,
        columns: int,
    ) -> Numbers:
        shape = (codes.shape[0] * codes.shape[1], codes.shape[2] * codes.shape[3])
        high, wide = quant.tile
        blocks = s[:, 0, :, 0].repeat_interleave(high, 0)[:rows]
        flat = self.stored_codes(codes.reshape(shape)[:rows, :columns], quant)
        kept = self.stored_scales(blocks, quant)
        if flat is codes and kept is blocks:
            values = self.decode(codes, s, outer, amax, quant).reshape(shape)
        else:
            spread = over_elements(kept, wide, columns)
            rowwise = outer.reshape(-1, 1) if outer.ndim else outer
            values = self.decode(
                flat, spread, rowwise, amax if amax is None or not amax.ndim else amax.reshape(-1, 1), quant
            )
        length = given.tile[1]
        nominal = kept if wide == length else over_elements(kept, wide, columns)[:, ::length]
        return Numbers(values[:rows, :columns], flat, nominal)


RECIPE = Computation()
"""The recipe's own steps."""
LARGEST = FLT_MAX
