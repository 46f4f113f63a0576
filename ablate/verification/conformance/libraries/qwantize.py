"""qwantize: block scales of least error; examined are its baselines without a search."""

from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `nvfp4_naive` or `mxfp4_naive` of the blocks of a matrix.

    It has no tensor scale: NVFP4 here is E2M1 with E4M3 scales of amax / 6.
    """
    import qwantize

    function = {"nvfp4": qwantize.nvfp4_naive, "mxfp4": qwantize.mxfp4_naive}[recipe]
    length = 16 if recipe == "nvfp4" else 32

    def cast(x: Tensor) -> Quantised:
        scales, codes, values = function(x.reshape(len(x), -1, length), return_dequant=True)
        return Quantised(values=values.reshape(x.shape), codes=codes.reshape(x.shape), scales=scales)

    return Subject("qwantize", cast=cast, columns=length)
