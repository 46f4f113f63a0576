"""gfloat, Graphcore's definitions of number formats in double precision: its OCP MX block formats."""

import numpy as np
import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `quantize_block` of each block with OCP's rule, `compute_scale_amax` (floor)."""
    import gfloat
    from gfloat import formats

    form = {"mxfp4": formats.format_info_mxfp4_e2m1, "mxfp8": formats.format_info_mxfp8_e4m3}[recipe]

    def cast(x: Tensor) -> Quantised:
        blocks = x.double().reshape(-1, form.k).numpy()
        values = [gfloat.quantize_block(form, block, gfloat.compute_scale_amax) for block in blocks]
        scales = [gfloat.compute_scale_amax(form.etype.emax, block) for block in blocks]
        return Quantised(
            values=torch.from_numpy(np.stack(values)).view(x.shape).float(),
            scales=torch.tensor(scales).view(len(x), -1).float(),
        )

    return Subject("gfloat", cast=cast, columns=32)
