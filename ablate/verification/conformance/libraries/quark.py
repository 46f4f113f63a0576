"""AMD Quark for PyTorch: `fake_quantize_mx`, its emulation of MX hardware, compiled at first use."""

from torch import Tensor

from ablate.verification.conformance.subject import Subject

FORMATS = {"mxfp4": "fp4", "mxfp8": "fp8_e4m3"}


def subject(recipe: str) -> Subject:
    """Return `fake_quantize_mx` with its default scale_calculation_mode, "even".

    That rule rounds amax to the element's mantissa bits before it takes the power of two: up from a mantissa
    of 1.75 for E2M1, and of 1.9375 for E4M3.
    """
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    def cast(x: Tensor) -> Tensor:
        return fake_quantize_mx(x, -1, 32, mx_element_dtype=FORMATS[recipe])

    return Subject("quark", cast=cast, columns=32)
