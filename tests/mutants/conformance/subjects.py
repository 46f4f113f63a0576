"""Building blocks of the mutants: data that show a fault, the reference in steps, and the sets."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.philox import Clock
from ablate.numerics.product import product
from ablate.numerics.quantize import Operand, pad, quantize
from ablate.numerics.rounding import nearest
from ablate.numerics.scaling import block_amax, block_scales, element_scales, encode_scale
from ablate.numerics.select import Candidate, mse, scales
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select
from ablate.numerics.stored import pack
from ablate.verification.conformance.subject import Quantised, Subject

NVFP4 = Quant()
SQUARE = Quant(block="16x16")
GRADIENT = Quant(rounding="stochastic")
OVER_SIX = Quant(select=Select(among="scales"), outer=Outer(bound=256.0))
MXFP4 = Quant(
    block="1x32", scale=BlockScale(format="e8m0", rounding="floor"), outer=None, range=Range(map_to=4.0)
)
MXFP8 = Quant(
    element="e4m3", block="1x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None, range=Range()
)
ROTATION = Hadamard()
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Steps = Callable[..., Tensor]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Return normal numbers."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (drawn * scale).to(dtype)


def spread(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return 64 rows of 64 normal numbers, row r times 2^-r."""
    return (normal(64, 64, dtype=torch.float32) * torch.exp2(-torch.arange(64.0))[:, None]).to(dtype)


def with_zeros() -> Tensor:
    """Return normal numbers with a block of zeros."""
    x = normal(16, 64)
    x[3, 16:32] = 0
    return x


def skewed() -> Tensor:
    """Return normal numbers whose largest magnitude, 20, is negative."""
    x = normal(32, 64)
    x[5, 7] = -20
    return x


