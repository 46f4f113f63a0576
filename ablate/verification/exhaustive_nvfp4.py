"""Every case of NVFP4's cast, in chunks; exhaustive.py says which cases these are.

`range.headroom` forces a block's scale: every block contains the largest bf16, which the headroom maps to the
wanted scale, so that a block may have any other number. The outer statistic is `static:v`. A random byte is
not forced: elements are put where the reference draws it, and the pairs that occur are counted. At outer
statistics below 1/4 no headroom maps the largest bf16 to the smaller scales; then a smaller one takes its
place, and larger elements, which saturate, are left out. An outer statistic beyond `static:v`, which ends at
1e-30 and 1e30, is the tensor's largest element.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ablate.numerics import scaling
from ablate.numerics.kernels import builds, cpu
from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Outer, Quant, Range
from ablate.verification import cast_oracle
from ablate.verification.cast_oracle import LARGEST, SCALES, Cast
from ablate.verification.check_result import present
from ablate.verification.enumeration import Part, Tally

STOCHASTIC = (2688.0, 1.0, 3.3895313892515355e38)
"""Outer statistics: S is 1; 2688; and 7.9e-36, its smallest value for bf16 tensors."""
NEAREST = (
    *(1 + mantissa / 128 for mantissa in range(128)),
    *(2688.0, 3.3895313892515355e38, 2.0**-20, 2.0**-116, 2.0**-117, 2.0**-118),
)
"""From 2^-117 down, S is FLT_MAX."""
BLOCKS = 2**14
"""Blocks of 16 in one call, so that it stays in the cache of a core."""
FEW_BLOCKS = 4608
"""Enough blocks for every bf16 number, and whole tiles."""
_OUTERS_A_CHUNK = 128
_FP32_A_CHUNK = 2**24
_ONE = (2688.0, 1.0)
"""Outer statistic and block scale at which elements keep their values."""


# --- what is compared -----------------------------------------------------------------------------


class Source(NamedTuple):
    """Blocks to quantise, as a matrix by rows and the same stored by columns."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Source":
        return cls(rows, rows.t().contiguous().t())


