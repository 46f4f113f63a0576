"""First set of mutants and controls: published faults of FP4 and MX libraries, rebuilt on the reference."""

import math
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.hadamard import rotate, signs
from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.product import alpha, product
from ablate.numerics.quantize import Operand
from ablate.numerics.rounding import away, nearest
from ablate.numerics.scaling import block_scales, element_scales, encode_scale
from ablate.numerics.spec import Quant
from ablate.numerics.stored import swizzle, unpack
from ablate.verification.conformance.subject import Quantised, Subject
from mutants.conformance.subjects import (
    ALL,
    E4M3,
    GRADIENT,
    MXFP4,
    MXFP8,
    NVFP4,
    ONE_IDLE,
    ROTATION,
    SQUARE,
    Layer,
    MutantSet,
    layer_data,
    normal,
    over_six,
    reference,
    skewed,
    spread,
    stepwise,
    with_zeros,
)

FIRST = MutantSet()
mutant, control = FIRST.mutant, FIRST.control


@mutant("vllm-project/compressed-tensors#824", "nvfp4", (normal(256, 256, dtype=torch.float32),))
def through_bf16() -> Subject:
    """Round scaled elements to bf16 before E2M1: 2.500004 becomes 2.5, a tie, and then 2."""
    return Subject(
        "through_bf16",
        cast=lambda x: stepwise(x, rounded=lambda y, grid: nearest(y.to(torch.bfloat16).float(), grid)),
    )


@mutant("vllm-project/vllm#49092", "nvfp4", (normal(64, 128)[:, 32:96],), hides=(normal(64, 64),))
def linear_view() -> Subject:
    """Read the buffer of a strided view from its first element on, as if it were contiguous."""

    def cast(x: Tensor) -> Quantised:
        rows, columns = x.shape
        held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return reference(x.as_strided((rows, columns), (columns, 1)) if held >= x.numel() else x)

    return Subject("linear_view", cast=cast)


@mutant("NVIDIA/Model-Optimizer#1397", "nvfp4", (with_zeros(),), hides=(normal(16, 64),))
def zero_block_nan() -> Subject:
    """Give a zero block the scale 1 before the outer factor, and cast to E4M3 without saturation."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        empty = torch.where(S > 464, torch.nan, nearest(S.clone(), SCALES["e4m3"]))
        return torch.where(largest == 0, empty, block_scales(largest, S, quant))

    def rounded(scaled: Tensor, grid: object) -> Tensor:
        return nearest(scaled.nan_to_num(0.0), ELEMENTS["e2m1"])  # FP4 has no NaN

    return Subject("zero_block_nan", cast=lambda x: stepwise(x, blocks=blocks, rounded=rounded))


@mutant("NVIDIA/Model-Optimizer#2243", "nvfp4", (normal(64, 64),))
def unrounded_scale() -> Subject:
    """Divide elements by the fp32 block scale, and store the one rounded to E4M3."""
    return Subject(
        "unrounded_scale", cast=lambda x: stepwise(x, factor=lambda s, S, exact: element_scales(exact, S))
    )


@mutant("pytorch/ao#2604", "nvfp4", (normal(64, 64, scale=1e-4),), hides=(normal(64, 64, scale=100.0),))
def clamped_outer() -> Subject:
    """Clamp the outer decode scale to [2^-6, 448], the range of normal E4M3 numbers."""

    def cast(x: Tensor) -> Quantised:
        amax = x.abs().amax().float()
        outer = (amax / 2688).clamp(2.0**-6, 448)
        clamped = outer != amax / 2688
        made = stepwise(x, encoded=lambda a, quant: torch.where(clamped, 1 / outer, encode_scale(a, quant)))
        if not clamped:
            return made
        assert made.codes is not None
        assert made.scales is not None
        decode = made.scales.float().repeat_interleave(16, 1) * outer
        return replace(made, values=unpack(made.codes) * decode, outer=outer)

    return Subject("clamped_outer", cast=cast)


@mutant("vllm-project/vllm#20578", "nvfp4", (skewed(),), hides=(-skewed(),))
def signed_amax() -> Subject:
    """Take the outer statistic of weights as the largest value, not the largest magnitude."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        return nearest(largest * (S * torch.full_like(S, 1 / 6)), SCALES["e4m3"])

    def encoded(amax: Tensor, quant: Quant) -> Tensor:
        return torch.where(amax == 0, 1.0, 2688 / amax)

    return Subject(
        "signed_amax",
        cast_square=lambda x: stepwise(
            x, SQUARE, amax=lambda tiles: tiles.amax(), encoded=encoded, blocks=blocks
        ),
        rows=16,
    )