def layer_data(tokens: int, width: int, out: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, w and dy."""
    return (
        normal(tokens, width),
        normal(out, width, seed=1, scale=0.1),
        normal(tokens, out, seed=2, scale=0.01),
    )


def expert_data(ends: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, w, dy and offsets of four experts."""
    x, _, dy = layer_data(ends[-1], 64)
    return x, normal(4, 64, 64, seed=3, scale=0.1), dy, torch.tensor(ends, dtype=torch.int32)


ALL, ONE_IDLE = expert_data((16, 48, 64, 96)), expert_data((16, 48, 48, 96))


@dataclass(frozen=True)
class Mutant:
    """Faulty subject: where its fault was reported, and data that show it. Its docstring says what is wrong."""

    source: str
    recipe: str
    subject: Callable[[], Subject]
    shows: tuple
    """Arguments of the subject's function with which it differs from the reference."""
    hides: tuple | None = None
    """Arguments with which it is equal to the reference, if it is on ordinary data."""
    before: tuple | None = None
    """Arguments of an earlier call."""


@dataclass(frozen=True)
class Control:
    """Correct subject, the recipe it follows, and arguments with which it is compared with the reference."""

    recipe: str
    subject: Callable[[], Subject]
    data: tuple[Tensor, ...]
    own_draws: bool = False
    """Draws other bits than the reference, so that only the mean of its stochastic casts is compared."""


Made = Callable[[], Subject]


class MutantSet:
    """Mutants and controls that were written down together, by the names of their functions."""

    def __init__(self) -> None:
        self.mutants: dict[str, Mutant] = {}
        self.controls: dict[str, Control] = {}

    def mutant(
        self, source: str, recipe: str, shows: tuple, hides: tuple | None = None, before: tuple | None = None
    ) -> Callable[[Made], Made]:
        """Return a decorator that enters a faulty subject."""

        def entered(made: Made) -> Made:
            self.mutants[made.__name__] = Mutant(source, recipe, made, shows, hides, before)
            return made

        return entered

    def control(self, recipe: str, *data: Tensor, own_draws: bool = False) -> Callable[[Made], Made]:
        """Return a decorator that enters a correct subject."""

        def entered(made: Made) -> Made:
            self.controls[made.__name__] = Control(recipe, made, data, own_draws)
            return made

        return entered


def packaged(operand: Operand) -> Quantised:
    """Return codes, scales and factor of a quantised operand that kept its intermediate tensors."""
    quant = operand.quant
    assert quant is not None
    assert operand.codes is not None
    assert operand.block_scale is not None
    blocks = operand.block_scale[:, 0, :, 0]
    codes = pack(operand.codes) if quant.four_bits else operand.codes.to(E4M3)
    outer = None if operand.amax is None else operand.amax * (1.0 / torch.tensor(operand.divisor))
    stored = blocks.to(E8M0 if quant.scale and quant.scale.format == "e8m0" else E4M3)
    return Quantised(operand.dequantize(), codes, stored, outer, operand.amax)


def reference(x: Tensor, quant: Quant = NVFP4, seed: int | None = None) -> Quantised:
    """Return the reference's cast of x; `seed` is that of a stochastic one."""
    clock = None if seed is None else Clock(seed)
    return packaged(quantize(x, quant, clock=clock, keep=True))


def stepwise(
    x: Tensor,
    quant: Quant = NVFP4,
    *,
    amax: Steps = lambda tiles: block_amax(tiles).amax(),
    encoded: Steps = encode_scale,
    blocks: Steps = block_scales,
    factor: Steps = lambda s, S, exact: element_scales(s, S),
    rounded: Steps = lambda scaled, grid: nearest(scaled, grid),
) -> Quantised:
    """Return a cast in the specification's steps, of which a mutant replaces one.

    Args:
        x: [rows, columns], whole blocks.
        quant: Format and scaling.
        amax: Outer statistic of fp32 tiles.
        encoded: S, of the statistic and `quant`.
        blocks: Block scales, of block maxima, S and `quant`.
        factor: Factor of the elements, of block scales, S and the scales before their rounding.
        rounded: Grid values, of scaled elements and the grid.
    """
    high, wide = quant.tile
    rows, columns = x.shape
    if not x.numel():
        return reference(x, quant)
    padded = pad(x, high, wide).to(torch.float32).contiguous()
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    largest = block_amax(tiles)
    outer = None if quant.outer is None else amax(tiles)
    S = torch.ones(()) if outer is None else encoded(outer, quant)
    top = quant.range.map_to or ELEMENTS[quant.element].max
    s = blocks(largest, S, quant)
    scaled = tiles * factor(s, S, largest * (S * torch.full_like(S, 1 / top)))
    codes = rounded(scaled, ELEMENTS[quant.element])
    operand = Operand((codes * s).view(padded.shape)[:rows, :columns], quant, outer, s)
    return packaged(replace(operand, codes=codes.view(padded.shape)[:rows, :columns]))


class Layer:
    """The reference's three products of a linear layer by the recipe nvfp4, and those of experts.

    Each call draws other bits for dy. `multiply` makes a product of two operands.
    """

    def __init__(self, multiply: Callable[[Operand, Operand, torch.dtype], Tensor] = product) -> None:
        self.multiply, self.calls = multiply, 0

    def clock(self) -> Clock:
        """Return the time of the next call."""
        self.calls += 1
        return Clock(0, micro_batch=self.calls)

    def product(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, dx and dw."""
        clock = self.clock()
        y = self.multiply(quantize(x, NVFP4), quantize(w, SQUARE), x.dtype)
        g = quantize(dy, GRADIENT, clock=clock, where=1)
        dx = self.multiply(g, quantize(w.t(), SQUARE), x.dtype)
        turned = quantize(dy.t(), GRADIENT, rotation=ROTATION, clock=clock, where=2)
        return y, dx, self.multiply(turned, quantize(x.t(), NVFP4, rotation=ROTATION), x.dtype)

    def grouped(
        self, x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor, dw: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return y, dx and dw of experts; `dw` is the memory that experts with tokens are written to."""
        dw = torch.zeros_like(w) if dw is None else dw
        y, dx = x.new_zeros(x.shape[0], w.shape[1]), torch.zeros_like(x)
        first = 0
        for expert, last in enumerate(offsets.tolist()):
            if last > first:
                rows = slice(first, last)
                y[rows], dx[rows], dw[expert] = self.product(x[rows], w[expert], dy[rows])
            first = last
        return y, dx, dw


def over_six(x: Tensor, decoded: Steps) -> Quantised:
    """Return Four Over Six's cast, whose candidates' values for scoring are `decoded`."""
    tiles = x.float().contiguous().view(x.shape[0], 1, -1, 16)
    largest = block_amax(tiles)
    amax = largest.amax()
    S = encode_scale(amax, OVER_SIX)
    six, four = scales(tiles, largest, S, OVER_SIX)
    errors = [mse(decoded(one.codes * one.block_scale, amax, S) - tiles) for one in (six, four)]
    better = errors[1] < errors[0]
    pairs = ((six.block_scale, four.block_scale), (six.scaled, four.scaled), (six.codes, four.codes))
    best = Candidate(*(torch.where(better, new, old) for old, new in pairs))
    operand = Operand((best.codes * best.block_scale).view(x.shape), OVER_SIX, amax, best.block_scale)
    return packaged(replace(operand, codes=best.codes.view(x.shape)))
