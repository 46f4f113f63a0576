"""NVIDIA Model Optimizer: `quantization.qtensor`, the casts of its exported checkpoints."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `NVFP4QTensor`, `MXFP4QTensor` or `MXFP8QTensor`, which compute their scales from the tensor.

    Its fake quantisers need CUDA, and are not examined. A block scale of zero is stored as 1; MXFP4 rounds
    scales up.
    """
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    def nvfp4(x: Tensor, outer: Tensor | None = None) -> Quantised:
        q, scales, outer = NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=outer)
        values = q.dequantize(torch.float32, scale=scales, double_scale=outer, block_sizes={-1: 16})
        return Quantised(values=values, codes=q._quantized_data, scales=scales, outer=outer)

    def mxfp4(x: Tensor) -> Quantised:
        q, scales = MXFP4QTensor.quantize(x, 32)
        values = q.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})
        return Quantised(values=values, codes=q._quantized_data, scales=scales.view(len(x), -1))

    def mxfp8(x: Tensor) -> Quantised:
        q, scales = MXFP8QTensor.quantize(x)
        values = q.dequantize(torch.float32, scale=scales)
        return Quantised(values=values, codes=q._quantized_data, scales=scales)

    if recipe == "nvfp4":
        return Subject("modelopt", cast=nvfp4, cast_given=lambda x, amax: nvfp4(x, amax.float() / 2688))
    return Subject("modelopt", cast=mxfp4 if recipe == "mxfp4" else mxfp8, columns=32)
