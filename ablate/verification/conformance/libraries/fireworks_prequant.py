"""fireworks-prequant: the NVFP4 checkpoints of Fireworks' trainer, with its PyTorch reference."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `quantize_weight`, which computes the tensor scale and stores its reciprocal."""
    from fireworks_prequant.quantize import quantize_weight

    assert recipe == "nvfp4"

    def cast(x: Tensor) -> Quantised:
        q = quantize_weight("x.weight", x, device="cpu")
        return Quantised(
            codes=q["x.weight"].view(torch.uint8),
            scales=q["x.weight_scale_inv"],
            outer=q["x.weight_scale_global"],
        )

    return Subject("fireworks_prequant", cast=cast)
