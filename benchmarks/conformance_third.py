"""Third set of conformance_mutants.py: published faults and controls, to test the kit again.

The set was chosen from public reports and written down before the kit was run on it, without reading the kit
or what it says of the first two sets. None of its faults is one of theirs.
"""

from dataclasses import replace

import numpy
import torch
from conformance_subjects import (
    ALL,
    E8M0,
    GRADIENT,
    MXFP4,
    MXFP8,
    NVFP4,
    ROTATION,
    SQUARE,
    Control,
    Layer,
    Mutant,
    layer_data,
    normal,
    reference,
    spread,
    stepwise,
    with_zeros,
)
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.hadamard import signs
from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.product import product
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.rounding import nearest, stochastic
from ablate.numerics.scaling import block_scales, element_scales
from ablate.numerics.spec import Quant
from ablate.verification.conformance.subject import Quantised, Subject

# --- casts ----------------------------------------------------------------------------------------


def dropped_nan() -> Subject:
    """Reduce the amax of bf16 blocks with a maximum that ignores NaN: the other elements give the scale."""

    def cast(x: Tensor) -> Quantised:
        if x.dtype != torch.bfloat16:
            return reference(x, MXFP8)
        lost = x.isnan()
        made = reference(torch.where(lost, 0.0, x), MXFP8)
        assert made.values is not None
        assert made.codes is not None
        codes = torch.where(lost, 0x7F, made.codes.view(torch.uint8)).view(made.codes.dtype)
        return replace(made, values=torch.where(lost, torch.nan, made.values), codes=codes)

    return Subject("dropped_nan", cast=cast, columns=32)


def amax_through_bf16() -> Subject:
    """Round a block's fp32 amax to bf16 before its exponent is taken: 1.999 becomes 2."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        rounded = torch.where(largest.isnan(), largest, largest.to(torch.bfloat16).float())
        return block_scales(rounded, S, quant)

    return Subject("amax_through_bf16", cast=lambda x: stepwise(x, MXFP4, blocks=blocks), columns=32)


def early_saturation() -> Subject:
    """Encode E4M3 elements of 256 and more, whose exponent field is the last one, as 448."""

    def rounded(scaled: Tensor, grid: object) -> Tensor:
        top = torch.full_like(scaled, 448).copysign(scaled)
        return nearest(torch.where(scaled.abs() >= 256, top, scaled), ELEMENTS["e4m3"])

    return Subject("early_saturation", cast=lambda x: stepwise(x, MXFP8, rounded=rounded), columns=32)


def subnormal_scale() -> Subject:
    """Decode stored subnormal scales as normal numbers when elements are divided by them."""

    def factor(s: Tensor, S: Tensor, exact: Tensor) -> Tensor:
        mantissa = s * 2.0**9
        decoded = torch.where((s > 0) & (s < 2.0**-6), (1 + mantissa / 8) * 2.0**-7, s)
        return element_scales(decoded, S)

    return Subject("subnormal_scale", cast=lambda x: stepwise(x, factor=factor))


def amax_of_first_tile() -> Subject:
    """Take the outer amax of the first 8192 elements only."""
    return Subject(
        "amax_of_first_tile",
        cast=lambda x: stepwise(x, amax=lambda tiles: tiles.flatten()[:8192].abs().amax()),
    )


def uncleared_byte() -> Subject:
    """Pack codes in a variable that is not cleared: every second byte keeps the bits of the first."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.codes is not None
        codes = made.codes.clone()
        codes[:, 1::2] |= codes[:, 0::2]
        return replace(made, values=None, codes=codes)

    return Subject("uncleared_byte", cast=cast)