@mutant("ROCm/aiter#3992", "mxfp4", (normal(64, 64),))
def ties_away() -> Subject:
    """Round ties of E2M1 away from zero: 0.25, 1.25, 2.5 and 5 go up."""
    return Subject("ties_away", cast=lambda x: stepwise(x, MXFP4, rounded=away), columns=32)


@mutant(
    "NVIDIA/TransformerEngine#3262",
    "mxfp8",
    (normal(32, 64, dtype=torch.float32, scale=2.0**-122),),
    hides=(normal(32, 64),),
)
def lost_smallest_scale() -> Subject:
    """Expand E8M0 code 0 by a shift into the exponent field, which gives 0 in place of 2^-127."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x, MXFP8)
        assert made.values is not None
        assert made.scales is not None
        smallest = (made.scales.view(torch.uint8) == 0).repeat_interleave(32, 1)
        return replace(made, values=torch.where(smallest, 0.0, made.values))

    return Subject("lost_smallest_scale", cast=cast, columns=32)


@mutant(
    "radixark/miles#1261, flashinfer-ai/flashinfer#3448",
    "four_over_six",
    (normal(512, 512, seed=1, scale=0.02),),
    hides=(normal(16, 32),),
)
def error_by_decode_scale() -> Subject:
    """Score Four Over Six's candidates with code*s*(1/S), not with code*s*amax/1536."""
    return Subject("error_by_decode_scale", cast=lambda x: over_six(x, lambda q, amax, S: q * (1 / S)))


@mutant("AMD-AGI/Primus-Turbo#365", "nvfp4", (normal(64, 64), 1), hides=(normal(64, 64), 0))
def dropped_seed() -> Subject:
    """Draw with the seed 0 at every call."""
    return Subject("dropped_seed", cast_stochastic=lambda x, seed: reference(x, GRADIENT, 0))


@mutant("uxlfoundation/oneDNN#2903", "nvfp4", (normal(64, 64), 1))
def low_bits() -> Subject:
    """Add the random bits four places too low: only positions above 15/16 can round up."""

    def cast_stochastic(x: Tensor, seed: int) -> Quantised:
        drawn = random_bits(Clock(seed), 0, x.shape[0], x.shape[1], 8, x.device)
        drawn = drawn.view(x.shape[0], 1, -1, 16)

        def rounded(scaled: Tensor, grid: object) -> Tensor:
            magnitude = scaled.abs().clamp(max=6)
            step = ELEMENTS["e2m1"].step(magnitude)
            whole = magnitude / step
            up = (whole - whole.floor()) * 256 + drawn / 16 >= 256
            return ((whole.floor() + up) * step).copysign(scaled)

        return stepwise(x, rounded=rounded)

    return Subject("low_bits", cast_stochastic=cast_stochastic)


