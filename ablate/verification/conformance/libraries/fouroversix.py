"""Four Over Six of its authors, with the PyTorch back end: its reference, which needs no GPU."""

from torch import Tensor

from ablate.training.models import drawn
from ablate.verification.conformance.subject import Quantised, Subject

RULES = {"nvfp4": "static_6", "mxfp4": "static_6", "four_over_six": "mse"}
BOUNDS = {"nvfp4": 6.0 * 448, "four_over_six": 6.0 * 256}


def subject(recipe: str) -> Subject:
    """Return `quantize_to_fp4` of the reference, without padding and swizzle.

    The stochastic cast draws from torch's generator, which is seeded around it. MXFP4 rounds scales up.
    """
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import DataType, RoundStyle, ScaleRule

    kind = DataType("mxfp4" if recipe == "mxfp4" else "nvfp4")
    rule = ScaleRule(RULES[recipe])

    def quantised(
        x: Tensor,
        amax: Tensor | None = None,
        square: bool = False,
        style: str = "nearest",
        rule: ScaleRule = rule,
    ) -> Quantised:
        codes, scales, amax = quantize_to_fp4(
            x,
            amax,
            fp4_format=kind,
            scale_rule=rule,
            round_style=RoundStyle(style),
            block_scale_2d=square,
            use_blackwell_scale_layout=False,
        )
        scales = scales.view(len(x), -1)
        if recipe == "mxfp4":
            return Quantised(codes=codes, scales=scales)
        return Quantised(codes=codes, scales=scales, outer=amax / BOUNDS[recipe], amax=amax)

    def stochastic(x: Tensor, seed: int) -> Quantised:
        with drawn(seed):
            return quantised(x, style="stochastic", rule=ScaleRule("static_6"))

    if recipe == "mxfp4":
        return Subject("fouroversix", cast=quantised, columns=32)
    if recipe == "four_over_six":
        return Subject("fouroversix", cast=quantised, cast_given=quantised)
    return Subject(
        "fouroversix",
        cast=quantised,
        cast_given=quantised,
        cast_square=lambda x: quantised(x, square=True),
        cast_stochastic=stochastic,
        rows=16,
    )
