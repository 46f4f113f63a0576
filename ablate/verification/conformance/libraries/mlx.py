"""MLX, Apple's array library, on its CPU back end: `mlx.core.quantize`."""

import numpy as np
import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `quantize` and `dequantize` in the mode of the recipe's name.

    NVFP4 has its tensor scale only if the amax is given as `global_scale`, as `mlx.nn` does for activations;
    without it block scales are amax / 6. MX rounds scales up.
    """
    import mlx.core as mx

    length = 16 if recipe == "nvfp4" else 32

    def cast(x: Tensor) -> Quantised:
        return given(x, x.float().abs().max())

    def given(x: Tensor, largest: Tensor) -> Quantised:
        array = mx.array(x.float().numpy())
        if x.dtype == torch.bfloat16:
            array = array.astype(mx.bfloat16)
        amax = largest if recipe == "nvfp4" else None
        whole = None if amax is None else mx.array(amax.item())
        codes, scales = mx.quantize(array, mode=recipe, global_scale=whole, stream=mx.cpu)
        values = mx.dequantize(
            codes, scales, mode=recipe, global_scale=whole, dtype=mx.float32, stream=mx.cpu
        )
        raw = torch.from_numpy(np.array(codes).view(np.uint8).copy()).view(len(x), -1)
        return Quantised(
            values=torch.from_numpy(np.array(values)),
            codes=raw,
            scales=torch.from_numpy(np.array(scales)).view(len(x), x.shape[1] // length),
            outer=None if amax is None else amax / 2688,
            amax=amax,
        )

    return Subject("mlx", cast=cast, cast_given=given if recipe == "nvfp4" else None, columns=length)
