"""Launches of the quantisers for CUDA tensors (general_triton.py), and the description that they take.

They make every form that `forms.on_gpu` names, rotations of sixteen to 128 elements included, and both copies
of a tensor in one launch, or in two if a tensor or its rows have an outer scale. The outer statistic is a
tensor on the device, which is not read here: nothing waits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES, Format
from ablate.numerics.kernels import cuda
from ablate.numerics.kernels.cpu import Made
from ablate.numerics.philox import GROUP, Clock
from ablate.numerics.scaling import round_scale
from ablate.numerics.select import INT_STEP
from ablate.numerics.spec import Quant, Select, argument, tag

SIZES = (16, 32, 64, 128)
"""Rotations that the kernel makes: groups of a tile's elements, and whole groups of random bits."""
NO_WORDS = 0, 0, 0, 0
Few = Literal["kept", "rest"]
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
    down: bool
    """True if the contraction runs down the columns of memory."""
    slab: bool
    """True if programs take slabs of sixteen rows of memory, in place of tiles."""
    lines: int
    length: int
    """Tile of a program: whole blocks, whole groups of a rotation and of an outer scale. Down memory it is as
    short as they are, so that a thread holds whole ones: of others it would make many scales."""
    turn: int
    """Size of the rotation; 0: none."""
    turn_levels: int
    turn_factor: float
    rows: int
    block: int
    """Rows and columns of a block; 1 and 16 without block scales."""
    block_levels: int
    whole: int
    """Elements that the contraction is padded to a multiple of."""
    scale: Grid | None
    scale_kind: str
    """`grid`, `power`, `bf16` or `fp32`."""
    scale_rounding: str
    least: float
    """Smallest scale of a format without zero; else 0."""
    exact: bool
    """True if values are fp32, or no code times scale is below bf16's smallest number, 2^-133."""
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
    few: Few | None
    """Channels that are quantised, by themselves: those that are `kept` apart, or the `rest`; None: all."""


@cache
def described(quant: Quant, size: int, down: bool, few: Few | None = None) -> Description:
    """Return the description of a form of `forms.on_gpu`, rotated by groups of `size` or not (0), with its
    contraction along the rows of memory or `down` its columns."""
    element, scale, outer = ELEMENTS[quant.element], quant.scale, quant.outer
    to = SCALES[scale.format] if scale else None
    top = element.max * (outer.bound if outer else 1.0)
    block = quant.tile[1] if scale else GROUP
    without_zero = to is not None and not to.zero
    whole = math.lcm(block, GROUP, size or 1)
    granularity = tag(outer.granularity) if outer else None
    length = whole if down and granularity != "block" else 128
    least = 2.0 ** (to.emin - (to.mantissa == 0)) if to and without_zero else 0.0
    return Description(
        element=_grid(element),
        rounding="nearest" if quant.rounding == "ms_eden" else quant.rounding,
        bits=quant.bits,
        down=down,
        slab=few is None and _by_slabs(quant, size, down),
        lines=4096 // length,
        length=length,
        turn=size,
        turn_levels=size.bit_length() - 1,
        turn_factor=size**-0.5 if size else 1.0,
        rows=quant.tile[0],
        block=block,
        block_levels=block.bit_length() - 1,
        whole=whole,
        scale=_grid(to) if to else None,
        scale_kind=_kind(to) if to else "",
        scale_rounding=scale.rounding if scale else "",
        least=least,
        exact=quant.wide or not least or least * 2.0 ** (element.emin - element.mantissa) >= 2.0**-133,
        zero=round_scale(torch.zeros(1), scale, torch.zeros(1)).item() if scale and not without_zero else 0.0,
        halve=(scale.halve_below if scale else None) or 0.0,
        map=1 / (quant.range.map_to or element.max),
        headroom=quant.range.headroom,
        prescale=quant.range.prescale,
        statistic=tag(quant.range.statistic),
        spread=float(argument(quant.range.statistic) or 1),
        outer=granularity,
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
        few=few,
    )


