"""Demonstration: a published fault of a mixture-of-experts layer, injected, seen and named on a laptop."""

from dataclasses import replace

import torch
from torch import Tensor

from ablate.numerics.product import product
from ablate.recipes import PRESETS
from ablate.verification.conformance.emulator import emulator
from ablate.verification.conformance.product_faults import packed_scales
from ablate.verification.conformance.reference_product import operands
from ablate.verification.conformance.subject import Subject

RECIPE = "nvfp4"
PROPERTIES = ("grouped_forward", "grouped_input_gradient", "grouped_weight_gradient")
STORY = """\
A mixture-of-experts layer in NVFP4: 3 experts, 256 output features. Its
backward pass reads one scale for every 16 tokens. Here the scales are laid out
over all tokens, and each expert reads its share as if it were its own.

torchao had this fault (pytorch/ao b3c77e59a): every expert's weight gradient
was 12 % too small, a published loss curve was wrong, and two tests passed: one
made the same mistake in its reference, the other allowed 5 dB of noise.
In this smaller layer it is 16 %.
"""


def faulty() -> Subject:
    """Return the emulator's layer of experts with columnwise scales blocked over the packed tokens."""
    recipe = PRESETS[RECIPE]()
    right = emulator(recipe)

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert right.grouped is not None
        y, dx, dw = right.grouped(x, w, dy, offsets)
        sizes = torch.diff(offsets, prepend=offsets.new_zeros(1)).tolist()
        parts = zip(x.split(sizes), w, dy.split(sizes), strict=True)
        made = [operands(recipe, *one) for one in parts]
        columnwise = (packed_scales([getattr(one, name) for one in made]) for name in ("gt", "xt"))
        for expert, (a, b) in enumerate(zip(*columnwise, strict=True)):
            a, b = (replace(one, values=one.values.bfloat16()) for one in (a, b))
            dw[expert] = product(a, b, dw.dtype)
        return y, dx, dw

    return Subject("a layer of experts", grouped=grouped)
