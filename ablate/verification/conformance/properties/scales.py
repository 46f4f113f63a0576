"""Block scales: every value of their format, its boundaries, and the second level."""

from dataclasses import replace

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import Outer
from ablate.numerics.spec import Quant
from ablate.verification.conformance import inputs
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Pair,
    reference,
)
from ablate.verification.conformance.numbers import differences
from ablate.verification.conformance.properties.cast import EXACT
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Row

BYTE = 8


def _scaled(bench: Examination) -> Quant:
    quant = bench.nearest
    if quant.scale is None:
        raise NotApplicableError("the recipe has no block scales")
    return quant


def _eight_bits(bench: Examination) -> Quant:
    quant = _scaled(bench)
    assert quant.scale is not None
    if not SCALES[quant.scale.format].mantissa or SCALES[quant.scale.format].bits > BYTE:
        raise NotApplicableError("the recipe's scales are powers of two, or wider than a byte")
    return quant


def scale_midpoints(bench: Examination) -> Row:
    """Cast blocks whose scale is exactly halfway between two E4M3 numbers, and to both sides."""
    quant = _eight_bits(bench)
    x = inputs.scale_midpoints(quant, bench.rows(32), bench.columns(256, quant))
    return bench.compare("scale_midpoints", [bench.typed(x)], quant)


def every_scale(bench: Examination) -> Row:
    """Cast a block for every scale of the format."""
    quant = _scaled(bench)
    assert quant.scale is not None
    if SCALES[quant.scale.format].bits > BYTE:
        raise NotApplicableError("the recipe's scales are wider than a byte")
    x = inputs.every_scale(quant, bench.rows(32), bench.columns(256, quant))
    return bench.compare("every_scale", [bench.typed(x)], quant)


def subnormal_scales(bench: Examination) -> Row:
    """Cast blocks whose scales are subnormal, or round to zero."""
    quant = _eight_bits(bench)
    x = inputs.subnormal_scales(quant, bench.rows(32), bench.columns(128, quant))
    return bench.compare("subnormal_scales", [bench.typed(x)], quant)


def saturated_scales(bench: Examination) -> Row:
    """Cast with a given amax that blocks exceed: their scales would be 448, 449, 464, 480 and more."""
    bench.function("cast_given")
    quant = _eight_bits(bench)
    if quant.outer is None or quant.outer.granularity != "tensor":
        raise NotApplicableError("the recipe has no amax of the tensor")
    top, bound = ELEMENTS[quant.element].max, quant.outer.bound
    wanted = (
        torch.tensor([1.0, 448 / 448, 449 / 448, 464 / 448, 465 / 448, 480 / 448, 2.0, 1e3, 1e30]) * bound
    )
    rows, columns = bench.rows(16), bench.columns(64, quant)
    x = inputs.from_amaxes(wanted * top, bound * top, quant, rows, columns)
    random = inputs.normal(rows, columns, bench.seed)
    pairs = [_given(bench, bench.typed(x), bound * top)]
    for amax in (float(bench.typed(random).abs().max()), 1.5, 8.0, 1e-3, 1e4):
        pairs.append(_given(bench, bench.typed(random), amax))
    return bench.judged("saturated_scales", pairs)


def _given(bench: Examination, x: Tensor, amax: float) -> Pair:
    """Cast x with a given amax by the subject and by the recipe."""
    quant = bench.nearest
    assert quant.outer is not None
    static = quant.model_copy(update={"outer": Outer(statistic=f"static:{amax!r}", bound=quant.outer.bound)})
    previous, got = bench.last, bench.cast(x, quant, "cast_given", amax=torch.tensor(amax))
    if got.values is None and got.outer is not None:  # the factor is a result of the amax as well
        got = replace(got, values=got.dequantised(quant.tile[1]))
    expected = reference(x, static)
    difference = differences(got, expected, quant.tile[1])
    return Pair(x, got, expected, static, difference, f"amax given as {amax:.6g}", previous)


def power_of_two_thresholds(bench: Examination) -> Row:
    """Cast blocks whose amax has every bf16 significand: where E8M0's exponent goes up."""
    quant = _scaled(bench)
    assert quant.scale is not None
    if SCALES[quant.scale.format].mantissa:
        raise NotApplicableError("the recipe's scales are no powers of two")
    rows, columns = bench.rows(64), bench.columns(512, quant)
    significands = (128 + torch.arange(128.0)) / 128
    near = torch.tensor([1.5, 1.75, 1.0, 2.0])
    ulps = torch.cat([near * (1 + k * 2.0**-23) for k in (-2, -1, 0, 1, 2)])
    exponents = 2.0 ** torch.tensor([-20.0, -1.0, 0.0, 1.0, 7.0])
    coarse = (significands[:, None] * exponents).flatten()
    made = [bench.typed(inputs.from_amaxes(coarse, float(coarse.max()), quant, rows, columns))]
    if bench.takes("float32"):
        x = torch.zeros(rows, columns)
        x[:, :: quant.tile[1]] = ulps.repeat(-(-rows // len(ulps)))[:rows, None]
        made.append(x)
    return bench.compare("power_of_two_thresholds", made, quant)


def power_of_two_extremes(bench: Examination) -> Row:
    """Cast blocks with the smallest and largest exponents that bf16 has."""
    quant = _scaled(bench)
    assert quant.scale is not None
    if SCALES[quant.scale.format].mantissa:
        raise NotApplicableError("the recipe's scales are no powers of two")
    rows, columns = bench.rows(16), bench.columns(128, quant)
    exponents = torch.cat((torch.arange(-126, -116), torch.arange(118, 128))).float()
    amaxes = (torch.tensor([1.0, 1.25, 1.5, 1.75, 1.9921875])[:, None] * 2.0**exponents).flatten()
    x = inputs.from_amaxes(amaxes, 1.0, quant, rows, columns)
    return bench.compare("power_of_two_extremes", [bench.typed(x)], quant)


PROPERTIES = (
    Property(
        "scale_midpoints",
        "Block scales are rounded to nearest, ties to even.",
        EXACT,
        "cast",
        (10,),
        scale_midpoints,
    ),
    Property(
        "every_scale",
        "Every scale of the format is used and read back.",
        EXACT,
        "cast",
        (10, 13),
        every_scale,
    ),
    Property(
        "subnormal_scales",
        "Subnormal scales are kept; those below half the smallest are zero.",
        EXACT,
        "cast",
        (13, 14),
        subnormal_scales,
    ),
    Property(
        "saturated_scales",
        "Scales above the maximum become the maximum, never NaN.",
        EXACT,
        "cast_given",
        (12,),
        saturated_scales,
    ),
    Property(
        "power_of_two_thresholds",
        "E8M0's exponent goes up where the recipe says.",
        EXACT,
        "cast",
        (21,),
        power_of_two_thresholds,
    ),
    Property(
        "power_of_two_extremes",
        "The smallest and largest exponents are right.",
        EXACT,
        "cast",
        (21,),
        power_of_two_extremes,
    ),
)
