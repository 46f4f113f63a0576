"""Second set of mutants and controls: other published faults, written down before the kit was run on them."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.hadamard import rotate
from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.product import product
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.rounding import nearest, stochastic
from ablate.numerics.scaling import FLT_MAX, block_scales
from ablate.numerics.spec import Quant
from ablate.numerics.stored import swizzle, unpack, unswizzle
from ablate.verification.conformance.subject import Quantised, Subject
from mutants.conformance.subjects import (
    ALL,
    E4M3,
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

SECOND = MutantSet()
mutant, control = SECOND.mutant, SECOND.control


def halves(factor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data of experts: the second half of the rows of w is the first times `factor`."""
    x, w, dy, offsets = ALL
    return x, torch.cat((w[:, :32], w[:, :32] * factor), 1), dy, offsets


@mutant("ml-explore/mlx#3934", "nvfp4", (normal(64, 64),), hides=(normal(1, 32),))
def pair_amax() -> Subject:
    """Take the amax of 32 elements, two blocks, for both of their scales; the first two blocks are right."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        flat = largest.flatten().clone()
        whole = flat[2 : len(flat) // 2 * 2]
        whole.copy_(whole.view(len(whole) // 2, 2).amax(1).repeat_interleave(2))
        return block_scales(flat.view(largest.shape), S, quant)

    return Subject("pair_amax", cast=lambda x: stepwise(x, blocks=blocks))


@mutant("FlashML-org/FreeToken#85", "nvfp4", (normal(256, 256),), hides=(normal(1, 16),))
def scale_through_fp16() -> Subject:
    """Round block scales to fp16 toward zero before E4M3."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        exact = (largest * (S * torch.full_like(S, 1 / 6)).clamp(max=FLT_MAX)).clamp(max=FLT_MAX)
        cut = (exact.view(torch.int32) & ~0x1FFF).view(torch.float32)
        return nearest(torch.where(exact.isnan(), exact, cut), SCALES["e4m3"])

    return Subject("scale_through_fp16", cast=lambda x: stepwise(x, blocks=blocks))


