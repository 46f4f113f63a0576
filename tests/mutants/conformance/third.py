"""Third set of mutants and controls: published faults, none of which is one of the first two sets."""

from dataclasses import replace

import numpy
import torch
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
from mutants.conformance.subjects import (
    ALL,
    E8M0,
    GRADIENT,
    MXFP4,
    MXFP8,
    NVFP4,
    ROTATION,
    SQUARE,
    Layer,
    MutantSet,
    layer_data,
    normal,
    reference,
    spread,
    stepwise,
    with_zeros,
)

THIRD = MutantSet()
mutant, control = THIRD.mutant, THIRD.control


def with_nan() -> Tensor:
    """Return normal numbers of which one is NaN."""
    x = normal(16, 64)
    x[3, 20] = torch.nan
    return x


@mutant("NVIDIA/TransformerEngine#3550", "mxfp8", (with_nan(),), hides=(normal(16, 64),))
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


@mutant("pytorch/ao#4725", "mxfp4", (normal(256, 256, dtype=torch.float32),), hides=(normal(64, 64),))
def amax_through_bf16() -> Subject:
    """Round a block's fp32 amax to bf16 before its exponent is taken: 1.999 becomes 2."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        rounded = torch.where(largest.isnan(), largest, largest.to(torch.bfloat16).float())
        return block_scales(rounded, S, quant)

    return Subject("amax_through_bf16", cast=lambda x: stepwise(x, MXFP4, blocks=blocks), columns=32)


@mutant("sgl-project/sglang#40581", "mxfp8", (normal(64, 64),))
def early_saturation() -> Subject:
    """Encode E4M3 elements of 256 and more, whose exponent field is the last one, as 448."""

    def rounded(scaled: Tensor, grid: object) -> Tensor:
        top = torch.full_like(scaled, 448).copysign(scaled)
        return nearest(torch.where(scaled.abs() >= 256, top, scaled), ELEMENTS["e4m3"])

    return Subject("early_saturation", cast=lambda x: stepwise(x, MXFP8, rounded=rounded), columns=32)


@mutant(
    "flashinfer-ai/flashinfer#3932, local-inference-lab/b12x#388",
    "nvfp4",
    (spread(),),
    hides=(normal(64, 64),),
)
def subnormal_scale() -> Subject:
    """Decode stored subnormal scales as normal numbers when elements are divided by them."""

    def factor(s: Tensor, S: Tensor, exact: Tensor) -> Tensor:
        mantissa = s * 2.0**9
        decoded = torch.where((s > 0) & (s < 2.0**-6), (1 + mantissa / 8) * 2.0**-7, s)
        return element_scales(decoded, S)

    return Subject("subnormal_scale", cast=lambda x: stepwise(x, factor=factor))


@mutant("AMD-AGI/Primus-Turbo#306", "nvfp4", (normal(128, 256),), hides=(normal(128, 64),))
def amax_of_first_tile() -> Subject:
    """Take the outer amax of the first 8192 elements only."""
    return Subject(
        "amax_of_first_tile",
        cast=lambda x: stepwise(x, amax=lambda tiles: tiles.flatten()[:8192].abs().amax()),
    )


@mutant("bitsandbytes-foundation/bitsandbytes#1721", "nvfp4", (normal(64, 64),))
def uncleared_byte() -> Subject:
    """Pack codes in a variable that is not cleared: every second byte keeps the bits of the first."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.codes is not None
        codes = made.codes.clone()
        codes[:, 1::2] |= codes[:, 0::2]
        return replace(made, values=None, codes=codes)

    return Subject("uncleared_byte", cast=cast)


