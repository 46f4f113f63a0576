"""Second set of conformance_mutants.py: other published faults and controls, to test the kit on.

The set was chosen from public reports and written down before the kit was run on it, without looking at the
kit's properties or at what the kit says of the first set.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from conformance_subjects import (
    ALL,
    E4M3,
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

# --- casts ----------------------------------------------------------------------------------------


def pair_amax() -> Subject:
    """Take the amax of 32 elements, two blocks, for both of their scales; the first two blocks are right."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        flat = largest.flatten().clone()
        whole = flat[2 : len(flat) // 2 * 2]
        whole.copy_(whole.view(len(whole) // 2, 2).amax(1).repeat_interleave(2))
        return block_scales(flat.view(largest.shape), S, quant)

    return Subject("pair_amax", cast=lambda x: stepwise(x, blocks=blocks))


def scale_through_fp16() -> Subject:
    """Round block scales to fp16 toward zero before E4M3."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        exact = (largest * (S * torch.full_like(S, 1 / 6)).clamp(max=FLT_MAX)).clamp(max=FLT_MAX)
        cut = (exact.view(torch.int32) & ~0x1FFF).view(torch.float32)
        return nearest(torch.where(exact.isnan(), exact, cut), SCALES["e4m3"])

    return Subject("scale_through_fp16", cast=lambda x: stepwise(x, blocks=blocks))


def swapped_nibbles() -> Subject:
    """Store the even column of a byte in the high nibble."""

    def cast(x: Tensor) -> Quantised:
        made = reference(x)
        assert made.codes is not None
        return replace(made, values=None, codes=made.codes << 4 | made.codes >> 4)

    return Subject("swapped_nibbles", cast=cast)


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


def exponent_of_quotient() -> Subject:
    """Take E8M0's exponent from amax/6, not from amax and then minus 2."""

    def blocks(largest: Tensor, S: Tensor, quant: Quant) -> Tensor:
        quotient = largest * torch.full_like(largest, 1 / 6)
        power = (quotient.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=2.0**-127)
        return torch.where(largest.isfinite(), power, block_scales(largest, S, quant))

    return Subject("exponent_of_quotient", cast=lambda x: stepwise(x, MXFP4, blocks=blocks), columns=32)


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


def amax_of_at_least() -> Subject:
    """Clamp a block's amax to at least 1e-4 before its scale."""
    return Subject(
        "amax_of_at_least",
        cast=lambda x: stepwise(
            x, MXFP4, blocks=lambda largest, S, quant: block_scales(largest.clamp(min=1e-4), S, quant)
        ),
        columns=32,
    )


def half_subnormals() -> Subject:
    """Encode E4M3's subnormal elements, below 2^-6, a binade too small."""

    def rounded(scaled: Tensor, grid: object) -> Tensor:
        return nearest(torch.where(scaled.abs() < 2.0**-6, scaled / 2, scaled), ELEMENTS["e4m3"])

    return Subject("half_subnormals", cast=lambda x: stepwise(x, MXFP8, rounded=rounded), columns=32)


# --- rounding and rotation ------------------------------------------------------------------------


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


# --- products -------------------------------------------------------------------------------------


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


def scale_of_gate() -> Subject:
    """Quantise both halves of the rows of w with their own amax, and multiply both by the first half's."""

    def faulty(w: Tensor, expert: int) -> Operand:
        if w.shape[1] % 32:
            return quantize(w[expert], SQUARE)
        gate, up = (quantize(half, SQUARE) for half in w[expert].chunk(2))
        return replace(gate, values=torch.cat((gate.values, up.values)))

    return with_weights("scale_of_gate", faulty)


# --- controls -------------------------------------------------------------------------------------


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


# --- what they are --------------------------------------------------------------------------------


def halves(factor: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data of experts: the second half of the rows of w is the first times `factor`."""
    x, w, dy, offsets = ALL
    return x, torch.cat((w[:, :32], w[:, :32] * factor), 1), dy, offsets


HELD_OUT = {
    "pair_amax": Mutant(
        "ml-explore/mlx#3934",
        "Blocks were told apart by the thread's number in the grid, not in its group of 32, so from the"
        " second group on both blocks of 16 took the maximum of 32 values.",
        "scales from the amax of two neighbouring blocks (32 elements, not 16)",
        "nvfp4",
        pair_amax,
        (normal(64, 64),),
        "any data with more than 32 elements",
        (normal(1, 32),),
    ),
    "scale_through_fp16": Mutant(
        "FlashML-org/FreeToken#85",
        "Triton converted fp32 to E4M3 through fp16 rounded toward zero, so values just above a midpoint were"
        " rounded down (reported of activations; here block scales).",
        "block scales rounded twice, through fp16: those just above a midpoint go down",
        "nvfp4",
        scale_through_fp16,
        (normal(256, 256),),
        "one block scale in a few hundred",
        (normal(1, 16),),
    ),
    "swapped_nibbles": Mutant(
        "sgl-project/sglang#23625",
        "A checkpoint had the two FP4 codes of a byte in the other order than the kernel read them.",
        "order of the two codes in a byte",
        "nvfp4",
        swapped_nibbles,
        (normal(64, 64),),
        "any data",
    ),
    "unpadded_stride": Mutant(
        "ROCm/aiter#2900",
        "Scales were written with the row stride of the real number of scale columns, and read with that of"
        " the padded number, so all row groups but the first were misplaced.",
        "row stride of swizzled scales ignores the padding of their columns",
        "nvfp4",
        unpadded_stride,
        (normal(256, 96),),
        "more than 128 rows and columns that are not a multiple of 64",
        (normal(256, 128),),
    ),
    "nan_above_given_amax": Mutant(
        "NVIDIA/Model-Optimizer#1633",
        "Block scales were cast from fp32 to E4M3 without a clamp, so blocks above the calibrated amax got"
        " NaN scales.",
        "NaN scale for blocks above the given amax (E4M3 cast without saturation)",
        "nvfp4",
        nan_above_given_amax,
        (normal(64, 64), torch.tensor(2.0)),
        "values above 464/448 of the given amax",
        (normal(64, 64), torch.tensor(8.0)),
    ),
    "exponent_of_quotient": Mutant(
        "vllm-project/vllm#43557",
        "The E8M0 scale was the exponent of amax/6, which is one too small for amaxes of 1 to 1.5 times a"
        " power of two: their blocks saturated.",
        "block scale one power of two too small in many blocks, whose largest elements saturate",
        "mxfp4",
        exponent_of_quotient,
        (normal(64, 64),),
        "any data",
    ),
    "nan_for_128": Mutant(
        "sgl-project/sglang#25519",
        "The decoder of E8M0 compared the decoded scale, not the code, with its NaN mark: scales of 128"
        " became NaN.",
        "E8M0 scale 128 decoded as NaN",
        "mxfp4",
        nan_for_128,
        (normal(64, 64, scale=256.0),),
        "blocks with an amax of 512 to 1023",
        (normal(64, 64),),
    ),
    "no_subnormals": Mutant(
        "tile-ai/tilelang#2704",
        "The decoder of E2M1 treated exponent 0 as that of normal numbers: 0 was decoded as 0.5 and 0.5 as"
        " 0.75.",
        "E2M1 codes 0 and 1 decoded as 0.5 and 0.75 (zero and subnormal treated as normal)",
        "mxfp4",
        no_subnormals,
        (normal(64, 64),),
        "any data",
    ),
    "amax_of_at_least": Mutant(
        "vllm-project/vllm#41015",
        "A kernel clamped the amax of a block to at least 1e-4, far above the format's smallest scale, so"
        " small inputs lost precision or became zero.",
        "amax of a block clamped to at least 1e-4: small values become zero",
        "mxfp4",
        amax_of_at_least,
        (normal(64, 64, scale=1e-6),),
        "blocks with an amax below 6.1e-5",
        (normal(64, 64),),
    ),
    "half_subnormals": Mutant(
        "tenstorrent/tt-metal#51971",
        "The encoder of MX elements rounded subnormals at the wrong bit and stored them a binade too small.",
        "subnormal E4M3 elements half as large as they should be",
        "mxfp8",
        half_subnormals,
        (spread().t().contiguous(),),
        "elements below 2^-14 or so of their block's amax",
        (normal(1, 32),),
    ),
    "lost_carry": Mutant(
        "ROCm/llvm-project#3275",
        "Stochastic rounding added noise to the mantissa and masked it, so a carry into the exponent was lost"
        " (reported of UE5M3; here E2M1).",
        "stochastic rounding up to a power of two loses the carry: 2 becomes 1, and 4 becomes 2",
        "nvfp4",
        lost_carry,
        (normal(64, 64), 1),
        "any data",
    ),
    "wrong_table": Mutant(
        "Dao-AILab/fast-hadamard-transform#9",
        "The table of the 12x12 Hadamard matrix had wrong signs, so that H H^T was not diagonal (reported of"
        " size 12; here 16).",
        "rotation not orthogonal: wrong signs in a block of its matrix",
        "nvfp4",
        wrong_table,
        (normal(64, 64),),
        "any data",
    ),
    "overlapping_parts": Mutant(
        "ml-explore/mlx#3854",
        "A split-K product chose parts that are not a multiple of its tile of 32, so tiles read into the next"
        " part, which was counted twice.",
        "parts of a split contraction overlap: groups of 16 at their ends counted twice",
        "nvfp4",
        overlapping_parts,
        layer_data(64, 64),
        "contractions whose parts are an odd multiple of 16 long",
    ),
    "unpadded_experts": Mutant(
        "vllm-project/vllm#35497",
        "The scales of each expert were padded to 128 rows, but found at an offset computed from the rows"
        " without padding: all experts but the first read wrong scales.",
        "offset of an expert's scales ignores their padding: wrong scales for all experts but the first",
        "nvfp4",
        unpadded_experts,
        ALL,
        "numbers of outputs that are not a multiple of 128",
        (normal(48, 64), normal(4, 128, 64, seed=3, scale=0.1), normal(48, 128, seed=2), ALL[3] // 2),
    ),
    "scale_of_gate": Mutant(
        "vllm-project/vllm#54974, NVIDIA/TensorRT-LLM#14199",
        "The gate and up projections of an expert, quantised with their own global scales, were fused and"
        " both multiplied by the gate's.",
        "outer scale of the first half of w's rows used for both halves",
        "nvfp4",
        scale_of_gate,
        halves(0.5),
        "halves of the rows of w with another amax",
        halves(1.0),
    ),
}
"""Faulty subjects. `scale_through_fp16`, `lost_carry` and `wrong_table` carry over what was reported of a
neighbouring format or size."""
HELD_OUT_CONTROLS = {
    "in_bit_fields": Control(
        "mxfp8", in_bit_fields, (normal(64, 64), spread(torch.float32), normal(64, 64, scale=2.0**-122))
    ),
    "in_two_passes": Control("nvfp4", in_two_passes, (normal(64, 64), spread(torch.float32), with_zeros())),
    "own_generator": Control("nvfp4", own_generator, (normal(16, 16),), own_draws=True),
}
"""Correct subjects, written otherwise."""
