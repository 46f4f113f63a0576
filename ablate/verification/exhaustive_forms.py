"""Cases of forms other than NVIDIA's: `kernels.general` beside the reference beside integer arithmetic.

Every finite bf16 number at every scale of three formats, for each element with a mantissa: to nearest and
with ties away from zero; and with every random byte at scale 1. S is 1. E8M0 runs from 2^-100 to 2^100,
beyond which results need not be bf16 numbers. exhaustive_nvfp4.py says how a scale is forced and where
elements stand, exhaustive.py what is not enumerated.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ablate.numerics import scaling
from ablate.numerics.kernels import builds, general
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Outer, Quant, Range
from ablate.verification import cast_oracle
from ablate.verification.cast_oracle import ELEMENTS, LARGEST, Cast
from ablate.verification.check_result import present
from ablate.verification.enumeration import Part, Tally
from ablate.verification.exhaustive_nvfp4 import BLOCKS, FEW_BLOCKS, case_of, clock_of, differences, layout

SCALES = {
    "e4m3": cast_oracle.SCALES,
    "ue5m3": tuple(
        m / 2**17 if e == -15 else (1 + m / 8) * 2.0**e
        for e in range(-15, 16)
        for m in range(8)
        if (e, m) != (15, 7)
    ),
    "e8m0": tuple(2.0**e for e in range(-100, 101)),
}
"""All values of the formats."""
_ONE = 2688.0
"""Outer statistic at which the oracle's S is 1."""


def form(element: str, scale: str, rounding: str, headroom: float) -> Quant:
    """Return the quantiser: MX blocks of 32 without an outer scale for E8M0, else blocks of 16 with S = 1."""
    top = ELEMENTS[element][2]
    return Quant(
        element=element,
        block="1x32" if scale == "e8m0" else "1x16",
        scale=BlockScale(format=scale),
        rounding=rounding,
        range=Range(headroom=headroom),
        outer=None if scale == "e8m0" else Outer(statistic=f"static:{448 * top!r}"),
    )


def forced(element: str, scale: str, value: float) -> tuple[int, float]:
    """Return the bits of the largest magnitude that a block with this scale may have, and the headroom."""
    plain = form(element, scale, "nearest", 1.0)
    for bits in (LARGEST, *range(0x7F00, 0, -0x80)):
        largest = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16).float()
        smallest = SCALES[scale][1] / 4 if value == 0 else value
        for room in (1.0, 1 + 2.0**-6, 1 - 2.0**-6):
            headroom = float(np.float32(smallest * room * ELEMENTS[element][2] / largest.item()))
            if 0 < headroom <= 4:
                quant = plain.model_copy(update={"range": Range(headroom=headroom)})
                if scaling.block_scales(largest, torch.ones(1), quant).item() == value:
                    return bits, headroom
    raise ValueError(f"no headroom gives a block the {scale} scale {value:g}")


def _made(x: Tensor, quant: Quant, number: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    clock = clock_of(number) if quant.rounding == "stochastic" else None
    with builds.using(None):
        reference = quantize(x, quant, clock=clock)
    yield "reference", reference.values, present(reference.block_scale)
    if builds.build() is not None:
        statistic = None if quant.outer is None else 448 * ELEMENTS[quant.element][2]
        found = general.quantize(x, quant, 0, clock, 0, statistic=statistic)
        if found is None:
            raise RuntimeError("the kernel `general` left finite blocks to the reference")
        yield "general", found.values, present(found.block_scale)


def at_scale(element: str, scale: str, rounding: str, value: float) -> Tally:
    """Enumerate every bf16, and every byte if it rounds stochastically, at one block scale."""
    largest, headroom = forced(element, scale, value)
    drawn = rounding == "stochastic"
    quant, cast = form(element, scale, rounding, headroom), Cast.of(value, _ONE, element)
    placed = layout(largest, drawn, BLOCKS if drawn else FEW_BLOCKS)
    tally = Tally(placed.cases)
    for number, (source, bits) in enumerate(zip(placed.sources, placed.bits, strict=True)):
        if drawn:
            expected = np.where(placed.bytes[number] < cast.position[bits], cast.high[bits], cast.low[bits])
        else:
            expected = (cast.near if rounding == "nearest" else cast.away)[bits]
        wanted = torch.from_numpy(expected)
        case = partial(case_of, bits, placed.bytes[number] if drawn else None)
        x = source.rows.reshape(-1, quant.tile[1])
        for name, values, scales in _made(x, quant, number):
            where = f"{name}, {element} with {scale} scales, {rounding}, block scale {value:g}"
            tally += differences(where, value, scales, values, wanted, case)
    return tally


def _every_scale(element: str, scale: str, rounding: str) -> Tally:
    return sum((at_scale(element, scale, rounding, value) for value in SCALES[scale]), Tally(0))


def parts() -> list[Part]:
    """Return the enumerations of all elements and scale formats."""
    pairs = [(element, scale) for element in ELEMENTS for scale in SCALES]
    chunks = {
        f"{element} with {scale} scales, {rounding}": partial(_every_scale, element, scale, rounding)
        for element, scale in pairs
        for rounding in ("nearest", "away")
    }
    stochastic = {
        f"{element} with {scale} scales": partial(at_scale, element, scale, "stochastic", 1.0)
        for element, scale in pairs
    }
    return [
        Part(
            "Other forms: every finite bf16", "at every scale of E4M3, UE5M3 and E8M0, seven elements", chunks
        ),
        Part(
            "Other forms: every finite bf16", "stochastic at scale 1, every random byte, the same", stochastic
        ),
    ]