def made(
    source: Source, quant: Quant, amax: float, clock: Clock | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, values and block scales of each path: the kernels, if there are any, and the reference.

    Raises:
        RuntimeError: A kernel leaves these blocks to the reference.
    """
    with builds.using(None):
        reference = quantize(source.rows, quant, clock=clock)
    yield "reference", reference.values, present(reference.block_scale)
    if builds.build() is None:
        return
    paths = {"rows": (source.rows, quant), "columns": (source.columns, quant)}
    if quant.rounding == "nearest":
        paths["tiles"] = (source.rows, quant.model_copy(update={"block": "16x16"}))
    for name, (x, form) in paths.items():
        found = cpu.quantize(x, form, None, clock, 0, statistic=amax)
        if found is None:
            raise RuntimeError(f"the kernel `{name}` left finite blocks to the reference")
        yield name, found.values, present(found.block_scale)


def form(amax: float, headroom: float, drawn: bool) -> Quant:
    """Return NVFP4 with a headroom, at an outer statistic."""
    return Quant(
        rounding="stochastic" if drawn else "nearest",
        range=Range(headroom=headroom),
        outer=Outer(statistic=f"static:{amax!r}") if given(amax) else Outer(),
    )


def given(amax: float) -> bool:
    """Return True if `static:v` takes this; if not, it must be the tensor's largest element."""
    return 1e-30 <= amax <= 1e30


def compared(
    source: Source,
    quant: Quant,
    amax: float,
    scale: float,
    expected: NDArray[np.int16],
    clock: Clock | None,
    case: Callable[[int], str],
) -> Tally:
    """Compare every path with expected values, bits of bf16 like `source`; the tally counts no cases."""
    tally = Tally(0)
    wanted = torch.from_numpy(expected)
    by_columns = wanted.view_as(source.rows).t().contiguous()
    for name, values, scales in made(source, quant, amax, clock):
        where = f"{name}, outer {amax:g}, block scale {scale:g}"
        # Equal columns are seen where they are stored, which is faster; a difference is found by rows.
        agree = name == "columns" and torch.equal(values.t().view(torch.int16), by_columns)
        tally += differences(where, scale, scales, None if agree else values, wanted, case)
    return tally


def differences(
    where: str,
    scale: float,
    scales: Tensor,
    values: Tensor | None,
    wanted: Tensor,
    case: Callable[[int], str],
) -> Tally:
    """Count block scales other than `scale`, and values other than wanted; the tally counts no cases.

    Args:
        where: Path, form and scale, in words.
        scale: Scale that every block should have.
        scales: Block scales.
        values: bf16 results; None if they are known to be right.
        wanted: Expected bits, int16 [n].
        case: Gives the element at a place in words.
    """
    wrong = int((scales != scale).sum())
    tally = Tally(0, wrong, f"{where}: {wrong} blocks have another" if wrong else "")
    if values is None or torch.equal(got := values.reshape(-1).view(torch.int16), wanted):
        return tally
    places = (got != wanted).nonzero().view(-1)
    at = int(places[0])
    numbers = [z.view(torch.bfloat16)[at].item() for z in (got, wanted)]
    return tally + Tally(0, len(places), f"{where}, {case(at)}: {numbers[0]:g} instead of {numbers[1]:g}")


# --- where the elements stand ---------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Every finite bf16 up to a magnitude, in blocks that each contain that; with every byte, if drawn."""

    sources: tuple[Source, ...]
    bits: tuple[NDArray[np.intp], ...]
    """Bits of the elements of each source, flat."""
    bytes: tuple[NDArray[np.uint8], ...]
    """Random bytes of the elements of each source; empty if nothing is drawn."""
    cases: int
    """Distinct elements, or pairs of element and byte, that occur."""


def clock_of(number: int) -> Clock:
    """Return the clock of a layout's source."""
    return Clock(0, step=number)


def _free(blocks: int) -> NDArray[np.bool_]:
    """Return the places beside each block's largest element, which moves through the lanes."""
    free = np.ones((blocks, 16), dtype=bool)
    free[np.arange(blocks), np.arange(blocks) % 16] = False
    return free.reshape(-1)


@lru_cache(maxsize=2)
def layout(largest: int, drawn: bool, blocks: int = BLOCKS) -> Layout:
    """Return the layout of elements up to a magnitude, given by its bits, in matrices of so many blocks."""
    magnitudes = np.arange(largest + 1, dtype=np.uint16)
    elements = np.concatenate([magnitudes, magnitudes | 0x8000])
    free = np.flatnonzero(_free(blocks))
    draws: list[NDArray[np.uint8]] = []
    counts = np.zeros(256, dtype=np.int64)
    while drawn and counts.min() < len(elements):
        with builds.using(None):
            bits = random_bits(clock_of(len(draws)), 0, blocks, 16, 8, torch.device("cpu"))
        draws.append(bits.numpy().astype(np.uint8).reshape(-1))
        counts += np.bincount(draws[-1][free], minlength=256)
    number = len(draws) or -(-len(elements) // len(free))
    patterns = np.zeros((number, blocks * 16), dtype=np.uint16)
    places = (np.arange(number)[:, None] * patterns.shape[1] + free).reshape(-1)
    if drawn:
        byte = np.concatenate(draws)[places]
        order = places[np.argsort(byte, kind="stable")]
        starts = np.concatenate([[0], counts.cumsum()[:-1]])
        chosen = order[(starts[:, None] + np.arange(len(elements))).reshape(-1)]
        patterns.reshape(-1)[chosen] = np.tile(elements, 256)
    else:
        patterns.reshape(-1)[places[: len(elements)]] = elements
    pairs = patterns.reshape(-1)[places].astype(np.int64)
    seen = np.zeros(2**24, dtype=bool)
    seen[pairs << 8 | byte if drawn else pairs << 8] = True
    patterns[:, ~_free(blocks)] = largest
    sources = tuple(
        Source.of(torch.from_numpy(row.view(np.int16)).view(torch.bfloat16).view(blocks, 16))
        for row in patterns
    )
    return Layout(
        sources, tuple(row.astype(np.intp) for row in patterns), tuple(draws), int(np.count_nonzero(seen))
    )


def largest_of(scale: float, amax: float) -> tuple[int, float]:
    """Return the bits of the largest magnitude that a block with this scale may have, and the headroom."""
    own = int(np.float32(amax).view(np.uint32)) >> 16
    for bits in (LARGEST, *range(0x7F00, 0, -0x80)) if given(amax) else (own,):
        value = np.array([bits << 16], dtype=np.uint32).view(np.float32)[0]
        headroom = cast_oracle.forced_headroom(scale, amax, float(value))
        if headroom is not None:
            return bits, headroom
    raise ValueError(f"no headroom gives a block the scale {scale:g} at an outer statistic of {amax:g}")


# --- the parts ------------------------------------------------------------------------------------


def _at_scale(scale: float, amax: float, drawn: bool, blocks: int = BLOCKS) -> Tally:
    """Enumerate every bf16, and every byte, at a block scale and an outer statistic."""
    largest, headroom = largest_of(scale, amax)
    quant, cast = form(amax, headroom, drawn), Cast.of(scale, amax)
    placed = layout(largest, drawn, blocks)
    tally = Tally(placed.cases)
    for number, (source, bits) in enumerate(zip(placed.sources, placed.bits, strict=True)):
        drawn_bytes = placed.bytes[number] if drawn else None
        expected = cast.near[bits]
        if drawn_bytes is not None:
            expected = np.where(drawn_bytes < cast.position[bits], cast.high[bits], cast.low[bits])
        case = partial(case_of, bits, drawn_bytes)
        clock = clock_of(number) if drawn else None
        tally += compared(source, quant, amax, scale, expected, clock, case)
    return tally


def case_of(bits: NDArray[np.intp], drawn: NDArray[np.uint8] | None, at: int) -> str:
    """Return the element at a place, and its random byte, in words."""
    value = np.array([bits[at] << 16], dtype=np.uint32).view(np.float32)[0]
    return f"bf16 {bits[at]:#06x} ({value:g})" + ("" if drawn is None else f", byte {drawn[at]}")


def _nearest(amax: float) -> Tally:
    return sum((_at_scale(scale, amax, False, FEW_BLOCKS) for scale in SCALES), Tally(0))


@cache
def _every_amax() -> tuple[Source, Tensor, cast_oracle.Numbers]:
    """Return a block for each bf16 magnitude, which it has in one lane; the magnitudes, twice."""
    bits = torch.arange(LARGEST + 1, dtype=torch.int16)
    blocks = torch.zeros(LARGEST + 1, 16, dtype=torch.int16)
    blocks[torch.arange(LARGEST + 1), bits.long() % 16] = bits | (bits % 3 == 0).to(torch.int16) << 15
    magnitudes = bits.view(torch.bfloat16).to(torch.float32)
    return Source.of(blocks.view(torch.bfloat16)), magnitudes, cast_oracle.bf16_magnitudes()


def _scales(outers: range) -> Tally:
    """Enumerate the scales of every block amax for outer statistics, given by their bits in bf16."""
    source, magnitudes, numbers = _every_amax()
    tally = Tally(0)
    for bits in outers:
        amax = magnitudes[bits].item()
        expected = torch.from_numpy(cast_oracle.block_scales(numbers, amax)).to(torch.float32)
        found = {
            "reference": scaling.block_scales(
                magnitudes, scaling.encode_scale(magnitudes[bits], Quant()), Quant()
            )
        }
        for name in ("rows", "columns") if builds.build() else ():
            result = cpu.quantize(getattr(source, name), Quant(), None, None, 0, statistic=amax)
            if result is None:
                raise RuntimeError(f"the kernel `{name}` left finite blocks to the reference")
            found[name] = present(result.block_scale).reshape(-1)
        tally += Tally(len(magnitudes))
        for name, scales in found.items():
            if not torch.equal(scales, expected):
                wrong = (scales != expected).nonzero().view(-1)
                at = int(wrong[0])
                words = f"{name}, outer {amax:g}, block amax {magnitudes[at].item():g} ({at:#06x})"
                tally += Tally(
                    0, len(wrong), f"{words}: {scales[at].item():g} instead of {expected[at].item():g}"
                )
    return tally


def _every_fp32(start: int) -> Tally:
    """Enumerate the codes of finite fp32 numbers from these bits on."""
    amax, scale = _ONE
    top = float(cast_oracle.FLT_MAX)
    quant = form(amax, present(cast_oracle.forced_headroom(scale, amax, top)), False)
    stop = min(start + _FP32_A_CHUNK, (start & 0x80000000) + 0x7F800000)
    tally = Tally(stop - start)
    for number, first in enumerate(range(start, stop, 15 * BLOCKS)):
        patterns = range(first, min(first + 15 * BLOCKS, stop))
        lane = number % 16
        others = [place for place in range(16) if place != lane]
        x = torch.full((BLOCKS, 16), top)
        expected = np.full((BLOCKS, 16), 0x40C0, dtype=np.int16)
        bits = np.zeros(15 * BLOCKS, dtype=np.uint32)
        bits[: len(patterns)] = np.arange(patterns.start, patterns.stop, dtype=np.uint32)
        codes = np.zeros(15 * BLOCKS, dtype=np.int16)
        codes[: len(patterns)] = cast_oracle.nearest_e2m1(patterns)
        x[:, others] = torch.from_numpy(bits.view(np.float32)).view(BLOCKS, 15)
        expected[:, others] = codes.reshape(BLOCKS, 15)
        values = x.numpy().reshape(-1)
        case = partial(_fp32_case, values)
        tally += compared(Source.of(x), quant, amax, scale, expected.reshape(-1), None, case)
    return tally


def _fp32_case(values: NDArray[np.float32], at: int) -> str:
    return f"fp32 {int(values[at].view(np.uint32)):#010x} ({values[at]:g})"


def parts(stochastic: Sequence[float] = STOCHASTIC, nearest: Sequence[float] = NEAREST) -> list[Part]:
    """Return all enumerations, in the order in which they run."""
    outers = [
        range(first, min(first + _OUTERS_A_CHUNK, LARGEST + 1))
        for first in range(1, LARGEST + 1, _OUTERS_A_CHUNK)
    ]
    fp32 = [sign << 31 | first for sign in (0, 1) for first in range(0, 0x7F800000, _FP32_A_CHUNK)]
    every = "every finite bf16 at every E4M3 scale"
    return [
        Part(
            "Block scales",
            "every outer statistic and block amax in bf16",
            {f"{outer.start:#06x}": partial(_scales, outer) for outer in outers},
        ),
        Part(
            "Codes of E2M1",
            "every finite fp32, to nearest",
            {f"{start:#010x}": partial(_every_fp32, start) for start in fp32},
        ),
        Part(
            f"To nearest: {every}",
            f"{len(nearest)} outer statistics",
            {f"{amax!r}": partial(_nearest, amax) for amax in nearest},
        ),
        *(
            Part(
                f"Stochastic: {every}, with every random byte",
                f"outer statistic {amax:.6g}",
                {f"{scale!r}": partial(_at_scale, scale, amax, True) for scale in SCALES},
            )
            for amax in stochastic
        ),
    ]
