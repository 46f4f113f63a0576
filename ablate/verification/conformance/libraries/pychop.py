"""Pychop, a simulator of low-precision arithmetic: its OCP MX formats, with the PyTorch back end."""

from torch import Tensor

from ablate.verification.conformance.subject import Subject

FORMATS = {"mxfp4": "mxfp4_e2m1", "mxfp8": "mxfp8_e4m3"}


def subject(recipe: str) -> Subject:
    """Return `mx_quantize`; scales by OCP's floor rule."""
    import pychop

    def cast(x: Tensor) -> Tensor:
        return pychop.mx_quantize(x, format=FORMATS[recipe], backend="torch")

    return Subject("pychop", cast=cast, columns=32, dtypes=("float32",))