@mutant("NVIDIA/TransformerEngine#3485", "nvfp4", (normal(256, 128),), hides=(normal(128, 256),))
def tiles_by_columns() -> Subject:
    """Store the 128x4 tiles of scales column by column, not row by row."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.scales is not None
        flat = swizzle(made.scales)
        shape = (-(-made.scales.shape[0] // 128), -(-made.scales.shape[1] // 4), 512)
        tiles = flat.view(torch.uint8).view(shape).transpose(0, 1)
        return replace(made, values=None, scales=tiles.reshape(-1).view(E4M3))

    return Subject("tiles_by_columns", cast=cast, swizzled=True)


@mutant("vllm-project/vllm#57014", "nvfp4", (normal(8195, 16),), hides=(normal(8192, 16),))
def stale_tail() -> Subject:
    """Return earlier rows in the last rows of a large tensor, if their number modulo 8 is 1 to 4."""

    def turn(x: Tensor) -> Tensor:
        turned = rotate(x, ROTATION)
        tail = len(x) % 8
        if len(x) > 8192 and 1 <= tail <= 4:
            turned[-tail:] = turned[-8 - tail : -8]
        return turned

    return Subject("stale_tail", rotate=turn)


@mutant("modular/modular#7165", "nvfp4", layer_data(64, 512), hides=layer_data(64, 128))
def split_sums() -> Subject:
    """Add the partial sums of a long contraction in the dtype of the result."""

    def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
        depth = a.values.shape[1]
        tiles = -(-a.values.shape[0] // 128) * -(-b.values.shape[0] // 128)
        parts = min(4, depth // 128) if tiles < 8 else 1
        if parts < 2:
            return product(a, b, out)
        length = math.ceil(depth / parts / 16) * 16
        sums = []
        for start in range(0, depth, length):
            one, other = (replace(z, values=z.values[:, start : start + length]) for z in (a, b))
            sums.append(product(one, other, torch.float32).to(torch.bfloat16))
        total = sums[0]
        for part in sums[1:]:
            total = total + part
        return total.to(out)

    return Subject("split_sums", product=Layer(multiply).product)


@mutant("meta-pytorch/MSLK#158, pytorch/pytorch#172439", "nvfp4", ONE_IDLE, hides=ALL, before=ALL)
def stale_gradient() -> Subject:
    """Leave dw of an expert without tokens as the memory was, which holds an earlier call's gradients."""
    layer, memory = Layer(), {}

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dw = memory.setdefault((w.shape, w.dtype), torch.zeros_like(w))
        y, dx, _ = layer.grouped(x, w, dy, offsets, dw)
        return y, dx, dw.clone()

    return Subject("stale_gradient", grouped=grouped)


@control("nvfp4", normal(64, 64), normal(64, 64, dtype=torch.float32), spread())
def in_numpy() -> Subject:
    """Compute NVFP4 with numpy from the specification alone; values only."""
    magnitudes = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], numpy.float32)
    bytes_ = torch.arange(127, dtype=torch.uint8).view(E4M3).float().numpy()

    def to_grid(y: numpy.ndarray, grid: numpy.ndarray) -> numpy.ndarray:
        upper = numpy.clip(numpy.searchsorted(grid, y), 1, len(grid) - 1)
        wide = y.astype(numpy.float64)
        below, above = wide - grid[upper - 1], grid[upper] - wide
        up = (above < below) | ((above == below) & (upper % 2 == 0))
        return numpy.where(numpy.isnan(y), y, grid[numpy.where(up, upper, upper - 1)])

    def cast(x: Tensor) -> Tensor:
        one = numpy.float32
        blocks = x.float().contiguous().numpy().reshape(x.shape[0], -1, 16)
        amax = numpy.abs(blocks).max()
        with numpy.errstate(all="ignore"):
            S = (min(one(2688) / amax, numpy.finfo(one).max) if amax else one(1)) or one(1)
            limit = min(S * one(1 / 6), numpy.finfo(one).max)
            s = to_grid(numpy.minimum(numpy.abs(blocks).max(2) * limit, one(448)), bytes_)
            f = numpy.minimum(one(1) / (s * (one(1) / S)), numpy.finfo(one).max)
            y = numpy.minimum(numpy.abs(blocks * f[..., None]), one(6))
            code = numpy.copysign(to_grid(y, magnitudes), blocks)
            values = code * ((s * amax) * (one(1) / one(2688)))[..., None]
        return torch.from_numpy(values.reshape(tuple(x.shape)))

    return Subject("in_numpy", cast=cast)