@mutant("vllm-project/vllm#50084", "nvfp4", (normal(64, 64),))
def rows_of_four() -> Subject:
    """Store the scales of every four rows column by column, where row by row is expected."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.scales is not None
        stored = made.scales.view(torch.uint8)
        turned = stored.view(len(stored) // 4, 4, stored.shape[1]).transpose(1, 2).reshape(stored.shape)
        return replace(made, values=None, scales=turned.view(made.scales.dtype))

    return Subject("rows_of_four", cast=cast, rows=4)


@mutant(
    "modular/modular#6600",
    "nvfp4",
    (normal(64, 64), torch.tensor(8.0)),
    hides=(normal(64, 64), torch.tensor(2688.0)),
)
def inverted_outer() -> Subject:
    """Return the given outer factor as a divisor, 2688/amax, which is not inverted again."""

    def cast_given(x: Tensor, amax: Tensor) -> Quantised:
        made = stepwise(x, amax=lambda tiles: amax.float())
        return made if made.outer is None else replace(made, values=None, outer=1 / made.outer, amax=None)

    return Subject("inverted_outer", cast_given=cast_given)


@mutant("pytorch/helion#685, karpathy/llm.c#597", "nvfp4", (normal(64, 64), 1), hides=(normal(16, 64), 1))
def repeated_bits() -> Subject:
    """Draw the random bits of 16 rows, and use them for every 16 rows."""

    def cast_stochastic(x: Tensor, seed: int) -> Quantised:
        drawn = random_bits(Clock(seed), 0, 16, x.shape[1], 8, x.device)
        drawn = drawn[torch.arange(x.shape[0]) % 16].view(x.shape[0], 1, x.shape[1] // 16, 16)

        def rounded(scaled: Tensor, grid: object) -> Tensor:
            return stochastic(scaled, ELEMENTS["e2m1"], drawn, 8)

        return stepwise(x, rounded=rounded)

    return Subject("repeated_bits", cast_stochastic=cast_stochastic)


@mutant("Nerogar/OneTrainer#994", "nvfp4", (normal(64, 64), 1))
def overwritten() -> Subject:
    """Round stochastically, and then overwrite the result with that of rounding to nearest."""
    return Subject("overwritten", cast_stochastic=lambda x, seed: reference(x))


@mutant(
    "tile-ai/tilelang-ascend#1513", "nvfp4", (normal(64, 64),), hides=(normal(64, 64, dtype=torch.float32),)
)
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


@mutant("NVIDIA/cutlass#3536", "nvfp4", layer_data(16, 1152), hides=layer_data(16, 1024))
def dropped_tail() -> Subject:
    """Leave out the last contraction % 256 elements if the number of whole tiles is a multiple of 4."""

    def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
        depth = a.values.shape[1]
        tiles = depth // 256
        if tiles and tiles % 4 == 0:
            a, b = (replace(z, values=z.values[:, : tiles * 256]) for z in (a, b))
        return product(a, b, out)

    return Subject("dropped_tail", product=Layer(multiply).product)


@mutant("ModelCloud/GPTQModel#2980", "nvfp4", layer_data(64, 64))
def one_rotated() -> Subject:
    """Rotate dy, but not x, in the product that gives dw."""
    layer = Layer()

    def faulty(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, dx, _ = layer.product(x, w, dy)
        clock = Clock(0, micro_batch=layer.calls)
        turned = quantize(dy.t(), GRADIENT, rotation=ROTATION, clock=clock, where=2)
        return y, dx, product(turned, quantize(x.t(), NVFP4), x.dtype)

    return Subject("one_rotated", product=faulty)


@mutant(
    "marin-community/marin#8339",
    "nvfp4",
    ALL,
    hides=(normal(128, 64), ALL[1][:2], normal(128, 64, seed=2), torch.tensor([64, 128], dtype=torch.int32)),
)
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


@mutant("flashinfer-ai/flashinfer#3548", "nvfp4", ALL)
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


@control("mxfp4", normal(64, 64), spread(torch.float32), normal(64, 64, scale=2.0**-126))
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


@control("nvfp4", normal(64, 64), spread(torch.float32), with_zeros())
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


@control("nvfp4", normal(16, 16), own_draws=True)
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
