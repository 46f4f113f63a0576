"""gguf, llama.cpp's file format: its NumPy quantiser of MXFP4. Its NVFP4 reads only."""

import numpy as np
import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `quantize` and `dequantize` of the type MXFP4; scales by OCP's floor rule.

    A block is 17 bytes: the E8M0 byte, then the codes, whose order within a block is llama.cpp's own.
    """
    from gguf import GGMLQuantizationType, quants

    assert recipe == "mxfp4"

    def cast(x: Tensor) -> Quantised:
        q = quants.quantize(x.float().numpy(), GGMLQuantizationType.MXFP4)
        scales = np.ascontiguousarray(q.reshape(len(x), -1, 17)[:, :, 0])
        return Quantised(
            values=torch.from_numpy(quants.dequantize(q, GGMLQuantizationType.MXFP4)),
            scales=torch.from_numpy(scales),
        )

    return Subject("gguf", cast=cast, columns=32)
