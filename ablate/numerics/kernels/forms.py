"""Forms of quantisation that the fast kernels compute, by description alone: no tensor, no torch.

`ablate plan` asks this file how much of a recipe would run on the slow reference on a GPU. The kernels ask
the same functions, and then look at the tensor.
"""

from functools import cache

from ablate.numerics.spec import BlockScale, Hadamard, Quant, Range


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


def on_gpu(quant: Quant) -> bool:
    """Return True if kernels quantise this form on a GPU, with any rotation and any outer statistic. A
    rotation that the kernels do not have is made by torch's operations before them."""
    return nvidia(quant)


def fuses(quant: Quant, rotation: Hadamard) -> bool:
    """Return True if the kernels rotate bf16 columns of memory while they quantise them."""
    return rotation.size == 16 and quant.block == "1x16"
