"""compressed-tensors, the format of llm-compressor and vLLM: its casts as llm-compressor calls them."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject

FORMATS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}


def subject(recipe: str) -> Subject:
    """Return scales by `compute_dynamic_scales_and_zp` and codes by the format's compressor.

    The tensor's scale is `generate_gparam` of its minimum and maximum, as llm-compressor's observers compute
    it. It multiplies block scales, so that `outer` is its reciprocal. MX scales are powers of two by the rule
    that AMD calls "even", up from a mantissa of 1.75, for E4M3 elements as well.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    scheme = preset_name_to_scheme(recipe.upper(), ["Linear"])
    args = scheme.weights
    compressor = BaseCompressor.get_value_from_registry(FORMATS[recipe])

    def cast(x: Tensor) -> Quantised:
        return given(x, x.abs().amax())

    def given(x: Tensor, amax: Tensor) -> Quantised:
        whole = generate_gparam(-amax, amax) if recipe == "nvfp4" else None
        scales, _ = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=whole)
        state = {"weight": x, "weight_scale": scales}
        if whole is not None:
            state["weight_global_scale"] = whole
        packed = compressor.compress(state, scheme)
        codes = packed["weight_packed"] if "weight_packed" in packed else packed["weight"]
        return Quantised(
            codes=codes, scales=packed["weight_scale"], outer=None if whole is None else 1 / whole
        )

    if recipe == "nvfp4":
        return Subject("compressed_tensors", cast=cast, cast_given=given)
    return Subject("compressed_tensors", cast=cast, columns=32)