@control("nvfp4", normal(128, 64), spread(torch.float32), with_zeros())
def in_pieces() -> Subject:
    """Cast rows in pieces of 48 with the amax of all; a code a byte, and block scales in fp32."""

    def pieces(x: Tensor, quant: Quant) -> Quantised:
        amax = x.abs().amax().float()
        made = [
            stepwise(part, quant, amax=lambda tiles: amax) if len(part) else reference(part, quant)
            for part in x.split(48)
        ]
        codes = torch.cat([one.codes for one in made if one.codes is not None])
        apart = torch.stack((codes & 15, codes >> 4), 2).flatten(1)
        blocks = torch.cat([one.scales for one in made if one.scales is not None]).float()
        values = torch.cat([one.values for one in made if one.values is not None])
        return Quantised(values, apart, blocks, made[0].outer, amax)

    return Subject(
        "in_pieces",
        cast=lambda x: pieces(x, NVFP4),
        cast_square=lambda x: pieces(x, SQUARE),
        rows=16,
    )


@control("mxfp4", normal(64, 64), spread(torch.float32), normal(64, 64, scale=2.0**-126))
def in_fp64() -> Subject:
    """Compute MXFP4 in fp64, where scaling by powers of two and every sum is exact; values only."""

    def cast(x: Tensor) -> Tensor:
        tiles = x.double().reshape(x.shape[0], -1, 32)
        largest = tiles.abs().amax(2, keepdim=True)
        exponent = torch.frexp(largest.clamp(2.0**-200, 2.0**200)).exponent - 3
        s = torch.exp2(exponent.double().clamp(-127, 127)).where(~largest.isnan(), torch.nan)
        y = (tiles / s).abs().clamp(max=6)
        step = torch.where(y < 2, 0.5, torch.where(y < 4, 1.0, 2.0)).double()
        return ((y / step).round() * step * s).copysign(tiles).view(x.shape).float()

    return Subject("in_fp64", cast=cast, columns=32)


@control("nvfp4", normal(160, 144), spread(), with_zeros())
def in_bytes() -> Subject:
    """Return packed bytes and swizzled scales as bytes, without values."""

    def cast(x: Tensor) -> Quantised:
        made = stepwise(x)
        assert made.scales is not None
        return replace(made, values=None, scales=swizzle(made.scales).view(torch.uint8))

    return Subject("in_bytes", cast=cast, swizzled=True)


@control("nvfp4", normal(64, 64), spread(torch.float32))
def in_other_order() -> Subject:
    """Draw, rotate and multiply like the reference, by other arithmetic with the same bits."""

    def cast_stochastic(x: Tensor, seed: int) -> Quantised:
        drawn = random_bits(Clock(seed), 0, x.shape[0], x.shape[1], 8, x.device)
        drawn = drawn.view(x.shape[0], 1, -1, 16).to(torch.int64)

        def rounded(scaled: Tensor, grid: object) -> Tensor:
            step = torch.where(scaled.abs() < 2, 0.5, torch.where(scaled.abs() < 4, 1.0, 2.0))
            fixed = (scaled.abs().clamp(max=6).double() / step * 256).floor().to(torch.int64)
            return (((fixed >> 8) + ((fixed & 255) > drawn)) * step).copysign(scaled)

        return stepwise(x, rounded=rounded)

    def turn(x: Tensor) -> Tensor:
        z = x.float().contiguous().view(-1, 16) * signs(ROTATION, x.device)
        for distance in (1, 2, 4, 8):
            index = torch.arange(16)
            z = torch.where(index & distance == 0, z + z[:, index ^ distance], z[:, index ^ distance] - z)
        return (z / 4).to(x.dtype).view(x.shape)

    def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
        factor = alpha(a, b)
        sums = torch.nn.functional.linear(*(z.values.float() for z in (a, b)))
        return (sums * (1.0 if factor is None else factor)).to(out)

    layer = Layer(multiply)
    return Subject(
        "in_other_order",
        cast_stochastic=cast_stochastic,
        rotate=turn,
        product=layer.product,
        grouped=layer.grouped,
    )