@mutant("sgl-project/sglang#23625", "nvfp4", (normal(64, 64),))
def swapped_nibbles() -> Subject:
    """Store the even column of a byte in the high nibble."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.codes is not None
        return replace(made, values=None, codes=made.codes << 4 | made.codes >> 4)

    return Subject("swapped_nibbles", cast=cast)


@mutant("ROCm/aiter#2900", "nvfp4", (normal(256, 96),), hides=(normal(256, 128),))
def unpadded_stride() -> Subject:
    """Write the tile rows of swizzled scales at the stride of scales that are not padded to 4 columns."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.scales is not None
        tiles = swizzle(made.scales).view(torch.uint8)
        height, written = -(-made.scales.shape[0] // 128), torch.zeros_like(tiles)
        for number, tile_row in enumerate(tiles.chunk(height) if height else ()):
            first = number * 128 * made.scales.shape[1]
            written[first : first + len(tile_row)] = tile_row
        return replace(made, values=None, scales=written.view(E4M3))

    return Subject("unpadded_stride", cast=cast, swizzled=True)


@mutant(
    "NVIDIA/Model-Optimizer#1633",
    "nvfp4",
    (normal(64, 64), torch.tensor(2.0)),
    hides=(normal(64, 64), torch.tensor(8.0)),
)
def nan_above_given_amax() -> Subject:
    """Cast block scales to E4M3 without saturation: above 464, which a given amax allows, they are NaN."""

    def cast_given(x: Tensor, amax: Tensor) -> Quantised:
        def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
            over = largest * (S * torch.full_like(S, 1 / 6)) > 464
            return torch.where(over, torch.nan, block_scales(largest, S, quant))

        def rounded(scaled: Tensor, grid: object) -> Tensor:
            return nearest(scaled.nan_to_num(0.0), ELEMENTS["e2m1"])  # FP4 has no NaN

        return stepwise(x, amax=lambda tiles: amax.float(), blocks=blocks, rounded=rounded)

    return Subject("nan_above_given_amax", cast_given=cast_given)


@mutant("vllm-project/vllm#43557", "mxfp4", (normal(64, 64),))
def exponent_of_quotient() -> Subject:
    """Take E8M0's exponent from amax/6, not from amax and then minus 2."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        quotient = largest * torch.full_like(largest, 1 / 6)
        power = (quotient.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=2.0**-127)
        return torch.where(largest.isfinite(), power, block_scales(largest, S, quant))

    return Subject("exponent_of_quotient", cast=lambda x: stepwise(x, MXFP4, blocks=blocks), columns=32)


@mutant("sgl-project/sglang#25519", "mxfp4", (normal(64, 64, scale=256.0),), hides=(normal(64, 64),))
def nan_for_128() -> Subject:
    """Decode E8M0 by comparing the scale with 128, not the code with 255: 128 is NaN, and NaN is infinite."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x, MXFP4)
        assert made.codes is not None
        assert made.scales is not None
        scales = made.scales.float()
        decoded = torch.where(scales == 128, torch.nan, torch.where(scales.isnan(), torch.inf, scales))
        return replace(made, values=unpack(made.codes) * decoded.repeat_interleave(32, 1))

    return Subject("nan_for_128", cast=cast, columns=32)


@mutant("tile-ai/tilelang#2704", "mxfp4", (normal(64, 64),))
def no_subnormals() -> Subject:
    """Decode E2M1 codes with exponent 0 as normal numbers: 0 becomes 0.5, and 0.5 becomes 0.75."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x, MXFP4)
        assert made.codes is not None
        assert made.scales is not None
        code = unpack(made.codes)
        magnitude = torch.where(code == 0, 0.5, torch.where(code.abs() == 0.5, 0.75, code.abs()))
        return replace(made, values=magnitude.copysign(code) * made.scales.float().repeat_interleave(32, 1))

    return Subject("no_subnormals", cast=cast, columns=32)


@mutant("vllm-project/vllm#41015", "mxfp4", (normal(64, 64, scale=1e-6),), hides=(normal(64, 64),))
def amax_of_at_least() -> Subject:
    """Clamp a block's amax to at least 1e-4 before its scale."""
    return Subject(
        "amax_of_at_least",
        cast=lambda x: stepwise(
            x, MXFP4, blocks=lambda largest, S, quant: block_scales(largest.clamp(min=1e-4), S, quant)
        ),
        columns=32,
    )


@mutant("tenstorrent/tt-metal#51971", "mxfp8", (spread().t().contiguous(),), hides=(normal(1, 32),))
def half_subnormals() -> Subject:
    """Encode E4M3's subnormal elements, below 2^-6, a binade too small."""

    def rounded(scaled: Tensor, grid: object) -> Tensor:
        return nearest(torch.where(scaled.abs() < 2.0**-6, scaled / 2, scaled), ELEMENTS["e4m3"])

    return Subject("half_subnormals", cast=lambda x: stepwise(x, MXFP8, rounded=rounded), columns=32)


@mutant("ROCm/llvm-project#3275", "nvfp4", (normal(64, 64), 1))
def lost_carry() -> Subject:
    """Drop the carry from the mantissa into the exponent: what rounds up to 2 or 4 becomes 1 or 2."""

    def cast_stochastic(x: Tensor, seed: int) -> Quantised:
        drawn = random_bits(Clock(seed), 0, x.shape[0], x.shape[1], 8, x.device)
        drawn = drawn.view(x.shape[0], 1, x.shape[1] // 16, 16)

        def rounded(scaled: Tensor, grid: object) -> Tensor:
            made = stochastic(scaled, ELEMENTS["e2m1"], drawn, 8)
            size = made.abs()
            carried = (size > scaled.abs()) & ((size == 2) | (size == 4))
            return torch.where(carried, made / 2, made)

        return stepwise(x, rounded=rounded)

    return Subject("lost_carry", cast_stochastic=cast_stochastic)


@mutant("Dao-AILab/fast-hadamard-transform#9", "nvfp4", (normal(64, 64),))
def wrong_table() -> Subject:
    """Rotate with a 16x16 table that has the signs of one 4x4 block reversed."""

    def turn(x: Tensor) -> Tensor:
        groups = x.reshape(-1, 16).clone()
        groups[:, 12:] = -groups[:, 12:]
        other = rotate(groups, ROTATION)
        turned = rotate(x, ROTATION).view(-1, 16)
        turned[:, 12:] = other[:, 12:]
        return turned.view(x.shape)

    return Subject("wrong_table", rotate=turn)


@mutant("ml-explore/mlx#3854", "nvfp4", layer_data(64, 64))
def overlapping_parts() -> Subject:
    """Read parts of a split contraction in tiles of 32, also where their length is an odd multiple of 16."""

    def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
        (rows, depth), columns = a.values.shape, b.values.shape[0]
        tiles = -(-rows // 32) * -(-columns // 32)
        parts = max(1, min(512 // max(tiles, 1), depth // 16))
        while depth % (parts * 16):
            parts -= 1
        length = depth // parts
        if parts > 1 and length % 32:
            ends = ((start, min(start + length + 16, depth)) for start in range(0, depth, length))
            read = torch.cat([torch.arange(first, last) for first, last in ends])
            a, b = (replace(z, values=z.values[:, read]) for z in (a, b))
        return product(a, b, out)

    return Subject("overlapping_parts", product=Layer(multiply).product)


def with_weights(name: str, faulty: Callable[[Tensor, int], Operand]) -> Subject:
    """Return the products of experts by nvfp4, whose forward product takes an expert's weights from `faulty`.

    Args:
        name: Name of the subject.
        faulty: Function of the weights [experts, out, in] and the number of an expert.
    """
    layer = Layer()

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, dx, dw = layer.grouped(x, w, dy, offsets)
        first = 0
        for expert, last in enumerate(offsets.tolist()):
            if last > first:
                y[first:last] = product(quantize(x[first:last], NVFP4), faulty(w, expert), x.dtype)
            first = last
        return y, dx, dw

    return Subject(name, grouped=grouped)


@mutant(
    "vllm-project/vllm#35497",
    "nvfp4",
    ALL,
    hides=(normal(48, 64), normal(4, 128, 64, seed=3, scale=0.1), normal(48, 128, seed=2), ALL[3] // 2),
)
def unpadded_experts() -> Subject:
    """Read swizzled scales of experts, padded to 128 rows each, as if each had its rows alone."""

    def faulty(w: Tensor, expert: int) -> Operand:
        made = [quantize(one, SQUARE, keep=True) for one in w]
        rows = w.shape[1]
        scales = [
            one.block_scale[:, 0, :, 0].repeat_interleave(16, 0)[:rows]
            for one in made
            if one.block_scale is not None
        ]
        width = scales[0].shape[1]
        stored = torch.cat([swizzle(one.to(E4M3)).view(torch.uint8) for one in scales])
        size = len(stored) // len(w)
        first = expert * rows * (-(-width // 4) * 4)
        read = unswizzle(stored[first : first + size], rows, width).view(E4M3).float()
        codes = made[expert].codes
        assert codes is not None
        return replace(made[expert], values=(codes * read.repeat_interleave(16, 1)).to(torch.bfloat16))

    return with_weights("unpadded_experts", faulty)


@mutant("vllm-project/vllm#54974, NVIDIA/TensorRT-LLM#14199", "nvfp4", halves(0.5), hides=halves(1.0))
def scale_of_gate() -> Subject:
    """Quantise both halves of the rows of w with their own amax, and multiply both by the first half's."""

    def faulty(w: Tensor, expert: int) -> Operand:
        if w.shape[1] % 32:
            return quantize(w[expert], SQUARE)
        gate, up = (quantize(half, SQUARE) for half in w[expert].chunk(2))
        return replace(gate, values=torch.cat((gate.values, up.values)))

    return with_weights("scale_of_gate", faulty)


@control("mxfp8", normal(64, 64), spread(torch.float32), normal(64, 64, scale=2.0**-122))
def in_bit_fields() -> Subject:
    """Compute MXFP8 with integers on the bits of amax, and torch's conversion to E4M3."""

    def cast(x: Tensor) -> Quantised:
        tiles = x.float().reshape(x.shape[0], x.shape[1] // 32, 32)
        quotient = tiles.abs().amax(2) * torch.full((), 1 / 448)
        field = (quotient.view(torch.int32) + 0x7FFFFF) >> 23
        below = quotient <= 2.0**-127
        code = torch.where(below, 0, field).clamp(max=254)
        code = torch.where(quotient.isnan(), 255, code).to(torch.uint8)
        scale = code.view(torch.float8_e8m0fnu).float()
        elements = (tiles * (1 / scale).unsqueeze(2)).clamp(-448, 448).to(E4M3)
        values = (elements.float() * scale.unsqueeze(2)).view(x.shape)
        return Quantised(values, elements.view(x.shape), code.view(torch.float8_e8m0fnu))

    return Subject("in_bit_fields", cast=cast, columns=32)


@control("nvfp4", normal(64, 64), spread(torch.float32), with_zeros())
def in_two_passes() -> Subject:
    """Find the amax first and cast with it; cast squares of the transposed matrix."""

    def cast_given(x: Tensor, amax: Tensor) -> Quantised:
        return stepwise(x, amax=lambda tiles: amax.float())

    def cast_square(x: Tensor) -> Tensor:
        made = reference(x.t().contiguous(), SQUARE).values
        assert made is not None
        return made.t()

    return Subject(
        "in_two_passes",
        cast=lambda x: (
            cast_given(x, x.float().abs().flatten().sort().values[-1]) if x.numel() else reference(x)
        ),
        cast_given=cast_given,
        cast_square=cast_square,
        rows=16,
    )


@control("nvfp4", normal(16, 16), own_draws=True)
def own_generator() -> Subject:
    """Draw with torch's generator; select the rows of each expert by its number in a list of owners."""

    def cast_stochastic(x: Tensor, seed: int) -> Quantised:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(x.shape, generator=generator, dtype=torch.float64).view(
            x.shape[0], 1, x.shape[1] // 16, 16
        )

        def rounded(scaled: Tensor, grid: object) -> Tensor:
            size = scaled.abs().clamp(max=6).double()
            step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
            return ((size / step + uniform).floor() * step).clamp(max=6).float().copysign(scaled)

        return stepwise(x, rounded=rounded)

    layer = Layer()

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        owner = torch.bucketize(torch.arange(len(x)), offsets.long(), right=True)
        y, dx, dw = x.new_zeros(len(x), w.shape[1]), torch.zeros_like(x), torch.zeros_like(w)
        for expert in owner.unique().tolist():
            if expert < len(w):
                mine = owner == expert
                y[mine], dx[mine], dw[expert] = layer.product(x[mine], w[expert], dy[mine])
        return y, dx, dw

    return Subject("own_generator", cast_stochastic=cast_stochastic, grouped=grouped)
