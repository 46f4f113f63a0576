"""breccia: block-scaled tensors across frameworks, with its NumPy reference kernels."""

import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `cast` and `dequantize` with `NVFP4BlockScaling` or `MXFP8BlockScaling`.

    It has no tensor scale: NVFP4 here is E2M1 with E4M3 scales of amax / 6. MXFP8 rounds the logarithm of its
    scale to nearest.
    """
    import breccia

    scaling = breccia.NVFP4BlockScaling() if recipe == "nvfp4" else breccia.MXFP8BlockScaling()

    def cast(x: Tensor) -> Quantised:
        q = breccia.cast(x.float().numpy(), scaling)
        return Quantised(
            values=torch.from_numpy(breccia.dequantize(q)),
            codes=torch.from_numpy(q.data),
            scales=torch.from_numpy(q.scale),
        )

    return Subject("breccia", cast=cast, columns=16 if recipe == "nvfp4" else 32)
