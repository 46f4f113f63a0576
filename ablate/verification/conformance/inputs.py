"""Tensors that the properties hand to a subject: random ones, and those enumerated to hit a boundary."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import nearest
from ablate.numerics.scaling import block_amax, encode_scale
from ablate.numerics.select import block_error
from ablate.numerics.select import scales as candidates
from ablate.numerics.spec import Hadamard, Quant
from ablate.verification.check_result import normal

MANTISSAS = 128
"""Significands of bf16 in one binade: (128 + i) / 128."""


def spread(rows: int, columns: int, length: int, seed: int, binades: int = 14) -> Tensor:
    """Return normal numbers whose blocks have magnitudes over `binades` powers of two, fp32."""
    generator = torch.Generator().manual_seed(seed + 1)
    exponents = torch.randint(-binades, 1, (rows, -(-columns // length)), generator=generator)
    return normal(rows, columns, seed) * 2.0 ** exponents.repeat_interleave(length, 1)[:, :columns]


def negative(rows: int, columns: int, seed: int) -> Tensor:
    """Return normal numbers, the largest magnitude of which, 9, is negative, fp32."""
    x = normal(rows, columns, seed + 6)
    x[rows // 2, columns // 3] = -9.0
    return x


def outliers(rows: int, columns: int, seed: int) -> Tensor:
    """Return normal numbers of which 1 % are ten thousand times as large, fp32."""
    hit = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed + 2)) < 0.01
    return torch.where(hit, 1e4, 1.0) * normal(rows, columns, seed)


def element_ties(rows: int, columns: int, quant: Quant, seed: int) -> Tensor:
    """Return grid values and their midpoints, in blocks whose scales are powers of two; exact in bf16. Every
    block contains the largest element, and the tensor's amax is such that dividing by it is exact."""
    element, (_, length) = ELEMENTS[quant.element], quant.tile
    generator = torch.Generator().manual_seed(seed + 3)
    points = grid(quant.element)
    middles = (points[1:] + points[:-1]) / 2
    choices = torch.cat((points, middles, middles))
    picks = torch.randint(len(choices), (rows, columns), generator=generator)
    signs = 1.0 - 2.0 * torch.randint(2, (rows, columns), generator=generator)
    x = choices[picks] * signs
    x[:, ::length] = element.max
    exponents = torch.randint(-4, 1, (rows, -(-columns // length)), generator=generator)
    exponents[0, 0] = 0
    return x * 2.0 ** exponents.repeat_interleave(length, 1)[:, :columns]


@cache
def grid(element: str) -> Tensor:
    """Return the non-negative values of an element format, ascending, fp32."""
    kind = ELEMENTS[element]
    small = torch.arange(2**kind.mantissa) * 2.0 ** (kind.emin - kind.mantissa)
    binades = torch.arange(kind.emin, 32)
    normals = (1 + torch.arange(2**kind.mantissa) / 2.0**kind.mantissa) * 2.0 ** binades[:, None]
    points = torch.cat((small, normals.flatten()))
    return points[points <= kind.max].float()


def _mantissas() -> Tensor:
    return (MANTISSAS + torch.arange(MANTISSAS)).float() / MANTISSAS


def scale_order(quant: Quant, rows: int, columns: int) -> list[Tensor]:
    """Return bf16 tensors with blocks whose scale depends on the order of its two multiplications: of all
    pairs of a tensor's amax and a block's amax, as bf16 significands, the amaxes with the most such
    blocks."""
    if quant.outer is None or quant.scale is None:
        return []
    amax, scale = _mantissas(), SCALES[quant.scale.format]
    a = _mantissas()[:, None] * 2.0 ** -torch.arange(1, 9)
    whole = (torch.full_like(amax, ELEMENTS[quant.element].max * quant.outer.bound) / amax)[:, None, None]
    six = torch.full_like(a, 6.0)
    hits = nearest(a * (whole * torch.full_like(whole, 1 / 6.0)), scale) != nearest(a / six * whole, scale)
    best = hits.flatten(1).sum(1).topk(4).indices.tolist()
    return [
        from_amaxes(a[hits[number]], float(amax[number]), quant, rows, columns)
        for number in best
        if hits[number].any()
    ]


def factor_order(quant: Quant, rows: int, columns: int) -> list[Tensor]:
    """Return bf16 tensors with elements whose code depends on how the factor 1/(s (1/S)) is computed. The
    other ways are S/s, and division by s times amax/2688."""
    if quant.outer is None or quant.scale is None:
        return []
    grid_scale, element, length = SCALES[quant.scale.format], ELEMENTS[quant.element], quant.tile[1]
    amaxes = _mantissas()
    whole = torch.full_like(amaxes, element.max * quant.outer.bound) / amaxes
    a = torch.cat([_mantissas()[::4] * 2.0**-k for k in (1, 2, 3)])
    s = nearest(a[None] * (whole * torch.full_like(whole, 1 / 6))[:, None], grid_scale)
    x = torch.cat([_mantissas() * 2.0**-k for k in (1, 2, 3, 4, 5)])
    found: list[tuple[int, Tensor]] = []
    for number in range(0, MANTISSAS, 2):
        factors = s[number][:, None]
        f = 1 / (factors * (1 / whole[number]))
        g = whole[number] / factors
        h = factors * (amaxes[number] / (element.max * quant.outer.bound))
        below = x[None] < a[:, None]
        codes = nearest(x[None] * f, element)
        hits = below & ((codes != nearest(x[None] * g, element)) | (codes != nearest(x[None] / h, element)))
        if not hits.any():
            continue
        blocks = torch.zeros(rows * columns // length, length)
        blocks[0, 0] = amaxes[number]
        parts = [(one, part) for one, hit in zip(a, hits, strict=True) for part in x[hit].split(length - 1)]
        for block, (one, part) in zip(blocks[1:], (pair for pair in parts if len(pair[1])), strict=False):
            block[0], block[1 : 1 + len(part)] = one, part
        found.append((int(hits.sum()), blocks.view(rows, columns)))
    found.sort(key=lambda pair: -pair[0])
    return [tensor for _, tensor in found[:4]]


def from_amaxes(amaxes: Tensor, amax: float, quant: Quant, rows: int, columns: int) -> Tensor:
    """Return a tensor whose first block has `amax`, and the others `amaxes` in turn, fp32 [rows, columns]."""
    length = quant.tile[1]
    number = rows * columns // length
    chosen = amaxes.flatten().repeat(-(-number // max(1, amaxes.numel())))[:number].clone()
    chosen[0] = amax
    ramp = torch.linspace(1.0, 1 / length, length)
    ramp[1::2] *= -1
    return (chosen[:, None] * ramp).bfloat16().float().view(rows, columns)


def _from_scales(scales: Tensor, bound: float, quant: Quant, rows: int, columns: int) -> Tensor:
    """Return a tensor whose blocks have these scales in turn, but for the first, whose scale is the bound."""
    top = quant.range.map_to or ELEMENTS[quant.element].max
    return from_amaxes(scales * top, bound * top, quant, rows, columns)


def scale_midpoints(quant: Quant, rows: int, columns: int) -> Tensor:
    """Return a tensor with block scales exactly halfway between two scales, and next to it; exact in bf16.
    The tensor's amax is a power of two times 6 x bound, so that S is a power of two and nothing else
    rounds."""
    assert quant.scale is not None
    kind, bound = SCALES[quant.scale.format], quant.outer.bound if quant.outer else 2.0**8
    steps = 2.0**kind.mantissa
    middles = 1 + (torch.arange(steps) + 0.5) / steps
    near = torch.cat((middles, middles * (1 + 2.0**-7), middles * (1 - 2.0**-7)))
    scales = (near[:, None] * 2.0 ** torch.arange(max(kind.emin, -6), 8)).flatten()
    return _from_scales(scales[scales < bound], bound, quant, rows, columns)


def every_scale(quant: Quant, rows: int, columns: int) -> Tensor:
    """Return a tensor with a block for each value of the scale's format from 2^-20 to the bound, in turn: a
    block's amax is the element format's maximum times that value, rounded to bf16.

    nvfp4's 1x16 blocks below one second level get all 126 values of E4M3: S is a power of two. Other recipes
    get fewer of them in a tensor of 32 x 256: square blocks 14, which share an amax with the 16 rows beside;
    tetrajet2 22, with a second level for each group of blocks; four_over_six and quartet2 106 and 120 up to
    their bound 256, and 77 if they choose between two scales.
    """
    assert quant.scale is not None
    kind, bound = SCALES[quant.scale.format], quant.outer.bound if quant.outer else 2.0**8
    steps = torch.arange(2**kind.mantissa) / 2.0**kind.mantissa
    every = ((1 + steps) * 2.0 ** torch.arange(max(kind.emin, -20), 9)[:, None]).flatten()
    if kind.zero:
        every = torch.cat((steps[1:] * 2.0**kind.emin, every))
    return _from_scales(every[every <= bound], bound, quant, rows, columns)


def subnormal_scales(quant: Quant, rows: int, columns: int) -> Tensor:
    """Return a tensor whose blocks have subnormal scales or none, but for the first; exact in bf16."""
    assert quant.scale is not None
    kind = SCALES[quant.scale.format]
    scales = torch.arange(1, 4 * 2**kind.mantissa) / 4 * 2.0 ** (kind.emin - kind.mantissa)
    return _from_scales(scales, quant.outer.bound if quant.outer else kind.max, quant, rows, columns)


def near_ties(rows: int, columns: int, quant: Quant, seed: int) -> dict[str, Tensor]:
    """Return tensors whose blocks have two candidates of nearly equal error, by dtype.

    In bf16, elements are moved by some ulps, whichever bring the errors closest. In fp32, one element of
    a block is moved by bisection to where the smaller error changes sides, so that the two errors differ by
    less than the roundings of their sums.
    """
    assert quant.select is not None
    length, number = quant.tile[1], rows * columns // quant.tile[1]
    coarse = (normal(4 * number, length, seed + 7) * 2).bfloat16().float().clamp(-5.5, 5.5)
    coarse[0, 0] = 5.5
    for column in range(1, 4):  # in bf16, steps of some ulps bring the two errors close together
        best, gap = coarse, _gap(coarse, quant).abs()
        for ulps in (-6, -4, -3, -2, -1, 1, 2, 3, 4, 6):
            moved = coarse.clone()
            moved[1:, column] *= 1 + ulps * 2.0**-7
            moved = moved.bfloat16().float()
            other = _gap(moved, quant).abs()
            best = torch.where((other < gap)[:, None], moved, best)
            gap = torch.minimum(gap, other)
        coarse = best
    order = _gap(coarse, quant).abs().argsort()[: number - 1]
    fine = normal(2 * number, length, seed + 8).clamp(-6, 6)
    fine[0, 0] = 6.0
    low, high = fine.clone(), fine.clone()
    low[1:, 1], high[1:, 1] = 0.1, 0.9
    crossing = (_gap(low, quant) < 0) != (_gap(high, quant) < 0)
    for _ in range(40):
        middle = (low + high) / 2
        left = ((_gap(middle, quant) < 0) == (_gap(low, quant) < 0))[:, None]
        low, high = torch.where(left, middle, low), torch.where(left, high, middle)
    sides = torch.stack((low, high), dim=1)[crossing].flatten(0, 1)[: number - 1]
    filled = sides.repeat(-(-(number - 1) // len(sides)), 1)[: number - 1]
    return {
        "bfloat16": torch.cat((coarse[:1], coarse[order])).view(rows, columns).bfloat16(),
        "float32": torch.cat((fine[:1], filled)).view(rows, columns),
    }


def _gap(blocks: Tensor, quant: Quant) -> Tensor:
    """Return the relative difference of the two candidates' errors of blocks, [number]; signed."""
    assert quant.outer is not None
    amax = blocks.abs().amax()
    whole = encode_scale(amax, quant)
    tiles = blocks.view(len(blocks), 1, 1, -1)
    errors = [
        block_error(candidate, tiles, amax, quant).flatten()
        for candidate in candidates(tiles, block_amax(tiles), whole, quant)
    ]
    return (errors[0] - errors[1]) / errors[0].clamp(min=1e-30)


def permuted_tiles(rows: int, columns: int, seed: int, amax: float, binades: int = 3) -> Tensor:
    """Return a matrix with one non-zero element in each row and column of every 16 x 16 tile, fp32.

    The elements of two by two tiles have one magnitude, amax over a power of two. So a block of 16 along
    either side has one element, a block of 32 two equal ones; rotated by a Hadamard matrix, the 16 magnitudes
    of a group are equal. A quantiser represents both exactly.
    """
    generator = torch.Generator().manual_seed(seed + 5)
    high, wide = -(-rows // 16), -(-columns // 16)
    x = torch.zeros(high * 16, wide * 16)
    pairs = (-(-high // 2), -(-wide // 2))
    drops = torch.arange(pairs[0] * pairs[1]).view(pairs) * 5 % binades
    for i in range(high):
        for j in range(wide):
            order = torch.randperm(16, generator=generator)
            signs = 1.0 - 2.0 * torch.randint(2, (16,), generator=generator)
            x[i * 16 + torch.arange(16), j * 16 + order] = signs * amax * 2.0 ** -int(drops[i // 2, j // 2])
    return x[:rows, :columns]


def exact_amax(quants: Sequence[tuple[Quant, Hadamard | None]]) -> float | None:
    """Return an amax in bf16 for which the quantisers keep `permuted_tiles` exactly; None: there is none."""
    for significand in [6.0, 1.5, 21.0, 4.0, *(_mantissas()[::4] * 4).tolist()]:
        x = permuted_tiles(64, 128, 0, significand, 7)
        if all(keeps(x, quant, rotation) for quant, rotation in quants):
            return significand
    return None


def to_nearest(quant: Quant) -> Quant:
    """Return a quantiser with its random rounding of elements replaced by rounding to nearest."""
    return quant.model_copy(update={"rounding": "nearest", "bits": 8})


def keeps(x: Tensor, quant: Quant, rotation: Hadamard | None) -> bool:
    """Return True if the scaled elements of a tensor are grid values, so that no rounding changes them."""
    operand = quantize(x.bfloat16(), to_nearest(quant), rotation=rotation, keep=True)
    assert operand.scaled is not None
    return operand.codes is not None and bool((operand.scaled == operand.codes).all())
