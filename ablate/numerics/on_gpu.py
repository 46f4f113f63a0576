"""Choice between the kernels that quantise a CUDA tensor and the reference.

`quantize` and `quantize_both` return None for what no kernel makes, which torch's operations then do. A form
is compiled when it is first needed, and its bits are compared with the reference's before they are used: on a
small matrix, once in a process.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ablate.numerics.hadamard import rotate, signs
from ablate.numerics.history import History
from ablate.numerics.kernels import cuda, forms, general, general_cuda
from ablate.numerics.kernels.cpu import Made
from ablate.numerics.kernels.general_cuda import Span
from ablate.numerics.kernels.launch_errors import reason
from ablate.numerics.philox import GROUP, Clock
from ablate.numerics.scaling import outer_statistic
from ablate.numerics.spec import Hadamard, Outer, Quant, statistic_of, tag
from ablate.numerics.transform import channels_alone, strongest

CPU = torch.device("cpu")


Value = TypeVar("Value")
Pair = tuple[Value, Value]
"""One for the copy of a tensor, and one for that of its transpose."""
Turned = tuple[Quant, int] | tuple[Quant, int, bool]
"""Form, and the size of the rotation inside the kernel; 0: none. Third, of copies of some channels and of the
others: True if the contraction runs down the columns of memory, which are the channels."""
FEW: Pair[general_cuda.Few] = ("rest", "kept")
Draws = tuple[Clock, int, int]
"""Clock, draw site of a copy and that of its product's signs."""
Reference = Callable[..., Any]
"""`quantize.quantize`, by which each form is checked."""


def quantize(
    x: Tensor,
    quant: Quant,
    rotation: Hadamard | None,
    clock: Clock | None,
    where: int,
    product: int,
    history: History | None,
    keep: bool,
    reduced: Tensor | None,
    rounded: bool,
    reference: Reference,
) -> Made | None:
    """Return a quantised copy, with `keep` the rotated tensor in it; None if no kernel makes it.

    A rotation that the kernels lack, or whose result is to be kept, is computed before them. A source that is
    to be kept is not padded. The other arguments are those of `quantize.quantize`; `reduced` is the amax of
    the whole matrix if `x` is a part of it.
    """
    if rounded and (_by_order(quant) or (rotation is not None and rotation.size not in general_cuda.SIZES)):
        x, rounded = x.to(torch.bfloat16), False
    rows, columns = quant.tile
    whole = math.lcm(columns, GROUP, rotation.size if rotation else 1)
    if keep and (not general.can_keep(quant) or x.shape[0] % rows or x.shape[1] % whole):
        return None
    fused = not keep and rotates(x, quant, rotation, not x.is_contiguous())
    if quant.rounding == "ms_eden" and not fused:
        return None
    if rotation is not None and not fused:
        x = rotate(x, rotation, clock, product)
    form = _form(x, quant, rotation if fused else None, clock, where, product, history, reduced)
    x = x.view(torch.int32) if rounded else x  # the kernels' word for fp32 that they round
    made = (
        _made(x, form, None, clock, reference)
        if x.is_contiguous()
        else _made(x.t(), None, form, clock, reference)
    )
    return made[0]._replace(source=x if keep else None) if made else None


def quantize_both(
    x: Tensor,
    quants: Pair[Quant],
    rotations: Pair[Hadamard | None],
    clock: Clock,
    where: Pair[int],
    products: Pair[int],
    histories: Pair[History | None],
    reference: Reference,
) -> list[Made] | None:
    """Return x quantised, and x.t(), by one launch; None if no kernel makes both at once.

    The arguments are those of `quantize.quantize_both`.
    """
    both = [*zip((x, x.t()), quants, rotations, (False, True), strict=True)]
    if (
        not x.is_contiguous()
        or not all(forms.on_gpu(quant) for quant in quants)
        or not all(rotation is None or rotates(x, quant, rotation, down) for _, quant, rotation, down in both)
        or not cuda.can_take(x)
    ):
        return None
    one, other = (
        _form(copy, quant, rotation, clock, site, product, history, None)
        for (copy, quant, rotation, _), site, product, history in zip(
            both, where, products, histories, strict=True
        )
    )
    return _made(x, one, other, clock, reference)


