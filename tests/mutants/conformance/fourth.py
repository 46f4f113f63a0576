"""Fourth set of mutants and controls: faults of real casts and products, in code of their own.

Casts are written anew from the specification, not taken from the reference, so that a mutant differs from it
in other ways than by one replaced step.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy
import torch
from torch import Tensor

from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.product import alpha, product
from ablate.numerics.quantize import Operand, quantize
from ablate.verification.conformance.subject import Quantised, Subject
from mutants.conformance.subjects import (
    ALL,
    E4M3,
    E8M0,
    GRADIENT,
    NVFP4,
    ONE_IDLE,
    ROTATION,
    SQUARE,
    Layer,
    MutantSet,
    expert_data,
    layer_data,
    normal,
    spread,
    with_zeros,
)

FOURTH = MutantSet()
mutant, control = FOURTH.mutant, FOURTH.control


def below_powers() -> Tensor:
    """Return fp32 numbers, row r times 4^(r-16), whose blocks have an amax just below a power of two."""
    x = normal(32, 64, dtype=torch.float32).clamp(-1.5, 1.5)
    x[:, 5::32] = 2 - 2.0**-23
    return x * 4.0 ** torch.arange(-16, 16)[:, None]


def wide() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data of experts with 128 outputs."""
    x, _, _, offsets = expert_data((16, 48, 64, 96))
    return x, normal(4, 128, 64, seed=3, scale=0.1), normal(96, 128, seed=2, scale=0.01), offsets


LARGEST = torch.finfo(torch.float32).max
SIXTH, WHOLE = torch.tensor(1 / 6), torch.tensor(1 / 2688)
SIGNS = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], dtype=torch.float32)
Round = Callable[[Tensor], Tensor]


def e2m1(y: Tensor) -> Tensor:
    """Return the index, 0 to 7, of the magnitude of E2M1 nearest to y; ties to even."""
    m = y.abs()
    passed = (m > 0.25, m >= 0.75, m > 1.25, m >= 1.75, m > 2.5, m >= 3.5, m > 5)
    return torch.where(y.isnan(), 7, sum(one.to(torch.int64) for one in passed))


def decoded(index: Tensor) -> Tensor:
    """Return the magnitudes of indices."""
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[index]


def outer_scale(amax: Tensor) -> Tensor:
    """Return the factor by which elements are multiplied before block scales."""
    scale = torch.clamp(torch.full_like(amax, 2688) / amax, max=LARGEST)
    return torch.where((amax == 0) | (scale == 0), 1.0, scale)


