"""Transformer Engine's reference of its NVFP4 kernels, `custom_recipes.reference_nvfp4`.

It is what NVIDIA's own kernel tests compare with. The wheel without extras has no native part; `peers` loads
the reference without it.
"""

from typing import Any

import torch
from torch import Tensor

from ablate.verification import peers
from ablate.verification.conformance.subject import Quantised, Subject

E4M3_MAX = {"nvfp4": 448, "row_scaled": 448, "four_over_six": 256}
"""Largest block scale of each recipe, the option nvfp4_e4m3_max."""


def subject(recipe: str) -> Subject:
    """Return the quantisers that TE makes for a recipe, with amax, codes and block scales.

    The reference rounds to nearest alone, also the gradient, which TE's kernels round stochastically; this is
    declared. Its MXFP4 rounds scales up.
    """
    if recipe == "mxfp4":
        return Subject("transformer_engine", cast=_mxfp4, columns=32)
    options: dict[str, Any] = {}
    if recipe == "row_scaled":
        options = {"row_scaled_nvfp4": True}
    if recipe == "four_over_six":
        options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "mse"}
    bound = 6.0 * E4M3_MAX[recipe]

    def cast(x: Tensor, tile: tuple[int, int] = (1, 16)) -> Quantised:
        q = peers.te_quantizer(tile, **options).quantize(x)
        amax = q.global_amax_row.float()
        outer = amax / bound
        return Quantised(
            codes=q.data,
            scales=q.scale,
            outer=outer.reshape(-1, 1) if outer.numel() > 1 else outer,
            amax=amax if amax.numel() == 1 else None,
        )

    if recipe != "nvfp4":
        return Subject("transformer_engine", cast=cast, rows=16)
    return Subject(
        "transformer_engine",
        cast=cast,
        cast_square=lambda x: cast(x, (16, 16)),
        rotate=lambda x: peers.te_quantizer(rht=True)._apply_rht(x),
        product=_product,
        rows=32,
        columns=32,
        variants={"random_gradients": "nearest"},
    )


def _product(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gemm = peers.te_reference().gemm.custom_gemm
    qx, qdy = (peers.te_quantizer(rht=True).quantize(operand) for operand in (x, dy))
    qw = peers.te_quantizer((16, 16)).quantize(w)
    y, dx, dw = (
        gemm(a, b, None, out_dtype=torch.float32, layout=layout, grad=grad)[0]
        for a, b, layout, grad in ((qw, qx, "TN", False), (qw, qdy, "NN", True), (qx, qdy, "NT", True))
    )
    return y, dx, dw


def _mxfp4(x: Tensor) -> Quantised:
    # quantize() fails for power-of-two scales, which have no global amax; this is the function that it calls.
    reference = peers.te_reference().nvfp4.NVFP4QuantizerRef._quantize_blockwise_reference
    codes, scales = reference(x, None, 32, 1, pow_2_scales=True, eps=0.0)
    return Quantised(codes=codes, scales=scales)