def quantize_channels(
    x: Tensor, quant: Quant, channels: int, rotation: Hadamard | None, draws: Draws, reference: Reference
) -> tuple[Pair[Made], Quant, Tensor, Tensor] | None:
    """Return x quantised without its strongest channels, and those; their form, the place of each channel
    among them, and their numbers, ascending. The choice takes torch's operations. None if no kernel makes
    them: for other transforms, for channels that are not columns of memory or that a rotation mixes, and for
    an amax of more than a block."""
    fraction, down = quant.transform and quant.transform.channels, channels == 0
    kept = channels_alone(quant.transform)
    if (
        not fraction
        or not kept
        or not all(forms.on_gpu(one) and one.range.prescale == 1 for one in (quant, kept))
        or quant.rounding == "ms_eden"
        # A NaN in a kept channel is one in all 128 elements of the rest. So nobody sees that the kept ones,
        # without the zeros of their blocks, lack those zeros' NaNs.
        or not (quant.outer and quant.outer.granularity == "block:128")
        or not (x.t() if down else x).is_contiguous()
        or not (rotation is None or (down and rotation.size in general_cuda.SIZES))
        or not cuda.can_take(x)
    ):
        return None
    size = rotation.size if rotation else 0
    if not agrees(x.device, x.dtype, (_plain(quant), size, down), (kept, size, down), reference):
        return None
    chosen = strongest(x, fraction, channels)
    place, ordered = cuda.placed(chosen, x.shape[channels])
    forms_of = [_form(x, one, rotation, *draws, None, None) for one in (quant, kept)]
    made = _apart(x.t() if down else x, forms_of, draws[0], (place, len(ordered), down))
    return made, kept, place, ordered


def _apart(
    memory: Tensor, both: list[general_cuda.Form], clock: Clock, channels: general_cuda.Channels
) -> Pair[Made]:
    rest, kept = (replace(form, few=few) for form, few in zip(both, FEW, strict=True))
    one, other = general_cuda.quantize(memory, rest, kept, clock, channels)
    return one, other


Copies = tuple[Quant, Hadamard | None, Sequence[tuple[int, int]]]
"""Form of a copy of parts of a matrix, its rotation, and the draw sites of each part and of its signs."""


def in_parts(quant: Quant, rotation: Hadamard | None) -> bool:
    """Return True if one launch quantises parts of a matrix by this form; others take one for each part."""
    if quant.outer is not None and quant.outer.statistic != "amax":
        return False  # each part has a history of its own, or digits of its own to count
    # A transform makes several operands of one, and an estimator keeps the source: neither is a copy alone.
    plain = quant.transform is None and quant.estimator is None and not quant.from_forward
    # Rotations of other sizes are made before the kernels, of a part that is padded to whole groups.
    turned = rotation is None or rotation.size in general_cuda.SIZES
    return plain and turned and forms.on_gpu(quant) and (quant.rounding != "ms_eden" or rotation is not None)


def quantize_parts(
    x: Tensor, spans: Sequence[Span], copies: Pair[Copies | None], clock: Clock, reference: Reference
) -> list[list[Made]]:
    """Return parts of x quantised, and of x.t(), in one launch; none of a copy that is None, or that no
    kernel can make.

    `x` is [rows, columns], contiguous, and `spans` are first row and rows of each part. `in_parts` holds for
    the forms. The bits are those of `quantize` for each part.
    """
    if copies == (None, None) or not x.is_contiguous() or not cuda.can_take(x):
        return [[], []]
    one, two = (
        [_form(x, *copy[:2], clock, *sites, None, None) for sites in copy[2]] if copy else None
        for copy in copies
    )
    plain = [(_plain(parts[0].quant), parts[0].size) if parts else None for parts in (one, two)]
    agreed = agrees(x.device, x.dtype, plain[0], plain[1], reference, *TRIAL_PARTS)
    return general_cuda.quantize_parts(x, spans, one, two, clock) if agreed else [[], []]


TRIAL_PARTS = ((0, 3), (3, 0), (3, 14))
"""Parts of `cuda.trial_matrix` by which the bits of a form in parts are compared."""


def _form(
    x: Tensor,
    quant: Quant,
    turn: Hadamard | None,
    clock: Clock | None,
    where: int,
    product: int,
    history: History | None,
    reduced: Tensor | None,
) -> general_cuda.Form:
    """Return the form of a copy of x that the kernels rotate by `turn`."""
    words = general_cuda.sign_words(turn and signs(turn, CPU, clock, product))
    statistic = device_statistic(x, quant.outer, history, clock, reduced)
    return general_cuda.Form(quant, turn.size if turn else 0, words, where, statistic)


def _made(
    memory: Tensor,
    first: general_cuda.Form | None,
    other: general_cuda.Form | None,
    clock: Clock | None,
    reference: Reference,
) -> list[Made] | None:
    """Return the copies, which `general_cuda.quantize` makes; None if their bits are not the reference's."""
    plain = [form and (_plain(form.quant), form.size) for form in (first, other)]
    agreed = agrees(memory.device, memory.dtype, *plain, reference)
    return general_cuda.quantize(memory, first, other, clock) if agreed else None


def rotates(x: Tensor, quant: Quant, rotation: Hadamard | None, down: bool) -> bool:
    """Return True if the kernels rotate x while they quantise it. For a percentile, they rotate groups of
    sixteen of bf16, down the columns of memory."""
    if rotation is None or not _by_order(quant):
        return rotation is not None and rotation.size in general_cuda.SIZES
    return rotation.size == 16 and x.dtype == torch.bfloat16 and down


