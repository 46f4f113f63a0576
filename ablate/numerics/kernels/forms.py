"""Forms of quantisation that the fast kernels compute, by description alone: no tensor, no torch.

`ablate plan` asks this file how much of a recipe would run on the slow reference on a GPU. The kernels ask
the same functions, and then look at the tensor.
"""

from collections.abc import Iterator
from functools import cache

from ablate.numerics.choices import IN_KERNELS
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.spec import BlockScale, Hadamard, Quant, Range, tag


@cache
def nvidia(quant: Quant) -> bool:
    """Return True for NVIDIA's forms, whatever their outer statistic: E2M1 elements, E4M3 scales to nearest,
    one outer scale a tensor, blocks of 16 or 16x16."""
    drawn = quant.rounding == "stochastic"
    return (
        not quant.owned
        and not quant.altered
        and quant.element == "e2m1"
        and quant.select is None
        and quant.scale == BlockScale()
        and quant.range == Range(headroom=quant.range.headroom)
        and quant.outer is not None
        and quant.outer.granularity == "tensor"
        and (quant.block == "1x16" or (quant.block == "16x16" and not drawn))
        and (quant.rounding == "nearest" or (drawn and quant.bits == 8))
    )


@cache
def covers(quant: Quant) -> bool:
    """Return True if the general kernels implement this form: the one for CPUs, and but for groups of rows
    (`on_gpu`) the one for GPUs."""
    if quant.owned or quant.altered or any(word not in IN_KERNELS[of] for of, word in _words(quant)):
        return False
    selected = quant.select is None or (quant.block == "1x16" and quant.range.prescale == 1)
    per_tensor = quant.outer is None or quant.outer.granularity == "tensor"
    lengths = (quant.scale.micro_exponents or ()) if quant.scale else ()
    # Between powers of two, ties to even are another rule, which the kernels lack.
    ties = ELEMENTS[quant.element].mantissa > 0 or quant.rounding == "stochastic" or quant.rounding == "away"
    # The kernels join blocks to 128 elements; without blocks they have an outer scale a row or a tensor.
    split = quant.outer is not None and quant.outer.granularity == "block:128"
    return (
        ties
        and not (split and quant.block is None)
        and quant.tile[1] in (1, 16, 32, 64, 128)
        and selected
        and (quant.outer is None or per_tensor or quant.outer.statistic == "amax")
        and (quant.range.statistic == "amax" or quant.tile[0] == 1)
        and all(length in (1, 2, 4, 8, 16) for length in lengths)
    )


def _words(quant: Quant) -> Iterator[tuple[str, object]]:
    """Yield the words of a form that a kernel has to know, each with its key in IN_KERNELS."""
    yield "rounding", quant.rounding
    yield "statistic", tag(quant.range.statistic)
    if quant.scale:
        yield "rounding", quant.scale.rounding
    if quant.outer:
        yield "granularity", tag(quant.outer.granularity)
    if quant.select:
        yield from (("among", quant.select.among), ("criterion", quant.select.criterion))


@cache
def on_gpu(quant: Quant) -> bool:
    """Return True if kernels quantise this form on a GPU, with any rotation: no groups of rows. A rotation
    that the kernels do not have is made by torch's operations before them."""
    return (quant.outer is None or tag(quant.outer.granularity) != "rows") and covers(quant)


def fuses(quant: Quant, rotation: Hadamard) -> bool:
    """Return True if the kernels rotate bf16 columns of memory while they quantise them."""
    return rotation.size == 16 and quant.block == "1x16"
