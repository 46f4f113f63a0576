"""Families of wrong computations of a cast that no single report names: dtypes and groups.

Each family varies one parameter of the recipe's computation over the values that implementations have used,
so that a fault which was never reported in exactly this form is named as well.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ablate.numerics.spec import Quant
from ablate.verification.conformance.computation import (
    RECIPE,
    Computation,
    NoComputationError,
    exact_scale,
    rounded_scale,
)

_DROPPED = {torch.bfloat16: 16, torch.float16: 13}
"""Mantissa bits of fp32 that a dtype does not keep."""


def _nearest(dtype: torch.dtype, z: Tensor) -> Tensor:
    return z.to(dtype).float()


def _toward_zero(dtype: torch.dtype, z: Tensor) -> Tensor:
    """Return normal numbers cut to the mantissa of a dtype."""
    kept = -(1 << _DROPPED[dtype])
    return torch.where(z.isfinite(), (z.contiguous().view(torch.int32) & kept).view(torch.float32), z)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    f"{str(dtype).removeprefix('torch.').replace('bfloat', 'bf').replace('float', 'fp')}{word}": partial(
        rule, dtype
    )
    for dtype in (torch.bfloat16, torch.float16)
    for word, rule in (("", _nearest), (" toward zero", _toward_zero))
}
"""Extra roundings of an fp32 number, by dtype and direction."""


def _scale_through(
    by: Callable[[Tensor], Tensor], a: Tensor, outer: Tensor, amax: Tensor, q: Quant
) -> Tensor:
    return rounded_scale(by(exact_scale(a, outer, q)), q)


def _outer_through(by: Callable[[Tensor], Tensor], amax: Tensor, quant: Quant) -> Tensor:
    return by(RECIPE.outer(amax, quant))


def _block_through(by: Callable[[Tensor], Tensor], tiles: Tensor, quant: Quant) -> Tensor:
    return by(RECIPE.block(tiles, quant))


def _factor_through(
    by: Callable[[Tensor], Tensor], tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant
) -> Tensor:
    return tiles * by(RECIPE.scaled(torch.ones_like(s), s, outer, amax, quant))


def _elements_through(
    by: Callable[[Tensor], Tensor], tiles: Tensor, s: Tensor, outer: Tensor, amax: Tensor, quant: Quant
) -> Tensor:
    return by(RECIPE.scaled(tiles, s, outer, amax, quant))


def roundings() -> Iterator[tuple[str, Computation]]:
    """Yield extra roundings of one number of the cast, through another dtype."""
    for word, by in ROUNDINGS.items():
        yield f"block scale rounded twice, through {word}", replace(RECIPE, scale=partial(_scale_through, by))
        yield f"S rounded to {word}", replace(RECIPE, outer=partial(_outer_through, by))
        yield f"block amax rounded to {word}", replace(RECIPE, block=partial(_block_through, by))
        yield f"factor of elements rounded to {word}", replace(RECIPE, scaled=partial(_factor_through, by))
        yield f"elements scaled in {word}", replace(RECIPE, scaled=partial(_elements_through, by))


# --- blocks whose amax is that of other elements --------------------------------------------------


def _grouped(along: int, size: int, tiles: Tensor, quant: Quant) -> Tensor:
    """Return each block's amax as that of its group of blocks; `along` 2: a row's blocks, 0: rows."""
    own = RECIPE.block(tiles, quant)
    length = own.shape[along]
    if length < 2 or size == 1:
        raise NoComputationError("one block")
    size = size or length
    moved = own.movedim(along, -1)
    padded = torch.nn.functional.pad(moved, (0, -length % size)).unflatten(-1, (-1, size))
    return padded.amax(-1).repeat_interleave(size, -1)[..., :length].movedim(-1, along)


def _in_memory(size: int, tiles: Tensor, quant: Quant) -> Tensor:
    """Return each block's amax as that of its group of blocks in memory, across the ends of rows."""
    own = RECIPE.block(tiles, quant)
    flat = torch.nn.functional.pad(own.flatten(), (0, -own.numel() % size)).view(-1, size)
    return flat.amax(1).repeat_interleave(size)[: own.numel()].view(own.shape)


def groups() -> Iterator[tuple[str, Computation]]:
    """Yield amaxes of groups of elements that are not the block."""
    for size in (2, 4, 8):
        yield (
            f"amax of {size} neighbouring blocks as each block's",
            replace(RECIPE, block=partial(_grouped, 2, size)),
        )
        yield f"amax of {size} rows as each row's", replace(RECIPE, block=partial(_grouped, 0, size))
    for size in (2, 4):
        yield (
            f"amax of {size} blocks in memory as each block's",
            replace(RECIPE, block=partial(_in_memory, size)),
        )
    yield "amax of the whole row as each block's", replace(RECIPE, block=partial(_grouped, 2, 0))


def general_faults() -> Iterator[tuple[str, Computation]]:
    """Yield all families."""
    for family in (roundings, groups):
        yield from family()
