"""Qwix, Google's quantisation library for JAX: `quantize` and `dequantize` of arrays."""

import numpy as np
import torch
from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `quantize` of blocks along the columns, with the type of the recipe's name.

    It has no tensor scale: NVFP4 here is E2M1 with E4M3 scales of amax / 6; MX rounds scales up. Scales are
    computed and returned in the dtype of x.
    """
    import jax.numpy as jnp
    import qwix

    length = 16 if recipe == "nvfp4" else 32

    def cast(x: Tensor) -> Quantised:
        dtype = jnp.bfloat16 if x.dtype == torch.bfloat16 else jnp.float32
        array = jnp.asarray(x.float().numpy(), dtype=dtype)
        q = qwix.quantize(array, recipe, channelwise_axes=(0,), tiled_axes={1: length})
        values = np.asarray(qwix.dequantize(q).astype(jnp.float32))
        scales = np.asarray(q.scale.astype(jnp.float32))
        codes = np.asarray(q.qvalue.astype(jnp.float32))
        return Quantised(
            values=torch.from_numpy(values.copy()).to(x.dtype),
            codes=torch.from_numpy(codes.copy()),
            scales=torch.from_numpy(scales.copy()),
        )

    return Subject("qwix", cast=cast, columns=length)
