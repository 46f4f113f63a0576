"""Intel Neural Compressor for PyTorch: `mx_quant`, which descends from Microsoft's microxcaling."""

from torch import Tensor

from ablate.verification.conformance.subject import Subject

FORMATS = {"mxfp4": "fp4", "mxfp8": "fp8_e4m3"}


def subject(recipe: str) -> Subject:
    """Return `quantize_mx_op` with rounding "even"; scales by OCP's floor rule."""
    from neural_compressor.torch.algorithms.mx_quant.utils import quantize_mx_op

    def cast(x: Tensor) -> Tensor:
        return quantize_mx_op(x, FORMATS[recipe], round="even", block_size=32, axes=-1)

    return Subject("neural_compressor", cast=cast, columns=32)
