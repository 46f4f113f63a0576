"""AutoRound, Intel's quantiser: the functions of its registry of data types."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `nv_fp4`, or `quant_mx` (floor) for MXFP4 and `quant_mx_rceil` for MXFP8.

    Each fakes quantisation: values in the dtype of x, and scales in fp32 (NVFP4) or as exponents (MX). The
    tensor scale of NVFP4 is `calculate_gparam`, 2688 / amax.
    """
    from auto_round.data_type import mxfp, nvfp

    def nvfp4(x: Tensor, amax: Tensor | None = None) -> Quantised:
        whole = nvfp.calculate_gparam(x if amax is None else amax)
        values, scales, _ = nvfp.nv_fp4(x, global_scale=whole)
        return Quantised(values=values, scales=scales.view(len(x), -1), outer=nvfp.get_reciprocal(whole))

    def mx(x: Tensor) -> Quantised:
        function = mxfp.quant_mx if recipe == "mxfp4" else mxfp.quant_mx_rceil
        values, exponents, _ = function(x, bits=4 if recipe == "mxfp4" else 8, group_size=32)
        return Quantised(values=values, scales=torch.exp2(exponents.float()).view(len(x), -1))

    if recipe == "nvfp4":
        return Subject("auto_round", cast=nvfp4, cast_given=nvfp4)
    return Subject("auto_round", cast=mx, columns=32)
