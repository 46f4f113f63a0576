"""Brevitas, AMD's library for quantisation-aware training: its OCP MX quantisers of activations."""

from torch import Tensor

from ablate.verification.conformance.subject import Quantised, Subject


def subject(recipe: str) -> Subject:
    """Return `QuantIdentity` with `MXFloat8e4m3Act`, or with a subclass of it for E2M1.

    Its examples make such subclasses. Scales follow OCP's floor rule.
    """
    import brevitas.nn
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act

    class MXFloat4e2m1Act(MXFloat8e4m3Act):
        bit_width = 4
        exponent_bit_width = 2
        mantissa_bit_width = 1

    quantiser = MXFloat8e4m3Act if recipe == "mxfp8" else MXFloat4e2m1Act
    module = brevitas.nn.QuantIdentity(quantiser, group_dim=-1, return_quant_tensor=True).eval()

    def cast(x: Tensor) -> Quantised:
        result = module(x)
        return Quantised(values=result.value.detach(), scales=result.scale.detach()[:, ::32].float())

    return Subject("brevitas", cast=cast, columns=32)
