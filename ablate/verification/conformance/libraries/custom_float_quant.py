"""custom-float-quant: a simulator of small floating-point formats in NumPy."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `quantize_array_block_scaled` in blocks of 32 with power-of-two scales.

    Its parameter `margin`, 0.95 by default, is 1 here: amax / max is then rounded up to a power of two.
    """
    from custom_float_quant.core import CustomFloat

    form = CustomFloat.mxfp4_e2m1 if recipe == "mxfp4" else CustomFloat.mxfp8_e4m3

    def cast(x: Tensor) -> Quantised:
        values, scales = form().quantize_array_block_scaled(x.double().numpy(), block_size=32, margin=1.0)
        return Quantised(values=torch.from_numpy(values).float(), scales=torch.from_numpy(1 / scales).float())

    return Subject("custom_float_quant", cast=cast, columns=32)
