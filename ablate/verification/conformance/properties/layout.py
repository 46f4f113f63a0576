"""Bytes: element codes, nibbles, scales in the layout of tensor cores, shapes that are no multiples of it."""

import torch
from torch import Tensor

from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import Examination, NotApplicableError
from ablate.verification.conformance.properties.cast import EXACT
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.subject import Quantised

SHAPES = (
    *((1, 32), (2, 64), (15, 96), (16, 48), (17, 16), (31, 80), (33, 112), (48, 96), (64, 144)),
    *((100, 160), (127, 64), (128, 96), (129, 128), (130, 272), (16, 1040), (257, 32), (3, 528), (128, 192)),
)
"""Rows and columns on both sides of 16, 32, 64 and 128, and of multiples of them."""
CUT_SHORT = (
    *((1, 1), (2, 7), (15, 33), (16, 17), (17, 31), (33, 40), (64, 120), (127, 65), (128, 129), (3, 264)),
)
"""Rows and columns whose last block is cut short, for subjects that take them."""


def code_bytes(bench: Examination) -> Row:
    """Cast a block with each of the 16 codes: its bytes in the order of the columns."""
    quant = bench.nearest
    length, points = quant.tile[1], inputs.grid(quant.element)
    signed = torch.cat((points, -points.flip(0)))
    rows, columns = bench.rows(4), bench.columns(-(-len(signed) // length) * length * 2, quant)
    x = torch.zeros(rows, columns)
    line = signed.repeat(-(-columns // len(signed)))[:columns]
    for row in range(rows):
        x[row] = line.roll(3 * row)
    x.view(rows, -1, length)[:, :, 0] = points[-1]
    got = bench.pair(bench.typed(x), quant)
    if got.got.codes is None:
        raise NotApplicableError("the subject returns values only")
    return bench.judged("code_bytes", [got])


def scale_layout(bench: Examination) -> Row:
    """Cast tensors of 33, 130 and 257 rows whose blocks all have other scales; compare scale by scale."""
    quant = bench.nearest
    if quant.scale is None:
        raise NotApplicableError("the recipe has no block scales")
    pairs = []
    for rows, blocks in ((33, 3), (130, 5), (257, 9)):
        high, wide = bench.rows(rows), bench.columns(blocks * quant.tile[1], quant)
        x = inputs.normal(high, wide, bench.seed)
        numbers = torch.arange(high * wide // quant.tile[1]).view(high, -1)
        powers = 2.0 ** (numbers * 5 % 13 - 6) * (1 + (numbers % 8) / 8)
        x *= powers.repeat_interleave(quant.tile[1], 1)[:, :wide]
        pairs.append(bench.pair(bench.typed(x), quant, where=f"{high} x {wide}"))
    if pairs[0].got.scales is None:
        raise NotApplicableError("the subject returns values only")
    return bench.judged("scale_layout", pairs)


def padding_bytes(bench: Examination) -> Row:
    """Read the scales beyond the tensor's rows, in the 128 x 4 layout: none is NaN, whatever memory held."""
    quant = bench.nearest
    if not bench.subject.swizzled:
        raise NotApplicableError("the subject's scales are not in the layout of tensor cores")
    nans = cases = 0
    for rows, columns in ((1, 64), (33, 80), (130, 144)):
        high, wide = bench.rows(rows), bench.columns(columns, quant)
        _poison(high, wide)
        result = bench.call("cast", bench.typed(inputs.normal(high, wide, bench.seed)))
        if not isinstance(result, Quantised) or result.scales is None:
            raise NotApplicableError("the subject returns values only")
        raw = result.scales.detach().cpu().contiguous().view(torch.uint8)
        limit = 0x7F if quant.outer is not None else 0xFF
        nans += int((raw == limit).sum())
        cases += raw.numel()
    return Row("padding_bytes", Outcome.FAIL if nans else Outcome.PASS, cases, nans)


def shape_lattice(bench: Examination) -> Row:
    """Cast tensors of 18 shapes around multiples of 16, 32, 64 and 128, in memory that held NaN before; of 10
    more whose last block is cut short, if the subject takes them.
    """
    quant = bench.nearest
    pairs, shapes = [], {(bench.rows(r), bench.columns(c, quant)) for r, c in SHAPES}
    for rows, columns in (*sorted(shapes), *bench.cut_short(quant, CUT_SHORT)):
        x = bench.typed(inputs.normal(rows, columns, bench.seed + rows))
        _poison(rows, columns, bench.subject.device)
        pairs.append(bench.pair(x, quant, where=f"x [{rows}, {columns}]"))
    return bench.judged("shape_lattice", pairs)


def _poison(rows: int, columns: int, device: str = "cpu") -> None:
    """Fill and free memory of the sizes that a cast allocates, so that what it leaves unwritten is NaN."""
    held: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16):
        held += [torch.full((rows, columns), float("nan"), dtype=dtype, device=device) for _ in range(4)]
    held += [torch.full((rows, columns // 2), 0x7F, dtype=torch.uint8, device=device) for _ in range(4)]
    held += [
        torch.full((rows, max(1, columns // 16)), 0x7F, dtype=torch.uint8, device=device) for _ in range(4)
    ]
    held.clear()


PROPERTIES = (
    Property(
        "code_bytes",
        "Bytes are the codes of the format; the even column is the low nibble.",
        EXACT,
        "cast",
        (20,),
        code_bytes,
    ),
    Property(
        "scale_layout",
        "Each scale is where it belongs, also with 33, 130 and 257 rows.",
        EXACT,
        "cast",
        (18,),
        scale_layout,
    ),
    Property(
        "padding_bytes", "Scale bytes that pad the layout are written.", "exact", "cast", (19,), padding_bytes
    ),
    Property(
        "shape_lattice",
        "Shapes around multiples of 16 to 128 are cast alike; every element is written.",
        EXACT,
        "cast",
        (26, 27),
        shape_lattice,
    ),
)
