"""Quantisers and products with one published fault each, on plain torch: what the conformance kit has to see.

The casts are written from the formulas, without this project's steps: `nvfp4` and `mxfp4` are right as they stand, and a
mutant replaces one argument. Products and experts take the emulator's operands, one of which is spoilt.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ablate.numerics.hadamard import rotate
from ablate.numerics.philox import Clock
from ablate.numerics.product import product
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Hadamard
from ablate.numerics.stored import swizzle, unswizzle
from ablate.recipes.presets import PRESETS
from ablate.verification.conformance.emulator import emulator, grouped
from ablate.verification.conformance.reference_product import PAIRS, operands
from ablate.verification.conformance.subject import Quantised, Subject

NVFP4 = PRESETS["nvfp4"]()
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EVEN = torch.tensor([True, False, True, False, True, False, True, False])


PUBLISHED = {
    1: ("columnwise scales blocked over packed tokens", "pytorch/ao b3c77e59a, ao#3603"),
    2: ("stochastic rounding dithers with twice the grid step", "axolotl#3767"),
    3: ("stochastic rounding returns zeros", "TransformerEngine#3281"),
    4: ("equal random bits for calls, tensors or shards", "Primus-Turbo#365, TransformerEngine#2270"),
    5: ("stochastic rounding saturates without headroom", "arXiv 2512.02010"),
    6: ("random bits compared by truncation", "TransformerEngine's 8 bits: at most 2^-8 of a step"),
    7: ("block scale with two roundings, (a/6) S", "TransformerEngine#2639"),
    8: ("element factor S/s in place of 1/(s (1/S))", "TransformerEngine#2639"),
    9: ("candidates' errors added in another order", "miles#1261, flashinfer#3448"),
    10: ("E4M3 scales not rounded to nearest", "miles#1054"),
    11: ("no tensor scale", "imp#1544"),
    12: ("cast to E4M3 without clamp gives NaN bytes", "Model-Optimizer#1633"),
    13: ("subnormal scales decoded as normal", "b12x#388"),
    14: ("floor of the scale erases small gradients", "vLLM#37464"),
    15: ("zero block with another scale", "vLLM#37464"),
    16: ("folded scale underflows", "vLLM#37464"),
    17: ("global scale stored as its reciprocal", "modular#6600"),
    18: ("scale layout missing, doubled or unpadded", "vLLM#23140, #50084, TransformerEngine#3344"),
    19: ("scale bytes of padding are read", "TransformerEngine#3070, #3484"),
    20: ("nibbles swapped", "sglang#23625"),
    21: ("E8M0 threshold or extreme exponent wrong", "vLLM#43557, ao#4117"),
    22: ("amax raced, uninitialised or of another tensor", "TransformerEngine#2355, #2695, #2943"),
    23: ("amax of an earlier call", "TransformerEngine#1047, #1190"),
    24: ("rotation not orthogonal, on the wrong axis, or with other signs", "TransformerEngine"),
    25: ("W and W^T from different codes", "arXiv 2509.25149"),
    26: ("rows or experts left unwritten", "MSLK#158, pytorch#193633"),
    27: ("shapes that are no multiple of 64 or 128", "TransformerEngine#2956, #3048, marin#8311"),
    28: ("NaN or infinity becomes a number", "ao#4201, ao#3273"),
    29: ("gradient wrong or a term dropped", "ao#3478, axolotl#3767"),
    30: ("strides or int32 offsets ignored", "ao#4470, ao#4278"),
}
"""Fault and public source by number: what the properties were written for."""


@dataclass(frozen=True)
class Mutant:
    """A subject with one fault."""

    number: int
    """Number of the fault in `PUBLISHED`."""
    subject: Subject
    fails: str
    """Property that has to fail."""
    stage: str = ""
    """Start of the first wrong stage, if there is one."""
    recipe: str = "nvfp4"


# --- a right cast, from the formulas --------------------------------------------------------------


def e2m1(y: Tensor) -> Tensor:
    """Round to the nearest of the eight magnitudes, ties to the even code, by a search of the table."""
    magnitude = y.abs().clamp(max=6.0)
    upper = torch.searchsorted(GRID, magnitude.contiguous()).clamp(max=7)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - GRID[lower], GRID[upper] - magnitude
    up = (above < below) | ((above == below) & EVEN[upper])
    return torch.where(up, GRID[upper], GRID[lower]).copysign(y)


def e4m3(s: Tensor) -> Tensor:
    return s.clamp(max=448.0).to(torch.float8_e4m3fn).float()


def largest(x: Tensor) -> Tensor:
    return x.abs().amax()


def recipe_scale(a: Tensor, outer: Tensor) -> Tensor:
    return a * (outer * torch.tensor(1 / 6))


def recipe_factor(s: Tensor, outer: Tensor) -> Tensor:
    return (1 / (s * (1 / outer))).clamp(max=torch.finfo(torch.float32).max)


def level(amax: Tensor) -> Tensor:
    outer = (torch.tensor(2688.0) / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.ones(()) if amax == 0 or outer == 0 else outer


def nvfp4(
    x: Tensor,
    amax: Callable[[Tensor], Tensor] = largest,
    level: Callable[[Tensor], Tensor] = level,
    scale: Callable[[Tensor, Tensor], Tensor] = recipe_scale,
    e4m3: Callable[[Tensor], Tensor] = e4m3,
    factor: Callable[[Tensor, Tensor], Tensor] = recipe_factor,
    e2m1: Callable[[Tensor], Tensor] = e2m1,
    decode: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda codes, s, outer: codes * s * (1 / outer),
    stored: Callable[[Tensor], Tensor] = lambda scales: scales,
    packed: Callable[[Tensor], Tensor] = lambda codes: codes[:, 0::2] | codes[:, 1::2] << 4,
) -> Quantised:
    """Cast x as NVFP4, by the formulas of docs/reference/numerics.md, section 3."""
    rows, columns = x.shape
    blocks = x.float().contiguous().view(rows, columns // 16, 16)
    outer = level(amax(x.float()))
    s = e4m3(scale(blocks.abs().amax(2, keepdim=True), outer))
    codes = e2m1(blocks * factor(s, outer))
    values = decode(codes, s, outer).view(rows, columns)
    index = (
        torch.searchsorted(GRID, codes.abs().contiguous()).to(torch.uint8)
        | codes.signbit().to(torch.uint8) << 3
    )
    return Quantised(values, packed(index.view(rows, columns)), stored(s.squeeze(2)), 1 / outer)


def mxfp4(
    x: Tensor, exponent: Callable[[Tensor], Tensor] = lambda a: torch.frexp(a.double())[1] - 3
) -> Quantised:
    """Cast x as MXFP4 with OCP's floor rule: the exponent of the amax minus that of 4."""
    rows, columns = x.shape
    blocks = x.float().contiguous().view(rows, columns // 32, 32)
    a = blocks.abs().amax(2, keepdim=True)
    powers = torch.where(a == 0, -127, exponent(a)).clamp(-127, 127)
    s = torch.ldexp(torch.ones_like(a, dtype=torch.float64), powers)
    codes = e2m1((blocks.double() / s).float())
    return Quantised((codes * s).float().view(rows, columns), None, s.squeeze(2).float())


def cast(**steps: Callable[..., Tensor]) -> Subject:
    return Subject("mutant", cast=lambda x: nvfp4(x, **steps))


# --- casts with one fault -------------------------------------------------------------------------


class Remembering:
    """The amax of the call before; that of the first call of its own."""

    def __init__(self) -> None:
        self.held: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        before, self.held = self.held, x.abs().amax()
        return self.held if before is None else before


def raced(x: Tensor) -> Tensor:
    """The amax of one half of the rows, whichever thread block came last."""
    return x[torch.randint(2, ()) :: 2].abs().amax()


def subnormals_as_normals(scales: Tensor) -> Tensor:
    raw = scales.to(torch.float8_e4m3fn).view(torch.uint8)
    low = (raw < 8) & (raw > 0)
    return torch.where(low, torch.ldexp(1 + (raw & 7).float() / 8, torch.tensor(-7)), scales)


def laid_out(written: Callable[[Tensor], Tensor]) -> Subject:
    """A cast that returns scales as bytes in the layout of tensor cores, as `written` writes them."""

    def call(x: Tensor) -> Quantised:
        made = nvfp4(x)
        return replace(made, values=None, scales=written(made.scales.to(torch.float8_e4m3fn)))

    return Subject("mutant", cast=call, swizzled=True)


def padded(scales: Tensor, byte: int = 0) -> Tensor:
    raw = scales.view(torch.uint8)
    extra = (0, -raw.shape[1] % 4, 0, -raw.shape[0] % 128)
    return torch.nn.functional.pad(raw, extra, value=byte).view(scales.dtype)


def tail_unwritten(multiple: int, axis: int, value: float) -> Subject:
    def call(x: Tensor) -> Quantised:
        values = nvfp4(x).values.clone()
        kept = x.shape[axis] // multiple * multiple
        values.narrow(axis, kept, x.shape[axis] - kept).fill_(value)
        return Quantised(values)

    return Subject("mutant", cast=call)


def selected(x: Tensor) -> Quantised:
    """Four Over Six with errors added by torch, in its own order."""
    blocks = x.float().view(len(x), -1, 16)
    amax = blocks.abs().amax()
    outer = torch.tensor(1536.0) / amax
    base = blocks.abs().amax(2, keepdim=True) / 6 * outer
    made = []
    for factor in (1.0, 1.5):
        s = e4m3(base * factor)
        codes = e2m1(blocks * recipe_factor(s, outer))
        values = codes * s * amax / 1536.0
        made.append((values, (values - blocks).square().sum(2, keepdim=True)))
    return Quantised(torch.where(made[1][1] < made[0][1], made[1][0], made[0][0]).view(x.shape))


def storage_order(x: Tensor) -> Quantised:
    held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    rows, columns = x.shape
    whole = held >= rows * columns
    return nvfp4(x.as_strided((rows, columns), (columns, 1), x.storage_offset()) if whole else x)


# --- draws with one fault -------------------------------------------------------------------------


def drawn(noise: Callable[[tuple[int, ...], int], Tensor], width: float = 1.0) -> Subject:
    """Stochastic rounding as noise in [0, 1), added in steps of the grid, then rounded down."""

    def call(x: Tensor, seed: int) -> Quantised:
        def rounded(y: Tensor) -> Tensor:
            magnitude = y.abs().clamp(max=6.0)
            step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
            low = (1 - width) / 2
            moved = magnitude / step + low + width * noise(tuple(y.shape), seed)
            return (moved.floor() * step).clamp(0.0, 6.0).copysign(y)

        return Quantised(nvfp4(x, e2m1=rounded).values)

    return Subject("mutant", cast_stochastic=call)


def uniform(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def shards_alike(shape: tuple[int, ...], seed: int) -> Tensor:
    half = torch.rand((shape[0] // 2, *shape[1:]), generator=torch.Generator().manual_seed(seed))
    return torch.cat((half, half))


# --- products and experts with one fault ----------------------------------------------------------


def layer(spoil: Callable[..., dict[str, object]]) -> Subject:
    """A layer whose operands `spoil` replaces."""

    def call(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = operands(NVFP4, x.bfloat16(), w.bfloat16(), dy.bfloat16(), 3)
        made |= spoil(x.bfloat16(), w.bfloat16(), dy.bfloat16())
        pairs = [(made[a], made[b]) for a, b in PAIRS.values()]
        return tuple(product(a, b, torch.bfloat16) for a, b in pairs)

    return Subject("mutant", product=call)


def packed_scales(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torchao's fault: columnwise scales laid out over all tokens, each expert's product reads its share."""
    y, dx, dw = emulator(NVFP4).grouped(x, w, dy, offsets)
    stops = offsets.tolist()
    starts = [0, *stops[:-1]]
    copies = []
    for z, quant in ((dy, NVFP4.wgrad.g), (x, NVFP4.wgrad.x)):
        made = [
            quantize(z[a:b].t().bfloat16(), quant, rotation=NVFP4.wgrad.hadamard, clock=Clock(1))
            for a, b in zip(starts, stops, strict=True)
        ]
        scales = [one.block_scale[:, 0, :, 0].to(torch.float8_e4m3fn) for one in made]
        rows = made[0].values.shape[0]
        flat, place, read = swizzle(torch.cat([s.view(torch.uint8) for s in scales], 1)), 0, []
        for one, own in zip(made, scales, strict=True):
            size = (rows + -rows % 128) * own.shape[1]
            taken = (
                unswizzle(flat[place : place + size], rows, own.shape[1]).view(torch.float8_e4m3fn).float()
            )
            place += size
            spread = own.float().repeat_interleave(16, 1)
            codes = torch.where(spread == 0, one.values.float(), one.values.float() / spread)
            read.append(replace(one, values=(codes * taken.repeat_interleave(16, 1)).bfloat16()))
        copies.append(read)
    for expert, (a, b) in enumerate(zip(*copies, strict=True)):
        dw[expert] = product(a, b, dw.dtype)
    return y, dx, dw


def experts(change: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Subject:
    return Subject("mutant", grouped=change)


def without_tail(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An expert's tokens beyond a multiple of 64 are left out of dw."""
    y, dx, dw = emulator(NVFP4).grouped(x, w, dy, offsets)
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        kept = start + (stop - start) // 64 * 64
        part = torch.tensor([kept - start])
        if kept > start:
            dw[expert] = emulator(NVFP4).grouped(x[start:kept], w[expert : expert + 1], dy[start:kept], part)[
                2
            ][0]
        else:
            dw[expert] = 0
        start = stop
    return y, dx, dw


def empty_unwritten(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, dx, dw = emulator(NVFP4).grouped(x, w, dy, offsets)
    dw[torch.diff(offsets, prepend=torch.zeros(1, dtype=offsets.dtype)) == 0] = float("nan")
    return y, dx, dw


def wide_offsets(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """int32 offsets read as int64."""
    whole = torch.cat((offsets, offsets))[: len(offsets) // 2 * 2]
    return grouped(emulator(NVFP4).product, x, w, dy, whole.view(torch.int64))


def turned_by(signs: str | None, z: Tensor) -> object:
    rotation = None if signs is None else Hadamard(signs=signs)
    return quantize(z.t(), NVFP4.wgrad.x, rotation=rotation)


def rotation(turn: Callable[[Tensor], Tensor]) -> Subject:
    return Subject("mutant", rotate=turn)


def straight(x: Tensor) -> Tensor:
    return rotate(x, Hadamard())


def columnwise(x: Tensor) -> Tensor:
    rows = -(-len(x) // 16) * 16
    return straight(torch.nn.functional.pad(x, (0, 0, 0, rows - len(x))).t()).t()[: len(x)].contiguous()


def dropped(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input is that of half of the output."""
    y, _, dw = emulator(NVFP4).product(x, w, dy)
    half = dy.clone()
    half[:, dy.shape[1] // 2 :] = 0
    return y, emulator(NVFP4).product(x, w, half)[1], dw


def _weights_apart(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, object]:
    return {"dgrad.w": quantize(w.t(), NVFP4.dgrad.w.model_copy(update={"block": "1x16"}))}


MUTANTS: dict[str, Mutant] = {
    "packed scales": Mutant(1, experts(packed_scales), "grouped_weight_gradient", "product: dw, "),
    "packed scales, exact tensors": Mutant(1, experts(packed_scales), "grouped_layout", "product: dw, "),
    "twice the step": Mutant(2, drawn(uniform, 2.0), "variance_of_draws"),
    "zeros": Mutant(
        3, Subject("mutant", cast_stochastic=lambda x, seed: torch.zeros_like(x)), "adjacent_draws", ""
    ),
    "one seed": Mutant(4, drawn(lambda shape, seed: uniform(shape, 7)), "seeds"),
    "shards alike": Mutant(4, drawn(shards_alike), "calls_differ"),
    "one draw a row": Mutant(
        4,
        drawn(lambda shape, seed: uniform((shape[0], *[1] * (len(shape) - 1)), seed).expand(shape)),
        "independent_draws",
    ),
    "two roundings": Mutant(
        7,
        cast(scale=lambda a, outer: a / 6 * outer),
        "order_of_scale",
        "block scale: 99.8 % of 2,048 wrong, mostly 0.8889 to 0.9",
    ),
    "S/s": Mutant(
        8,
        cast(factor=lambda s, outer: (outer / s).clamp(max=3.4e38)),
        "order_of_factor",
        "code: ",
    ),
    "order of errors": Mutant(
        9, Subject("mutant", cast=selected), "near_ties_of_choice", "value: ", "four_over_six"
    ),
    "truncated scales": Mutant(
        10,
        cast(e4m3=lambda s: (s.clamp(2**-9, 448.0).view(torch.int32) & ~0xFFFFF).view(torch.float32)),
        "scale_midpoints",
        "block scale: ",
    ),
    "amax: ": Mutant(11, cast(level=lambda amax: torch.ones(())), "amax_ladder", "amax: "),
    "no clamp": Mutant(
        12, cast(e4m3=lambda s: torch.where(s < 464, e4m3(s), float("nan"))), "infinite_neighbours"
    ),
    "subnormals as normals": Mutant(
        13, cast(stored=subnormals_as_normals), "subnormal_scales", "block scale: "
    ),
    "amax floor": Mutant(
        14,
        cast(amax=lambda x: largest(x).clamp(min=1e-4)),
        "small_tensor",
        "amax: 1 of 1 wrong, such as 0.0001, not 3.40939e-05",
    ),
    "scale floor": Mutant(
        14, cast(e4m3=lambda s: e4m3(s).clamp(min=2.0**-6)), "subnormal_scales", "block scale: "
    ),
    "zero block 1": Mutant(
        15,
        cast(e4m3=lambda s: torch.where(s == 0, 1.0, e4m3(s))),
        "zero_block",
        "block scale: 50 % of 128 wrong, such as 1, not 0, for 0 at row 0, block 0",
    ),
    "folded fp16": Mutant(
        16,
        cast(decode=lambda codes, s, outer: codes * (s / outer).half().float()),
        "smallest_numbers",
        "value: ",
    ),
    "reciprocal": Mutant(
        17,
        cast(decode=lambda codes, s, outer: codes * s * outer),
        "random_bf16",
        "value: ",
    ),
    "reciprocal factor": Mutant(
        17,
        Subject("mutant", cast=lambda x: replace(nvfp4(x), outer=1 / nvfp4(x).outer)),
        "round_trip",
    ),
    "layout missing": Mutant(18, laid_out(lambda s: padded(s).reshape(-1)), "scale_layout", "block scale: "),
    "layout doubled": Mutant(
        18,
        laid_out(lambda s: swizzle(swizzle(padded(s)).view(padded(s).shape))),
        "scale_layout",
        "block scale: ",
    ),
    "layout unpadded": Mutant(
        18,
        laid_out(lambda s: swizzle(padded(s[: len(s) // 128 * 128] if len(s) > 128 else s))),
        "scale_layout",
    ),
    "padding unwritten": Mutant(19, laid_out(lambda s: swizzle(padded(s, 0x7F))), "padding_bytes"),
    "nibbles": Mutant(
        20, cast(packed=lambda codes: codes[:, 1::2] | codes[:, 0::2] << 4), "code_bytes", "code: "
    ),
    "threshold": Mutant(
        21,
        Subject(
            "mutant",
            cast=lambda x: mxfp4(
                x, lambda a: torch.frexp(a.double())[1] - 3 + (torch.frexp(a.double())[0] >= 0.75)
            ),
        ),
        "power_of_two_thresholds",
        "block scale: 49.3 % of 2,048 wrong, 2 times the recipe's",
        "mxfp4",
    ),
    "exponents": Mutant(
        21,
        Subject(
            "mutant", cast=lambda x: mxfp4(x, lambda a: (torch.frexp(a.double())[1] - 3).clamp(-120, 120))
        ),
        "power_of_two_extremes",
        "block scale: ",
        "mxfp4",
    ),
    "half of the rows": Mutant(
        22,
        cast(amax=lambda x: x[: max(1, len(x) // 2)].abs().amax()),
        "true_amax",
    ),
    "raced amax": Mutant(22, cast(amax=raced), "repeats"),
    "stale amax": Mutant(23, cast(amax=Remembering()), "stale_scales", "amax: 5 of 6 wrong"),
    "other signs on x": Mutant(
        24,
        layer(lambda x, w, dy: {"wgrad.x": turned_by("none", x)}),
        "weight_gradient",
        "product: dw, ",
    ),
    "only dy rotated": Mutant(
        24, layer(lambda x, w, dy: {"wgrad.x": turned_by(None, x)}), "weight_gradient", "product: dw, "
    ),
    "wrong axis": Mutant(24, rotation(columnwise), "rotation_axis"),
    "not normalised": Mutant(24, rotation(lambda x: 4 * straight(x)), "orthogonal"),
    "not rounded": Mutant(24, rotation(lambda x: straight(x.float())), "rotation_values"),
    "W apart": Mutant(25, layer(_weights_apart), "same_weight_codes"),
    "W apart, gradient": Mutant(
        25, layer(_weights_apart), "input_gradient", "product: dx, 96.4 % of 34,560 wrong, operand w of dx"
    ),
    "1D weights": Mutant(25, Subject("mutant", cast_square=lambda x: nvfp4(x)), "square_transpose"),
    "rows unwritten": Mutant(
        26, tail_unwritten(16, 0, float("nan")), "shape_lattice", "value: 4.21 % of 161,952 wrong, all NaN"
    ),
    "empty expert": Mutant(
        26, experts(empty_unwritten), "grouped_all_to_one", "product: dw, 100 % of 40,960 wrong, not finite"
    ),
    "K = 96": Mutant(
        27, tail_unwritten(64, 1, 0.0), "shape_lattice", "value: 13.8 % of 161,952 wrong, all zero"
    ),
    "64-aligned only": Mutant(
        27, experts(without_tail), "grouped_unaligned", "product: dw, 99.9 % of 40,960 wrong, all zero"
    ),
    "NaN saturates": Mutant(28, Subject("mutant", cast=lambda x: nvfp4(x.nan_to_num(1e3))), "nan_visible"),
    "dx of half the outputs": Mutant(
        29,
        Subject("mutant", product=dropped),
        "input_gradient",
        "product: dx, 99.5 % of 15,360 wrong, terms 72 to 143 of 144 with the weight 0",
    ),
    "strides": Mutant(30, Subject("mutant", cast=storage_order), "strides", "amax: 3 of 4 wrong"),
    "int64 offsets": Mutant(30, experts(wide_offsets), "grouped_forward", "product: y, "),
}
"""Mutants by name. Of the published faults, 5 and 6 are no failures: the bias is measured and reported."""