def nvfp4(
    x: Tensor,
    amax: Tensor | None = None,
    high: int = 1,
    least: float = 0.0,
    rounded: Round = e2m1,
) -> Quantised:
    """Return the cast to NVFP4 in blocks of `high` rows and 16 columns.

    Args:
        x: [rows, columns].
        amax: Outer statistic, if it is not that of x.
        high: Rows of a block.
        least: Smallest block scale.
        rounded: Function of scaled elements [rows, columns] that gives indices of magnitudes.
    """
    rows, columns = x.shape
    z = torch.zeros(-(-rows // high) * high, columns)
    z[:rows] = x.float()
    tiles = z.view(len(z) // high, high, columns // 16, 16)
    if amax is None:
        amax = z.abs().amax() if z.numel() else torch.zeros(())
    S = outer_scale(amax)
    a = tiles.abs().amax((1, 3)) if z.numel() else torch.zeros(tiles.shape[0], tiles.shape[2])
    s = torch.clamp(a * torch.clamp(S * SIXTH, max=LARGEST), max=448).clamp(min=least).to(E4M3)
    factor = torch.clamp(1 / (s.float() * (1 / S)), max=LARGEST)
    scaled = (tiles * factor[:, None, :, None]).view(z.shape)[:rows]
    index = rounded(scaled)
    code = (index | (z[:rows].signbit().to(torch.int64) << 3)).to(torch.uint8)
    step = (s.float() * amax) * WHOLE
    step = step.repeat_interleave(high, 0)[:rows].repeat_interleave(16, 1)
    values = decoded(index).copysign(z[:rows]) * step
    return Quantised(values, code[:, 0::2] | (code[:, 1::2] << 4), s, amax * WHOLE)


def bits(x: Tensor, seed: int) -> Tensor:
    """Return random numbers from 0 to 255 for the elements of x."""
    return random_bits(Clock(seed), 0, x.shape[0], x.shape[1], 8, x.device)


def step_of(y: Tensor) -> Tensor:
    """Return the distance of the neighbours of y in E2M1."""
    m = y.abs()
    return torch.where(m < 2, 0.5, torch.where(m < 4, 1.0, 2.0))


def drawn(y: Tensor, r: Tensor) -> Tensor:
    """Return indices of magnitudes of E2M1 by stochastic rounding with the random numbers r."""
    m, step = y.abs().clamp(max=6), step_of(y.abs().clamp(max=6))
    lower = (m / step).floor()
    up = ((m / step - lower) * 256).floor() > r
    return e2m1((lower + up) * step)


@mutant(
    "plausible; a buffer for atomicMax, which must be cleared by a memset (ROCm/TransformerEngine#509)",
    "nvfp4",
    (normal(64, 64),),
    hides=(normal(64, 64),),
    before=(normal(64, 64, scale=100.0),),
)
def running_amax() -> Subject:
    """Take the maximum into a buffer that is not cleared: the outer amax is the largest of all calls."""
    buffer = torch.zeros(())

    def cast(x: Tensor) -> Quantised:
        if x.numel():
            buffer.copy_(torch.maximum(buffer, x.abs().amax().float()))
        return nvfp4(x, buffer.clone())

    return Subject("running_amax", cast=cast)


@mutant("pytorch/ao, nvfp4_quantize (E4M3_EPS)", "nvfp4", (spread(),), hides=(normal(64, 64),))
def smallest_normal_scale() -> Subject:
    """Clamp block scales to at least 2^-6, the smallest normal number of E4M3."""
    return Subject("smallest_normal_scale", cast=lambda x: nvfp4(x, least=torch.finfo(E4M3).tiny))


@mutant(
    "microsoft/microxcaling (floor of torch.log2), higham/chop#5",
    "mxfp4",
    (below_powers(),),
    hides=(normal(64, 64),),
)
def log2_exponent() -> Subject:
    """Take the exponent of a block as floor(log2(amax)) in fp32, which is too large just below a power."""

    def cast(x: Tensor) -> Quantised:
        tiles = x.float().reshape(x.shape[0], x.shape[1] // 32, 32)
        a = tiles.abs().amax(2) if x.numel() else torch.zeros(tiles.shape[:2])
        exponent = (torch.log2(a.clamp(max=LARGEST)).floor() - 2).clamp(-127, 127)
        s = torch.where(a.isnan(), torch.nan, torch.exp2(exponent.double()).float())
        index = e2m1(tiles * (1 / s)[:, :, None])
        values = (decoded(index).copysign(tiles) * s[:, :, None]).view(x.shape)
        code = (index | (tiles.signbit().to(torch.int64) << 3)).to(torch.uint8).view(x.shape)
        return Quantised(values, code[:, 0::2] | (code[:, 1::2] << 4), s.to(E8M0))

    return Subject("log2_exponent", cast=cast, columns=32)


@mutant("flashinfer-ai/flashinfer#4574", "nvfp4", (normal(128, 128),))
def tiles_of_eight() -> Subject:
    """Store swizzled scales in tiles of 8 rows, where a tile has 128."""

    def cast(x: Tensor) -> Quantised:
        made = nvfp4(x)
        assert made.scales is not None
        rows, columns = made.scales.shape
        whole = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8)
        whole[:rows, :columns] = made.scales.view(torch.uint8)
        tiles = whole.view(len(whole) // 8, 8, whole.shape[1] // 4, 4).transpose(1, 2)
        return replace(made, values=None, scales=tiles.reshape(-1).view(E4M3))

    return Subject("tiles_of_eight", cast=cast, swizzled=True)


@mutant(
    "plausible; uxlfoundation/oneDNN#5908 is a layout of scales that is not checked",
    "nvfp4",
    (normal(64, 128),),
    hides=(normal(16, 64),),
)
def squares_by_columns() -> Subject:
    """Store the scales of square blocks column by column."""

    def cast(w: Tensor) -> Quantised:
        made = nvfp4(w, high=16)
        assert made.scales is not None
        stored = made.scales.view(torch.uint8)
        return replace(made, values=None, scales=stored.t().reshape(stored.shape).view(E4M3))

    return Subject("squares_by_columns", cast_square=cast)


@mutant("axolotl-ai-cloud/axolotl#3767", "nvfp4", (normal(64, 64), 1))
def twice_the_step() -> Subject:
    """Add noise from -1 to 1 grid steps, not from -1/2 to 1/2, before rounding to nearest."""

    def cast(x: Tensor, seed: int) -> Quantised:
        noise = (bits(x, seed) + 0.5) / 128 - 1

        def rounded(y: Tensor) -> Tensor:
            m = y.abs().clamp(max=6)
            return e2m1(((m / step_of(m) + noise).round() * step_of(m)).clamp(0, 6))

        return nvfp4(x, rounded=rounded)

    return Subject("twice_the_step", cast_stochastic=cast)


@mutant(
    "plausible; a random addend to the mantissa, with a separate path for subnormals (pytorch/ao#3384)",
    "nvfp4",
    (normal(64, 64), 1),
)
def nearest_below_one() -> Subject:
    """Round E2M1's subnormal range, below 1, to nearest: only normal numbers get random bits."""

    def cast(x: Tensor, seed: int) -> Quantised:
        r = bits(x, seed)
        return nvfp4(x, rounded=lambda y: torch.where(y.abs() < 1, e2m1(y), drawn(y, r)))

    return Subject("nearest_below_one", cast_stochastic=cast)


@mutant("plausible; cvt.rs converts four elements with one 32-bit word", "nvfp4", (normal(64, 64), 1))
def byte_for_four() -> Subject:
    """Use one random byte for four neighbouring elements, which are converted together."""

    def cast(x: Tensor, seed: int) -> Quantised:
        r = bits(x, seed)[:, 0::4].repeat_interleave(4, 1)
        return nvfp4(x, rounded=lambda y: drawn(y, r))

    return Subject("byte_for_four", cast_stochastic=cast)


@mutant(
    "plausible; a matrix of signs times Hadamard, passed where its transpose is expected",
    "nvfp4",
    (normal(64, 64),),
)
def signs_after() -> Subject:
    """Multiply by the signs after the Hadamard transform, not before it: the transposed rotation."""
    number = torch.arange(16)
    parity = sum((number[:, None] & number) >> bit & 1 for bit in range(4))
    table = (1.0 - 2.0 * (parity % 2)) / 4 * SIGNS

    def turn(x: Tensor) -> Tensor:
        return (x.float().reshape(-1, 16) @ table).to(x.dtype).view(x.shape)

    return Subject("signs_after", rotate=turn)


def linear(
    layer: Layer,
    data: tuple[Tensor, Tensor, Tensor],
    w_turned: Callable[[Tensor], Operand] = lambda w: quantize(w.t(), SQUARE),
    x_turned: Callable[[Tensor], Tensor] = lambda x: x.t(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, dx and dw of x, w and dy, with two of the operands as a mutant makes them."""
    (x, w, dy), clock = data, layer.clock()
    g = quantize(dy, GRADIENT, clock=clock, where=1)
    h = quantize(dy.t(), GRADIENT, rotation=ROTATION, clock=clock, where=2)
    y = layer.multiply(quantize(x, NVFP4), quantize(w, SQUARE), x.dtype)
    dw = layer.multiply(h, quantize(x_turned(x), NVFP4, rotation=ROTATION), x.dtype)
    return y, layer.multiply(g, w_turned(w), x.dtype), dw


@mutant("NVIDIA/TransformerEngine#1490", "nvfp4", layer_data(64, 64))
def quantised_twice() -> Subject:
    """Compute dw from the quantised x of the forward pass, decoded and quantised again."""
    layer = Layer()

    def saved(x: Tensor) -> Tensor:
        return quantize(x, NVFP4).dequantize().to(x.dtype).t()

    return Subject("quantised_twice", product=lambda x, w, dy: linear(layer, (x, w, dy), x_turned=saved))


@mutant("vllm-project/vllm#37135", "nvfp4", layer_data(64, 64))
def factor_after_cast() -> Subject:
    """Round the accumulator to the dtype of the result, and multiply it by the outer factors then."""

    def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
        factor = alpha(a, b)
        sums = (a.values.float() @ b.values.float().t()).to(out)
        return (sums.float() * (1.0 if factor is None else factor)).to(out)

    return Subject("factor_after_cast", product=Layer(multiply).product)


@mutant(
    "plausible; NVIDIA/TransformerEngine's NVTE_NVFP4_DISABLE_2D_QUANTIZATION", "nvfp4", layer_data(64, 64)
)
def rows_in_dx() -> Subject:
    """Quantise the transposed weights of dx in blocks of 1x16, not in the squares of the forward pass."""
    layer = Layer()

    def turned(w: Tensor) -> Operand:
        return quantize(w.t(), NVFP4)

    return Subject("rows_in_dx", product=lambda x, w, dy: linear(layer, (x, w, dy), turned))


@mutant("plausible; lists of experts that have tokens, numbered from 0", "nvfp4", ONE_IDLE, hides=ALL)
def compacted_experts() -> Subject:
    """Leave out experts without tokens, and number the others anew: they use the weights before theirs."""
    layer = Layer()

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ends = torch.unique(offsets[offsets > 0])
        return layer.grouped(x, w, dy, ends)

    return Subject("compacted_experts", grouped=grouped)


@mutant(
    "plausible; NVIDIA/TransformerEngine#2769 and NVIDIA/Megatron-LM#6279 discuss when dw is added",
    "nvfp4",
    ALL,
    hides=ALL,
    before=ALL,
)
def added_gradient() -> Subject:
    """Add dw to that of the call before, if it has the same shape."""
    layer = Layer()
    earlier: dict[tuple, Tensor] = {}

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, dx, dw = layer.grouped(x, w, dy, offsets)
        key = (dw.shape, dw.dtype)
        if key in earlier:
            dw = (earlier[key].float() + dw.float()).to(dw.dtype)
        earlier[key] = dw.clone()
        return y, dx, dw

    return Subject("added_gradient", grouped=grouped)


@mutant("huggingface/kernels-community#1153", "nvfp4", ALL, hides=wide())
def overhanging_tile() -> Subject:
    """Store tiles of 128 columns of y whole: columns past the last are written into the next rows."""
    layer = Layer()

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, dx, dw = layer.grouped(x, w, dy, offsets)
        width = w.shape[1]
        past = -width % 128
        flat, first = y.reshape(-1), 0
        for expert, last in enumerate(offsets.tolist()):
            if last > first and past:
                memory = w[expert + 1 :].reshape(-1, w.shape[2])[:past]
                read = torch.zeros(past, w.shape[2], dtype=w.dtype)
                read[: len(memory)] = memory
                over = product(quantize(x[first:last], NVFP4), quantize(read, SQUARE), x.dtype)
                for row in range(first, last):
                    start = (row + 1) * width
                    room = max(min(past, last * width - start), 0)
                    flat[start : start + room] = over[row - first, :room]
            first = last
        return flat.view(y.shape), dx, dw

    return Subject("overhanging_tile", grouped=grouped)


@control("nvfp4", normal(64, 64), spread(torch.float32), with_zeros())
def by_search() -> Subject:
    """Compute NVFP4 by columns of blocks in numpy, by searching tables of midpoints; a code a byte."""
    codes = numpy.arange(127)
    scales = numpy.where(codes < 8, codes / 512, (8 + codes % 8) * 2.0 ** (codes // 8 - 10))
    grid = numpy.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def searched(table: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
        middles = (table[1:] + table[:-1]) / 2
        low, high = (numpy.searchsorted(middles, y, side) for side in ("left", "right"))
        found = numpy.where(low % 2 == 0, low, high)
        return numpy.where(numpy.isnan(y), len(table), found)

    def cast(x: Tensor) -> Quantised:
        z = x.float().numpy()
        one = numpy.float32(1)
        with numpy.errstate(all="ignore"):
            amax = numpy.float32(numpy.max(numpy.abs(z))) if z.size else numpy.float32(0)
            S = numpy.minimum(numpy.float32(2688) / amax, numpy.float32(LARGEST))
            S = one if amax == 0 or S == 0 else S
            inner = numpy.minimum(S * numpy.float32(1 / 6), numpy.float32(LARGEST))
            stored = numpy.zeros((z.shape[0], z.shape[1] // 16), numpy.uint8)
            made = numpy.zeros(z.shape, numpy.uint8)
            for column in range(stored.shape[1]):
                block = z[:, 16 * column : 16 * column + 16]
                largest = numpy.max(numpy.abs(block), axis=1) * inner
                code = searched(scales, numpy.minimum(largest, 448).astype(numpy.float64))
                s = numpy.append(scales, numpy.nan).astype(numpy.float32)[code]
                factor = numpy.minimum(one / (s * (one / S)), numpy.float32(LARGEST))[:, None]
                index = numpy.minimum(searched(grid, numpy.abs(block * factor).astype(numpy.float64)), 7)
                made[:, 16 * column : 16 * column + 16] = index + 8 * numpy.signbit(block)
                stored[:, column] = code
        outer = torch.tensor(amax * numpy.float32(1 / 2688))
        return Quantised(None, torch.from_numpy(made), torch.from_numpy(stored).view(E4M3), outer)

    return Subject("by_search", cast=cast)


@control("mxfp8", normal(64, 64), spread(torch.float32), normal(64, 64, scale=2.0**-126))
def by_multiples() -> Subject:
    """Compute MXFP8 in fp64 as multiples of each element's step; values and scales as bytes."""

    def cast(x: Tensor) -> Quantised:
        tiles = x.double().reshape(x.shape[0], -1, 32) if x.numel() else x.double().view(x.shape[0], 0, 32)
        a = tiles.abs().amax(2)
        mantissa, exponent = torch.frexp((a.float().clamp(max=LARGEST) * torch.tensor(1 / 448)).double())
        power = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
        power = torch.where(a == 0, -127, power)
        lost = a.isnan()
        s = torch.exp2(power.double())[:, :, None]
        y = (tiles / s).clamp(-448, 448)
        step = torch.exp2(torch.frexp(y.abs())[1].clamp(min=-5).double() - 4)
        codes = torch.where(lost[:, :, None] | y.isnan(), torch.nan, (y / step).round() * step)
        values = torch.where(lost[:, :, None], torch.nan, codes * s).float().view(x.shape)
        scales = torch.where(lost, 255, power + 127).to(torch.uint8)
        return Quantised(values, codes.float().to(E4M3).view(x.shape), scales.view(E8M0))

    return Subject("by_multiples", cast=cast, columns=32)


@control("nvfp4", normal(16, 16))
def summed_in_fp64() -> Subject:
    """Multiply in fp64, codes times block scales; draw like the reference; take experts last to first."""

    def multiply(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
        factor = alpha(a, b)
        sums = torch.einsum("ik,jk->ij", a.values.double(), b.values.double()).float()
        return (sums * (1.0 if factor is None else factor)).to(out)

    layer = Layer(multiply)

    def grouped(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ends = [0, *offsets.tolist()]
        y, dx, dw = torch.zeros(len(x), w.shape[1], dtype=x.dtype), torch.zeros_like(x), torch.zeros_like(w)
        busy = [expert for expert in range(len(w)) if ends[expert + 1] > ends[expert]]
        before = layer.calls
        for place, expert in reversed(list(enumerate(busy))):
            rows = slice(ends[expert], ends[expert + 1])
            layer.calls = before + place
            y[rows], dx[rows], dw[expert] = layer.product(x[rows], w[expert], dy[rows])
        layer.calls = before + len(busy)
        return y, dx, dw

    return Subject("summed_in_fp64", product=layer.product, grouped=grouped)
