"""Launches of the general quantiser for CUDA tensors (general_triton.py), and the description that it takes.

It makes every form that `forms.general` names, rotations of sixteen to 128 elements included, in one launch,
or in two if a tensor or its rows have an outer scale. Nothing waits for the device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES, Format
from ablate.numerics.kernels import cuda
from ablate.numerics.philox import GROUP, Clock
from ablate.numerics.scaling import round_scale
from ablate.numerics.select import INT_STEP
from ablate.numerics.spec import Quant, Select, argument, tag

SIZES = (16, 32, 64, 128)
"""Rotations that the kernel makes: groups of a tile's elements, and whole groups of random bits."""
WARPS = 8
"""With 4, MS-EDEN's kernel spills registers."""
LAUNCH = cuda.EXACT | {"num_warps": WARPS}
Words = tuple[int, int, int, int]
"""Signs of a rotation: bit r % 32 of word r // 32 is 1 if element r of a group is negated."""


@dataclass(frozen=True)
class Grid:
    """Grid of a format, as the kernel takes it."""

    mantissa: int
    emin: int
    top: float


@dataclass(frozen=True)
class Description:
    """Form of a quantised copy: a constant of the compiler, for which the kernel is compiled once."""

    element: Grid
    rounding: str
    bits: int
    turn: int
    """Size of the rotation; 0: none."""
    turn_levels: int
    turn_factor: float
    rows: int
    block: int
    """Rows and columns of a block; 1 and 16 without block scales."""
    block_levels: int
    scale: Grid | None
    scale_kind: str
    """`grid`, `power`, `bf16` or `fp32`."""
    scale_rounding: str
    least: float
    """Smallest scale of a format without zero; else 0."""
    zero: float
    """Value of a scale that rounds to zero."""
    halve: float
    map: float
    headroom: float
    prescale: float
    statistic: str
    spread: float
    outer: str | None
    """`tensor`, `row`, `block`, or None."""
    outer_top: float
    divisor: float
    eden: bool
    selection: str | None
    """Criterion of a choice between two scales or two grids."""
    pair: tuple[float, ...]
    """Factors of the two scales; empty for two grids, the other of which is `even`."""
    even: Grid
    to_even: float
    from_even: float
    lengths: tuple[int, ...]
    """Lengths of sub-blocks with exponents of their own."""
    unit: float


@cache
def described(quant: Quant, size: int) -> Description:
    """Return the description of a form of `forms.general`, rotated by groups of `size` or not (0)."""
    element, scale, outer = ELEMENTS[quant.element], quant.scale, quant.outer
    to = SCALES[scale.format] if scale else None
    top = element.max * (outer.bound if outer else 1.0)
    block = quant.tile[1] if scale else GROUP
    without_zero = to is not None and not to.zero
    return Description(
        element=_grid(element),
        rounding="nearest" if quant.rounding == "ms_eden" else quant.rounding,
        bits=quant.bits,
        turn=size,
        turn_levels=size.bit_length() - 1,
        turn_factor=size**-0.5 if size else 1.0,
        rows=quant.tile[0],
        block=block,
        block_levels=block.bit_length() - 1,
        scale=_grid(to) if to else None,
        scale_kind=_kind(to) if to else "",
        scale_rounding=scale.rounding if scale else "",
        least=2.0 ** (to.emin - (to.mantissa == 0)) if to and without_zero else 0.0,
        zero=round_scale(torch.zeros(1), scale, torch.zeros(1)).item() if scale and not without_zero else 0.0,
        halve=(scale.halve_below if scale else None) or 0.0,
        map=1 / (quant.range.map_to or element.max),
        headroom=quant.range.headroom,
        prescale=quant.range.prescale,
        statistic=tag(quant.range.statistic),
        spread=float(argument(quant.range.statistic) or 1),
        outer=tag(outer.granularity) if outer else None,
        outer_top=top,
        divisor=(1.0 / torch.full((), top, dtype=torch.float32)).item(),
        eden=quant.rounding == "ms_eden",
        selection=quant.select.criterion if quant.select else None,
        pair=_pair(quant.select, element.max) if quant.select else (),
        even=_grid(ELEMENTS["int4"]),
        to_even=1 / INT_STEP,
        from_even=INT_STEP,
        lengths=(scale.micro_exponents if scale else None) or (),
        unit=torch.tensor(1 / quant.top).to(torch.bfloat16).item(),
    )