def rows_of_four() -> Subject:
    """Store the scales of every four rows column by column, where row by row is expected."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.scales is not None
        stored = made.scales.view(torch.uint8)
        turned = stored.view(len(stored) // 4, 4, stored.shape[1]).transpose(1, 2).reshape(stored.shape)
        return replace(made, values=None, scales=turned.view(made.scales.dtype))

    return Subject("rows_of_four", cast=cast, rows=4)


def inverted_outer() -> Subject:
    """Return the given outer factor as a divisor, 2688/amax, which is not inverted again."""

    def cast_given(x: Tensor, amax: Tensor) -> Quantised:
        made = stepwise(x, amax=lambda tiles: amax.float())
        return made if made.outer is None else replace(made, values=None, outer=1 / made.outer, amax=None)

    return Subject("inverted_outer", cast_given=cast_given)


# --- rounding and rotation ------------------------------------------------------------------------


def repeated_bits() -> Subject:
    """Draw the random bits of 16 rows, and use them for every 16 rows."""

    def cast_stochastic(x: Tensor, seed: int) -> Quantised:
        drawn = random_bits(Clock(seed), 0, 16, x.shape[1], 8, x.device)
        drawn = drawn[torch.arange(x.shape[0]) % 16].view(x.shape[0], 1, x.shape[1] // 16, 16)

        def rounded(scaled: Tensor, grid: object) -> Tensor:
            return stochastic(scaled, ELEMENTS["e2m1"], drawn, 8)

        return stepwise(x, rounded=rounded)

    return Subject("repeated_bits", cast_stochastic=cast_stochastic)


def overwritten() -> Subject:
    """Round stochastically, and then overwrite the result with that of rounding to nearest."""
    return Subject("overwritten", cast_stochastic=lambda x, seed: reference(x))


def rounded_stages() -> Subject:
    """Round the sums and differences of every stage of a rotation to the dtype of the data."""

    def turn(x: Tensor) -> Tensor:
        z = x.float().contiguous().view(-1, 16) * signs(ROTATION, x.device)
        for distance in (1, 2, 4, 8):
            pairs = z.view(-1, 8 // distance, 2, distance)
            first, second = pairs[:, :, 0], pairs[:, :, 1]
            z = torch.stack((first + second, first - second), 2).to(x.dtype).float().view(-1, 16)
        return (z / 4).to(x.dtype).view(x.shape)

    return Subject("rounded_stages", rotate=turn)


# --- products -------------------------------------------------------------------------------------


def dropped_tail() -> Subject:
    """Leave out the last contraction % 256 elements if the number of whole tiles is a multiple of 4."""

    def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
        depth = a.values.shape[1]
        tiles = depth // 256
        if tiles and tiles % 4 == 0:
            a, b = (replace(z, values=z.values[:, : tiles * 256]) for z in (a, b))
        return product(a, b, out)

    return Subject("dropped_tail", product=Layer(multiply).product)


def one_rotated() -> Subject:
    """Rotate dy, but not x, in the product that gives dw."""
    layer = Layer()

    def faulty(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, dx, _ = layer.product(x, w, dy)
        clock = Clock(0, micro_batch=layer.calls)
        turned = quantize(dy.t(), GRADIENT, rotation=ROTATION, clock=clock, where=2)
        return y, dx, product(turned, quantize(x.t(), NVFP4), x.dtype)

    return Subject("one_rotated", product=faulty)


def past_the_group() -> Subject:
    """Contract dw of an expert over whole tiles of 64 tokens, the last of which holds the next expert's."""

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        operands: list[tuple[Operand, Operand]] = []

        def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
            operands.append((a, b))
            return product(a, b, out)

        layer.multiply = multiply
        y, dx, dw = layer.grouped(x, w, dy, offsets)
        pairs = operands[2::3]
        sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        for number, expert in enumerate(e for e, size in enumerate(sizes) if size):
            read = -(-sizes[expert] // 64) * 64
            a, b = (
                replace(own, values=torch.cat([pair[side].values for pair in pairs[number:]], 1)[:, :read])
                for side, own in enumerate(pairs[number])
            )
            dw[expert] = product(a, b, x.dtype)
        return y, dx, dw

    layer = Layer()
    return Subject("past_the_group", grouped=grouped)


def scale_left_out() -> Subject:
    """Multiply y of experts by the outer factor of w alone, without that of x."""
    layer = Layer()

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, dx, dw = layer.grouped(x, w, dy, offsets)
        first = 0
        for expert, last in enumerate(offsets.tolist()):
            if last > first:
                own = quantize(x[first:last], NVFP4)
                assert own.amax is not None
                without = replace(own, amax=torch.full_like(own.amax, own.divisor))
                y[first:last] = product(without, quantize(w[expert], SQUARE), x.dtype)
            first = last
        return y, dx, dw

    return Subject("scale_left_out", grouped=grouped)


# --- controls -------------------------------------------------------------------------------------


def in_thresholds() -> Subject:
    """Compute MXFP4 by exponents and by counting the thresholds passed; a code a byte."""
    even = torch.tensor([0.75, 1.75, 3.5], dtype=torch.float64)
    odd = torch.tensor([0.25, 1.25, 2.5, 5.0], dtype=torch.float64)

    def cast(x: Tensor) -> Quantised:
        tiles = x.double().reshape(x.shape[0], x.shape[1] // 32, 32)
        largest = tiles.abs().amax(2)
        power = torch.frexp(largest.nan_to_num(0.0, 2.0**200)).exponent - 3
        power = torch.where(largest == 0, -127, power.clamp(-127, 127))
        scales = torch.where(largest.isnan(), 255, power + 127).to(torch.uint8)
        scaled = torch.ldexp(tiles, -power.unsqueeze(2)).abs().unsqueeze(3)
        count = (scaled >= even).sum(3) + (scaled > odd).sum(3)
        codes = torch.where(largest.isnan().unsqueeze(2), 7, count + 8 * tiles.signbit())
        codes = codes.to(torch.uint8).view(x.shape)
        return Quantised(codes=codes, scales=scales.view(E8M0))

    return Subject("in_thresholds", cast=cast, columns=32)


def by_rows() -> Subject:
    """Return the outer factor once a row, codes a byte each, and tensors that are not contiguous."""

    def laid_out(made: Quantised, rows: int) -> Quantised:
        assert made.codes is not None
        assert made.scales is not None
        assert made.outer is not None
        codes = torch.stack((made.codes & 15, made.codes >> 4), 2).flatten(1).t().contiguous().t()
        scales = made.scales.float().t().contiguous().t()
        return Quantised(None, codes, scales, made.outer.expand(rows, 1))

    return Subject(
        "by_rows",
        cast=lambda x: laid_out(reference(x.t().contiguous().t()), len(x)),
        cast_given=lambda x, amax: laid_out(stepwise(x, amax=lambda tiles: amax.float()), len(x)),
    )


def in_padded_experts() -> Subject:
    """Draw 16 bits with numpy; pad the tokens of each expert with zeros to a multiple of 16."""

    def cast_stochastic(x: Tensor, seed: int) -> Quantised:
        drawn = numpy.random.default_rng(seed).integers(0, 2**16, tuple(x.shape))
        bits = torch.from_numpy(drawn).float().view(x.shape[0], 1, x.shape[1] // 16, 16)
        return stepwise(x, rounded=lambda scaled, grid: stochastic(scaled, ELEMENTS["e2m1"], bits, 16))

    layer = Layer()

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, dx, dw = x.new_empty(len(x), w.shape[1]), torch.empty_like(x), torch.empty_like(w)
        y[offsets[-1] :], dx[offsets[-1] :] = 0, 0
        first = 0
        for expert, last in enumerate(offsets.tolist()):
            if last == first:
                dw[expert] = 0
                continue
            size = last - first
            padded = (torch.nn.functional.pad(z[first:last], (0, 0, 0, -size % 16)) for z in (x, dy))
            tokens, gradients = padded
            own = layer.product(tokens, w[expert], gradients)
            y[first:last], dx[first:last], dw[expert] = own[0][:size], own[1][:size], own[2]
            first = last
        return y, dx, dw

    return Subject("in_padded_experts", cast_stochastic=cast_stochastic, grouped=grouped)


# --- what they are --------------------------------------------------------------------------------


def with_nan() -> Tensor:
    """Return normal numbers of which one is NaN."""
    x = normal(16, 64)
    x[3, 20] = torch.nan
    return x


THIRD = {
    "dropped_nan": Mutant(
        "NVIDIA/TransformerEngine#3550",
        "The amax of a bf16 block was reduced with a maximum that ignores NaN, so a block with a NaN among"
        " finite numbers got a finite E8M0 scale, not code 255.",
        "NaN ignored by the amax of a block: finite scale for a block that holds a NaN",
        "mxfp8",
        dropped_nan,
        (with_nan(),),
        "bf16 blocks with a NaN",
        (normal(16, 64),),
    ),
    "amax_through_bf16": Mutant(
        "pytorch/ao#4725",
        "The fp32 amax of a block was rounded to bf16 before its exponent was taken, so an amax just below a"
        " power of two got twice the scale (reported of MXFP8 with the floor rule; here MXFP4).",
        "block amax rounded to bf16 first: scale twice as large just below a power of two",
        "mxfp4",
        amax_through_bf16,
        (normal(256, 256, dtype=torch.float32),),
        "fp32 blocks with an amax within 0.2 % below a power of two",
        (normal(64, 64),),
    ),
    "early_saturation": Mutant(
        "sgl-project/sglang#40581",
        "The software conversion to E4M3 saturated at the last exponent, from 256 on, not at 448: the largest"
        " elements of many groups became 448.",
        "E4M3 elements from 256 to 448 saturate to 448",
        "mxfp8",
        early_saturation,
        (normal(64, 64),),
        "any data",
    ),
    "subnormal_scale": Mutant(
        "flashinfer-ai/flashinfer#3932, local-inference-lab/b12x#388",
        "The quantiser decoded subnormal E4M3 block scales by the formula of normal ones, up to 4.5 times too"
        " large, while tensor cores decode the same byte correctly.",
        "elements divided by a wrongly decoded subnormal block scale: small blocks come out too small",
        "nvfp4",
        subnormal_scale,
        (spread(),),
        "blocks with an amax below 3.5e-5 of the tensor's",
        (normal(64, 64),),
    ),
    "amax_of_first_tile": Mutant(
        "AMD-AGI/Primus-Turbo#306",
        "A wrong index in a reduction of several rounds gave the amax of the first tile of 8192 elements as"
        " that of the tensor (reported of FP8; here NVFP4's outer amax).",
        "outer amax from the first 8192 elements only: larger elements elsewhere saturate",
        "nvfp4",
        amax_of_first_tile,
        (normal(128, 256),),
        "more than 8192 elements, with the largest beyond the first 8192",
        (normal(128, 64),),
    ),
    "uncleared_byte": Mutant(
        "bitsandbytes-foundation/bitsandbytes#1721",
        "The variable in which two codes are packed was not cleared between the bytes of a thread, so later"
        " bytes kept the bits of earlier ones (reported of blocks of more than 512).",
        "every second byte of codes is or-ed with the byte before it",
        "nvfp4",
        uncleared_byte,
        (normal(64, 64),),
        "any data",
    ),
    "rows_of_four": Mutant(
        "vllm-project/vllm#50084",
        "Block scales of the V cache were written in the swizzle of four tokens that one kernel wants, and"
        " read in linear order by another.",
        "scales of every four rows stored transposed (swizzled where a linear layout is read)",
        "nvfp4",
        rows_of_four,
        (normal(64, 64),),
        "any data",
    ),
    "inverted_outer": Mutant(
        "modular/modular#6600",
        "Global scales that a checkpoint stores as divisors were used as multipliers without inverting them.",
        "outer factor inverted (2688/amax in place of amax/2688)",
        "nvfp4",
        inverted_outer,
        (normal(64, 64), torch.tensor(8.0)),
        "any given amax but 2688",
        (normal(64, 64), torch.tensor(2688.0)),
    ),
    "repeated_bits": Mutant(
        "pytorch/helion#685, karpathy/llm.c#597",
        "Random numbers were drawn by the position in a tile, without the tile's own offset, so all tiles got"
        " the same ones.",
        "random bits repeat from tile to tile (every 16 rows): rounding errors of rows are correlated",
        "nvfp4",
        repeated_bits,
        (normal(64, 64), 1),
        "more than 16 rows",
        (normal(16, 64), 1),
    ),
    "overwritten": Mutant(
        "Nerogar/OneTrainer#994",
        "A plain copy, rounded to nearest, overwrote the stochastically rounded result (reported of bf16;"
        " here FP4).",
        "stochastic rounding has no effect: rounds to nearest, the same for every seed",
        "nvfp4",
        overwritten,
        (normal(64, 64), 1),
        "any data",
    ),
    "rounded_stages": Mutant(
        "tile-ai/tilelang-ascend#1513",
        "A Hadamard kernel rounded the sums of every butterfly stage to half precision; a later version keeps"
        " them in fp32.",
        "intermediate sums of the rotation rounded to bf16 (not computed in fp32)",
        "nvfp4",
        rounded_stages,
        (normal(64, 64),),
        "bf16",
        (normal(64, 64, dtype=torch.float32),),
    ),
    "dropped_tail": Mutant(
        "NVIDIA/cutlass#3536",
        "A block-scaled product left out the part of the contraction behind its last whole tile of 256 if the"
        " number of whole tiles is a multiple of its 4 stages (reported of a matrix times a vector).",
        "last columns of a long contraction left out of the product",
        "nvfp4",
        dropped_tail,
        layer_data(16, 1152),
        "contractions of 1024 to 1279 or 2048 to 2303, and so on, but not of whole tiles",
        layer_data(16, 1024),
    ),
    "one_rotated": Mutant(
        "ModelCloud/GPTQModel#2980",
        "Weights were stored rotated, but inference did not apply the same rotation to the input (here dy and"
        " x of dw).",
        "only one operand of dw is rotated",
        "nvfp4",
        one_rotated,
        layer_data(64, 64),
        "any data",
    ),
    "past_the_group": Mutant(
        "marin-community/marin#8339",
        "A grouped product for weight gradients read whole tiles of 64 tokens through one view of all groups:"
        " the last tile of a group held tokens of the next, and only the last expert's gradient was right.",
        "dw of an expert includes tokens of the next expert",
        "nvfp4",
        past_the_group,
        ALL,
        "experts whose number of tokens is not a multiple of 64",
        (normal(128, 64), ALL[1][:2], normal(128, 64, seed=2), torch.tensor([64, 128], dtype=torch.int32)),
    ),
    "scale_left_out": Mutant(
        "flashinfer-ai/flashinfer#3548",
        "The global scale of the activations never reached the product of the experts, whose output was too"
        " large by that factor.",
        "outer factor of x missing in y of experts (output too large by 2688/amax)",
        "nvfp4",
        scale_left_out,
        ALL,
        "any data with an amax other than 2688",
    ),
}
"""Faulty subjects. `amax_through_bf16`, `amax_of_first_tile`, `overwritten` and `one_rotated` carry over what
was reported of a neighbouring format or product."""
THIRD_CONTROLS = {
    "in_thresholds": Control(
        "mxfp4", in_thresholds, (normal(64, 64), spread(torch.float32), normal(64, 64, scale=2.0**-126))
    ),
    "by_rows": Control("nvfp4", by_rows, (normal(64, 64), spread(torch.float32), with_zeros())),
    "in_padded_experts": Control("nvfp4", in_padded_experts, (normal(16, 16),), own_draws=True),
}
"""Correct subjects, written otherwise."""