def _by_slabs(quant: Quant, size: int, down: bool) -> bool:
    """Return True if blocks are sixteen rows of a slab, or squares, and nothing else needs a tile."""
    outer, scale = quant.outer, quant.scale
    split = outer is not None and outer.granularity == "block:128"
    by_rows = down and quant.block == "1x16" and size in (0, 16)
    square = quant.block == "16x16" and not quant.draws and not size and (outer is None or not outer.rows)
    return (
        (by_rows or square)
        and not split
        and scale is not None
        and scale.rounding != "stochastic"
        and scale.micro_exponents is None
        and quant.select is None
        and quant.range.statistic == "amax"
        and (not quant.draws or (quant.rounding == "stochastic" and quant.bits == 8))
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


@dataclass(frozen=True)
class Form:
    """Quantisation of one copy."""

    quant: Quant
    size: int = 0
    """Size of the rotation; 0: none."""
    words: Words = NO_WORDS
    """Signs of the rotation."""
    where: int = 0
    """Draw site."""
    statistic: cuda.Statistic | None = None
    """Outer statistic of a tensor; None: that which the quantiser names, `amax` or `percentile`."""
    few: Few | None = None


Channels = tuple[Tensor, int, bool]
"""Columns of memory that are quantised apart from the others: the place of each column among them, int32, or
-1; their number; and True if the contraction runs down the columns."""
NO_COPY = [None, None, None, None, 0, *NO_WORDS, 0]
"""Arguments of `cast` for a copy that is not made."""


def quantize(
    x: Tensor, first: Form | None, other: Form | None, clock: Clock | None, channels: Channels | None = None
) -> list[Made]:
    """Quantise a matrix as it lies in memory, along its rows by `first`, and its transpose by `other`.

    Args:
        x: bf16 or fp32 [rows, columns], contiguous.
        first: form of the copy of x, rotated along its rows; None: it is not made.
        other: form of the copy of x.t(), rotated along the columns of x.
        clock: seed, stream, step and micro-batch; needed for what is drawn.
        channels: both are copies of x, or of x.t(), by their `few`; neither has an outer scale of its own.

    Returns:
        The copies that are made; of kept channels, values alone, in fp32: those channels side by side.
    """
    directions = (False, True) if channels is None else (channels[2], channels[2])
    with torch.cuda.device_of(x):
        largest = _amaxes(x, (first, other))
        copies = [
            _copy(x, form, down, one, channels) if form else None
            for form, down, one in zip((first, other), directions, largest, strict=True)
        ]
        arguments = [each for copy in copies for each in (copy[0] if copy else NO_COPY)]
        forms = [copy[1] if copy else None for copy in copies]
        grid, options = launch(x.shape, forms)
        more = channels[:2] if channels else ()
        code().cast[grid](x, *x.shape, x.shape[1], *arguments, *cuda.draws(clock), *forms, *more, **options)
    return [copy[2] for copy in copies if copy]


def _copy(
    x: Tensor, form: Form, down: bool, largest: Tensor | None, channels: Channels | None
) -> tuple[list[object], Description, Made]:
    """Return what `cast` takes of one copy, and the copy, whose values it then writes. `largest` is the amax
    of the tensor, if it is known."""
    quant, description = form.quant, described(form.quant, form.size, down, form.few)
    lines, length = x.shape[::-1] if down else x.shape
    width = length + -length % description.whole
    few = channels[1] if channels and form.few == "kept" else 0
    high, long = (few or lines, width) if down else (lines, few or width)
    values = _laid(high, long, down, torch.float32 if quant.wide or few else torch.bfloat16, x.device)
    scales, word, outer = None, None, None
    if quant.scale is not None and not few:
        tall = -(-lines // description.rows)
        scales = _laid(tall, width // description.block, down, torch.float32, x.device)
    if description.outer == "tensor":
        outer, largest = _statistic(x, form, largest)
    else:
        word = cuda.zeros(1, x.device)[0]
        largest = word.view(torch.float32)
    if description.outer == "row":
        outer = torch.empty(lines, 1, dtype=torch.float32, device=x.device)
        grid, options = (-(-lines // description.lines),), launch(x.shape, [description])[1]
        code().row_amaxes[grid](x, outer, lines, length, *form.words, description, **options)
    stored = values.t() if down else values
    arguments = [stored, scales, outer, word, width, *form.words, cuda.signed_word(form.where)]
    blocks = None if scales is None else scales[:, None, :, None]
    return arguments, description, Made(values, outer, blocks, largest, None)


Span = tuple[int, int]
"""First row and rows of a part of a matrix."""


def quantize_parts(
    x: Tensor, spans: Sequence[Span], first: Sequence[Form] | None, other: Sequence[Form] | None, clock: Clock
) -> list[list[Made]]:
    """Quantise parts of a matrix as `quantize` would each of them, in one launch, or two with an outer scale.

    `x` is bf16 or fp32 [rows, columns], contiguous. `first` and `other` have the form of each part's copy,
    which differ in draw site and signs alone; their outer statistic is amax. Return both copies by part; none
    of one that is None. A part without rows has no numbers.
    """
    from ablate.numerics.kernels import parts_triton as kernels

    copies, columns, number = (first, other), x.shape[1], len(spans)
    asked = [copy[0] if copy else None for copy in copies]
    whole = [described(one.quant, one.size, down > 0) if one else None for down, one in enumerate(asked)]
    by_tensor = [form if form and form.outer == "tensor" else None for form in whole]
    turned = [form if form and form.turn else None for form in by_tensor]
    table = []
    for part, (begin, rows) in enumerate(spans):
        needed = (launch((rows, columns), forms)[0][0] for forms in (turned, whole))
        own = [copy[part] if copy else Form(Quant()) for copy in copies]
        draws = [(cuda.signed_word(form.where), *form.words) for form in own]
        table.append([begin, rows, *needed, *draws[0], *draws[1]])
    numbers = torch.tensor(table, dtype=torch.int32)
    if x.is_cuda:  # pinned: a copy from other memory waits for the device
        numbers = numbers.pin_memory().to(x.device, non_blocking=True)
    amaxing, casting = ((max(row[at] for row in table), number) for at in (2, 3))
    with torch.cuda.device_of(x):
        words = torch.zeros(5, number, dtype=torch.int32, device=x.device)
        amax = words[2:].view(number, 3)
        if any(by_tensor):
            options = launch(x.shape, turned)[1]
            kernels.amaxes_of_parts[amaxing](x, numbers, amax, columns, *turned, **options)
        arguments: list[object] = []
        made: list[list[Made]] = []
        for one, form in zip(asked, whole, strict=True):
            if not one or not form:
                made.append([])
                arguments += NO_COPY[:4]
                continue
            word, outer = words[int(form.down)], None
            if form.outer == "tensor":
                word = outer = amax[:, (1 if form.down else 2) if form.turn else 0].view(torch.float32)
            elif form.outer == "row":
                outer = x.new_empty(number * columns if form.down else len(x), dtype=torch.float32)
                programs = -(-(columns if form.down else max(rows for _, rows in spans)) // form.lines)
                options = launch(x.shape, [form])[1]
                kernels.row_amaxes_of_parts[programs, number](
                    x, numbers, outer, columns, int(form.down), form, **options
                )
            parts, memory = _parts(x, spans, one.quant.wide, form, outer, word.view(torch.float32))
            made.append(parts)
            arguments += [*memory, outer, None if form.outer == "tensor" else word]
        options = launch(x.shape, whole)[1]
        kernels.cast_parts[casting](x, numbers, columns, *arguments, *cuda.draws(clock), *whole, **options)
    return made


def _parts(
    x: Tensor, spans: Sequence[Span], wide: bool, form: Description, outer: Tensor | None, largest: Tensor
) -> tuple[list[Made], list[object]]:
    """Return a copy by part, and its memory, values and block scales, with room as parts_triton.py says."""
    (rows, columns), whole, number = x.shape, form.whole, len(spans)
    height = (rows // whole + number) * whole if form.down else rows
    width = columns if form.down else columns + -columns % whole
    high, long = (form.block, form.rows) if form.down else (form.rows, form.block)
    values = x.new_empty(height, width, dtype=torch.float32 if wide else torch.bfloat16)
    scales = x.new_empty(height // high + number, -(-width // long), dtype=torch.float32)
    made = []
    for part, (begin, count) in enumerate(spans):
        at, size = (begin // whole + part) * whole, count + -count % whole
        first = at // high if form.down else begin // high + part
        at, size = (at, size) if form.down else (begin, count)
        copy, block = values[at : at + size], scales[first : first + -(-size // high)]
        amax = None if outer is None else outer[part]
        if outer is not None and form.outer == "row":
            amax = outer.view(number, -1)[part, :, None] if form.down else outer[at : at + size, None]
        copy, block = (copy.t(), block.t()) if form.down else (copy, block)
        blocks = block[:, None, :, None] if form.scale else None
        made.append(Made(copy, amax, blocks, largest[part], None))
    return made, [values, scales if form.scale else None]


Both = Sequence[Description | None]
"""Descriptions of the copies of a launch, along the rows of memory and down its columns."""


def launch(shape: Sequence[int], forms: Both) -> tuple[tuple[int], dict[str, object]]:
    """Return the grid of a launch on memory [rows, columns], enough for each copy, and the options."""
    parts = [_part(form) for form in forms if form] or [(16, code().COLUMNS.value)]
    programs = max(-(-shape[0] // high) * -(-shape[1] // wide) for high, wide in parts)
    return (programs,), cuda.EXACT | {"num_warps": warps(forms)}


def _part(form: Description) -> tuple[int, int]:
    """Return the rows and columns of memory that a program takes."""
    if form.slab:
        return 16, code().COLUMNS.value
    return (form.length, form.lines) if form.down else (form.lines, form.length)


def warps(forms: Both) -> int:
    """Return the warps of a program: with four, costly tiles have too few registers. With eight, ptxas spills
    eight bytes of a choice between the scales of whole blocks."""
    tiles = [form for form in forms if form and not form.slab]
    chosen = any(form.selection and form.length > form.block for form in tiles)
    return 8 if chosen or any(form.turn or form.eden or form.bits > 8 for form in tiles) else 4


def _amaxes(x: Tensor, forms: Sequence[Form | None]) -> list[Tensor | None]:
    """Return the amax of each copy whose outer scale is that of the tensor, in one read of x."""
    needed = [form if form and _by_amax(form.quant) else None for form in forms]
    if needed == [None, None]:
        return [None, None]
    plain, *turned = amaxes(x, *(form if form and form.size else None for form in needed))
    return [
        (each if form.size else plain) if form else None for form, each in zip(needed, turned, strict=True)
    ]


def _by_amax(quant: Quant) -> bool:
    outer = quant.outer
    return outer is not None and outer.granularity == "tensor" and tag(outer.statistic) != "percentile"


def amaxes(x: Tensor, first: Form | None, other: Form | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the amax of x [rows, columns], of x rotated along its rows by `first`, and down its columns by
    `other`: fp32 scalars, NaN if there is one. Without a rotation, its number means nothing."""
    copies = (first, False), (other, True)
    forms = [described(form.quant, form.size, down) if form else None for form, down in copies]
    words = [word for form, _ in copies for word in (form.words if form else NO_WORDS)]
    bits, (grid, options) = cuda.zeros(3 if first else 2, x.device), launch(x.shape, forms)
    with torch.cuda.device_of(x):
        code().amaxes[grid](x, bits, *x.shape, x.shape[1], *words, *forms, **options)
    plain, down, *along = bits.view(torch.float32).unbind()
    return plain, along[0] if along else plain, down


def _statistic(memory: Tensor, form: Form, largest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outer statistic of a tensor's copy, and its largest magnitude."""
    assert form.quant.outer is not None
    if largest is None:  # a percentile: of a rotated copy, what the padding to sixteen rows became counts
        p, (rows, columns) = argument(form.quant.outer.statistic), memory.shape
        assert p is not None
        rank = math.ceil(p * (rows + (-rows % 16 if form.size else 0)) * columns)
        return cuda.order_statistic(memory, form.words[0] if form.size else None, rank)
    return largest if form.statistic is None else form.statistic(largest), largest


def rescaled(
    x: Tensor, quant: Quant, block_scale: Tensor | None, amax: Tensor | None, estimator: str
) -> Tensor:
    """Return what was rounded of x [rows, columns], in one launch, fp32 and stored as x is; or of an
    `estimator` what slopes.py says. x is the source that a quantised copy kept."""
    out, (rows, columns) = torch.empty_like(x, dtype=torch.float32), x.shape
    from ablate.numerics.kernels import slopes

    form = described(quant, 0, not x.is_contiguous())
    programs = -(-x.numel() // (form.lines * form.length))
    with torch.cuda.device_of(x):
        slopes.rescaled[(programs,)](
            x, out, block_scale, amax, rows, columns, x.numel(), form, estimator, **cuda.EXACT
        )
    return out


def can_rotate(x: Tensor, size: int) -> bool:
    """Return True if `rotate` can compute this: bf16 or fp32 on a GPU."""
    return size in SIZES and cuda.can_take(x)


def rotate(x: Tensor, flips: Tensor, back: bool, factor: Tensor | None = None) -> Tensor:
    """Return x [rows, columns] rotated along its columns, padded with zeros, stored as x is. `flips` are the
    signs, fp32 [size] of +1 and -1 on the CPU, a size of SIZES; `back`: by the transpose. With a `factor`,
    fp32 stored as x, rotate, multiply by it, and rotate back."""
    down, (lines, length), size = not x.is_contiguous(), x.shape, len(flips)
    # By tiles: slabs hold groups of sixteen alone.
    width, form = length + -length % size, replace(described(Quant(), size, down), slab=False)
    out, memory = _laid(lines, width, down, x.dtype, x.device), x.t() if down else x
    grid, options = launch(memory.shape, [form])
    with torch.cuda.device_of(x):
        code().turn[grid](
            memory, out.t() if down else out, factor, lines, length, width,
            width if factor is None else factor.shape[1], *sign_words(flips), form, back, **options,
        )  # fmt: skip
    return out


cuda.OTHER_TRIALS["turned"] = lambda x: rotate(
    x.t(), torch.tensor(cuda.TRIAL_SIGNS, dtype=torch.float32), False
)
cuda.OTHER_TRIALS["rescaled"] = lambda x: rescaled(x, Quant(), *cuda.trial_scales(x), "dge")


def _laid(rows: int, columns: int, down: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory for a matrix, stored by rows, or by columns."""
    if down:
        return torch.empty(columns, rows, dtype=dtype, device=device).t()
    return torch.empty(rows, columns, dtype=dtype, device=device)


def code() -> ModuleType:
    """Return general_triton.py, which is imported where Triton is there (`cuda.kernels`)."""
    from ablate.numerics.kernels import general_triton

    return general_triton