def _by_order(quant: Quant) -> bool:
    return quant.outer is not None and tag(quant.outer.statistic) == "percentile"


def device_statistic(
    x: Tensor, outer: Outer | None, history: History | None, clock: Clock | None, reduced: Tensor | None
) -> cuda.Statistic | None:
    """Return the outer statistic as a GPU's kernels take it; None for one that they compute."""
    if reduced is not None:
        return lambda largest: reduced
    # A statistic that only a whole tensor can have is a function of its largest magnitude.
    if outer is None or not statistic_of(outer.statistic).per_tensor:
        return None
    return lambda largest: outer_statistic(x, None, largest, outer, history, clock)


def _plain(quant: Quant) -> Quant:
    """Return a form without what the kernels do not look at, or take from outside."""
    plain = quant.model_copy(update={"transform": None, "estimator": None, "source": "original"})
    if plain.outer is None or not statistic_of(plain.outer.statistic).earlier:
        return plain
    return plain.model_copy(update={"outer": plain.outer.model_copy(update={"statistic": "amax"})})


@cache
def agrees(
    device: torch.device,
    dtype: torch.dtype,
    first: Turned | None,
    other: Turned | None,
    reference: Reference,
    *spans: Span,
) -> bool:
    """Return True if the bits of both copies, or of one, were the reference's in this process; with `spans`,
    those of each part."""
    why = different(device, dtype, (first, other), reference, *spans)
    if why:
        quants = [copy[0].model_dump(exclude_defaults=True) for copy in (first, other) if copy]
        print(
            f"ablate: no compiled quantiser on {device} for {' and '.join(map(str, quants))},"
            f" which runs on the slow reference: {why}",
            file=sys.stderr,
        )
    return not why


def different(
    device: torch.device, dtype: torch.dtype, copies: Pair[Turned | None], reference: Reference, *spans: Span
) -> str:
    """Return why the kernels cannot be used for these copies; empty if their bits are the reference's."""
    clock, where = cuda.TRIAL_CLOCK, cuda.TRIAL_WHERE
    x = given = cuda.trial_matrix().to(torch.float32 if dtype == torch.int32 else dtype)
    if dtype == torch.int32:
        x, given = (x * 1.001).to(torch.bfloat16), (x * 1.001).view(dtype)
    rotations = [
        Hadamard(size=copy[1], signs="per_call") if copy and copy[1] else None  # type: ignore[arg-type]
        for copy in copies
    ]
    apart = copies[0][2] if copies[0] and len(copies[0]) > 2 else None
    columns = torch.arange(1, x.shape[1], 3)
    try:
        asked = [
            _form(x, copy[0], rotation, clock, where, 0, None, None) if copy else None
            for copy, rotation in zip(copies, rotations, strict=True)
        ]
        if spans:
            first, other = ([copy] * len(spans) if copy else None for copy in asked)
            several = general_cuda.quantize_parts(given.to(device), spans, first, other, clock)
            made = [one for copy in several for one, (_, n) in zip(copy, spans, strict=bool(copy)) if n]
        elif apart is not None:
            place = cuda.placed(columns.flip(0).to(device), x.shape[1])[0]
            pair = [*filter(None, asked)]
            made = [*_apart(given.to(device), pair, clock, (place, len(columns), apart))]
        else:
            made = general_cuda.quantize(given.to(device), asked[0], asked[1], clock)
        found = [_bits(one) for one in made]
    except Exception as error:  # whatever Triton, the compiler or the driver raises
        return reason(error)
    parts = [x[begin : begin + rows] for begin, rows in spans or ((0, len(x)),) if rows]
    sources, directions = (parts, parts), (False, True)
    if apart is not None:
        few = torch.zeros_like(x).index_copy(1, columns, x[:, columns])
        sources, directions = ([x.to(torch.float32) - few], [few]), (apart, apart)
    theirs = [
        reference(z.t() if down else z, copy[0], rotation=rotation, clock=clock, where=where, keep=True)
        for copy, rotation, down, those in zip(copies, rotations, directions, sources, strict=True)
        for z in those  # by no kernel
        if copy
    ]
    if apart is not None:
        values = theirs[1].values.index_select(0 if apart else 1, columns).to(torch.float32)
        theirs[1] = replace(theirs[1], values=values, block_scale=None)
    return "" if found == [*map(_bits, theirs)] else "its bits differ from the reference's"


def _bits(made: Any) -> str:
    """Return a digest of a copy, or of an operand."""
    parts = made.values, made.amax, made.block_scale, made.largest
    return cuda.digest(*(part.reshape(-1) for part in parts if part is not None))
