"""Demonstration: a published fault of a mixture-of-experts layer, injected and seen on a laptop."""

from dataclasses import replace

import torch
from torch import Tensor

from ablate.numerics.product import product
from ablate.numerics.quantize import Operand
from ablate.numerics.stored import swizzle, unswizzle
from ablate.recipes import PRESETS
from ablate.verification.conformance.emulator import emulator
from ablate.verification.conformance.reference_product import PAIRS, operands
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
        columnwise = (packed_scales([one[slot] for one in made]) for slot in PAIRS["dw"])
        for expert, (a, b) in enumerate(zip(*columnwise, strict=True)):
            a, b = (replace(one, values=one.values.bfloat16()) for one in (a, b))
            dw[expert] = product(a, b, dw.dtype)
        return y, dx, dw

    return Subject("a layer of experts", grouped=grouped)


def packed_scales(made: list[Operand]) -> list[Operand]:
    """Return operands [rows, tokens of the expert], with E4M3 scales in blocks of one row, whose scales were
    laid out over all experts' tokens, and read as each expert's own."""
    scales = [operand.block_scale[:, 0, :, 0] for operand in made if operand.block_scale is not None]
    if len(scales) != len(made) or any(scale.shape[1] % 4 for scale in scales):
        return made
    rows = len(scales[0])
    flat, start, read = swizzle(torch.cat(scales, dim=1).to(torch.float8_e4m3fn)), 0, []
    for operand, scale in zip(made, scales, strict=True):
        size = (rows + -rows % 128) * scale.shape[1]
        other = unswizzle(flat[start : start + size], *scale.shape).float()
        start += size
        length = operand.values.shape[1] // max(1, scale.shape[1])
        spread, swapped = (z.repeat_interleave(length, dim=1) for z in (scale, other))
        codes = torch.where(spread == 0, operand.values.float(), operand.values.float() / spread)
        read.append(replace(operand, values=codes * swapped))
    return read