def pointers(form: Description) -> dict[str, bool]:
    """Return which of the kernel's pointers a form has; the others are None, constants of the compiler."""
    outer = form.outer is not None and form.outer != "block"
    return {"scales": form.scale is not None, "outer": outer, "largest": form.outer != "tensor"}


def _pair(select: Select, top: float) -> tuple[float, ...]:
    return tuple(top / value for value in select.map_to) if select.among == "scales" else ()


def _grid(grid: Format) -> Grid:
    return Grid(grid.mantissa, grid.emin, grid.max)


def _kind(to: Format) -> str:
    if to.bits > 8:
        return "bf16" if to.bits == 16 else "fp32"
    return "grid" if to.zero or to.mantissa else "power"


def sign_words(signs: Tensor | None) -> Words:
    """Return signs, at most 128 numbers on the CPU, as words; zeros without a rotation."""
    bits = 0 if signs is None else sum(1 << place for place, sign in enumerate(signs.tolist()) if sign < 0)
    first, second, third, fourth = (cuda.signed_word(bits >> 32 * word) for word in range(4))
    return first, second, third, fourth


def quantize(
    x: Tensor,
    quant: Quant,
    size: int,
    words: Sequence[int],
    clock: Clock | None,
    where: int,
    statistic: cuda.Statistic | None,
) -> cuda.Quantized:
    """Quantise x [rows, columns] in blocks along its columns, rotated along them first.

    Args:
        x: bf16 or fp32, stored by rows or by columns.
        quant: Form that `forms.general` accepts.
        size: Size of the rotation; 0: none.
        words: Signs of the rotation.
        clock: Seed, stream, step and micro-batch; needed for what is drawn.
        where: Draw site.
        statistic: Outer statistic of a tensor as a function of the largest magnitude; None: that itself.
    """
    form, down = described(quant, size), not x.is_contiguous()
    memory = x.t() if down else x
    lines, length = x.shape
    turned = length + -length % (size or 1)
    width = turned + -turned % math.lcm(form.block, GROUP)
    values = _laid(lines, width, down, torch.float32 if quant.wide else torch.bfloat16, x.device)
    scales = None
    if quant.scale is not None:
        scales = _laid(-(-lines // form.rows), width // form.block, down, torch.float32, x.device)
    kernels, amax = code(), None
    grid = (-(-lines // kernels.LINES.value) * -(-width // kernels.LENGTH.value),)
    largest = word = cuda.zeros(1, x.device)[0] if form.outer != "tensor" else None
    with torch.cuda.device_of(x):
        if word is None:
            largest = amaxes(memory, form, down, words, grid)
            amax = largest if statistic is None else statistic(largest)
        elif form.outer == "row":
            amax = torch.empty(lines, 1, dtype=torch.float32, device=x.device)
            rows = (-(-lines // kernels.LINES.value),)
            kernels.row_amaxes[rows](memory, amax, lines, length, *words, form, down, **LAUNCH)
        draws = (*cuda.draws(clock), cuda.signed_word(where))
        kernels.cast[grid](
            memory, values.t() if down else values, scales, amax, word, lines, length, width, *words, *draws,
            form, down, **LAUNCH,
        )  # fmt: skip
    assert largest is not None
    return cuda.Quantized(
        values, amax, None if scales is None else scales[:, None, :, None], largest.view(torch.float32)
    )


def amaxes(memory: Tensor, form: Description, down: bool, words: Sequence[int], grid: tuple[int]) -> Tensor:
    """Return the amax of a copy, fp32 scalar."""
    if not form.turn:
        return cuda.amax_both(memory, None)[0]
    bits = cuda.zeros(2, memory.device)
    lines, length = memory.shape[::-1] if down else memory.shape
    code().turned_amaxes[grid](memory, bits, lines, length, *words, form, down, **LAUNCH)
    return bits.view(torch.float32)[1]


def _laid(rows: int, columns: int, down: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a matrix, stored by rows, or by columns."""
    if down:
        return torch.empty(columns, rows, dtype=dtype, device=device).t()
    return torch.empty(rows, columns, dtype=dtype, device=device)


def code() -> ModuleType:
    """Return general_triton.py, which is imported where Triton is there (`cuda.kernels`)."""
    from ablate.numerics.kernels import general_triton

    return general_triton
