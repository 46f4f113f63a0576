"""Comfy Kitchen, the kernels of ComfyUI, with its eager back end."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `quantize_nvfp4` or `quantize_mxfp8`; scales are in the layout of tensor cores.

    The tensor scale of NVFP4 is amax / 2688 in the dtype of x, as `TensorCoreNVFP4Layout` computes it.
    `hi_first=False` asks for the even column in the low nibble; the library's own order is the opposite one.
    """
    import comfy_kitchen

    def nvfp4(x: Tensor) -> Quantised:
        return given(x, torch.amax(x.abs()))

    def given(x: Tensor, amax: Tensor) -> Quantised:
        outer = (amax / (448.0 * 6.0)).float()
        codes, scales = comfy_kitchen.quantize_nvfp4(x, outer, hi_first=False)
        values = comfy_kitchen.dequantize_nvfp4(codes, outer, scales, torch.float32, hi_first=False)
        return Quantised(values=values, codes=codes, scales=scales, outer=outer)

    def mxfp8(x: Tensor) -> Quantised:
        codes, scales = comfy_kitchen.quantize_mxfp8(x)
        values = comfy_kitchen.dequantize_mxfp8(codes, scales, torch.float32)
        return Quantised(values=values, codes=codes, scales=scales)

    if recipe == "nvfp4":
        return Subject("comfy_kitchen", cast=nvfp4, cast_given=given, swizzled=True)
    return Subject("comfy_kitchen", cast=mxfp8, columns=32, swizzled=True)
