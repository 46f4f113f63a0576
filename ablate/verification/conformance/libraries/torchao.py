"""torchao: `prototype.mx_formats`, what its inference configurations and its MXFP8 training call."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject
from ablate.verification.peer_comparison import quiet


def subject(recipe: str) -> Subject:
    """Return `nvfp4_quantize` with the tensor's scale, `per_tensor_amax_to_scale`; or `to_mx`.

    NVFP4: `NVFP4DynamicActivationNVFP4WeightConfig` computes the tensor scale likewise from the amax of each
    call. MX: `MXTensor.to_mx` with the recipe's scale rule; `mxfp8` also has the product of
    `moe_training.mxfp8_linear`, emulated.
    """
    with quiet():
        from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
        from torchao.prototype.mx_formats.config import ScaleCalculationMode

    if recipe == "nvfp4":

        def given(x: Tensor, amax: Tensor) -> Quantised:
            outer = nvfp4_tensor.per_tensor_amax_to_scale(amax)
            scales, codes = nvfp4_tensor.nvfp4_quantize(x, 16, outer)
            return Quantised(codes=codes, scales=scales, outer=outer, amax=amax.float())

        return Subject("torchao", cast=lambda x: given(x, x.abs().amax()), cast_given=given)

    element = torch.float4_e2m1fn_x2 if recipe == "mxfp4" else torch.float8_e4m3fn
    mode = ScaleCalculationMode.FLOOR if recipe == "mxfp4" else ScaleCalculationMode.RCEIL

    def mx(x: Tensor) -> Quantised:
        scales, codes = mx_tensor.to_mx(x, element, 32, mode)
        values = mx_tensor.to_dtype(codes, scales, element, 32, torch.float32)
        return Quantised(values=values, codes=codes, scales=scales)

    return Subject("torchao", cast=mx, columns=32, product=_product(mode) if recipe == "mxfp8" else None)


def _product(mode):  # type: ignore[no-untyped-def]
    with quiet():
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.quantization.quantize_.common import KernelPreference

    def product(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = _to_mxfp8_then_scaled_mm(x, w, KernelPreference.EMULATED, mode)
        y.backward(dy)
        return y.detach(), x.grad, w.grad

    return product
