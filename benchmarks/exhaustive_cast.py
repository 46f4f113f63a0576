"""Enumerate the casts, ours and those of the public libraries on a CPU, beside integer arithmetic.

    python benchmarks/exhaustive_cast.py [--csv FILE] [--quick] [NAME ...]

NAME is `ablate` (10 minutes) or a library of LIBRARIES; default: all that are installed. What is expected is
cast_oracle.py. Exit status 1 if `ablate` differs.

`ablate`: kernels and reference, by rows, by columns and, to nearest, in 16x16 tiles, bit for bit. The NVFP4
cast of an element depends on five numbers: its value, the amax of its block, the outer statistic of its
tensor, the rounding and a random byte. The amax counts only through the block's scale, an E4M3 number. So
four enumerations cover it:

1. *Block scales*: every pair of an outer statistic (32,639 positive finite bf16) and a block's amax (32,640
   finite bf16 magnitudes): 1.07e9 cases. Not in tiles; of the reference its functions of scales.
2. *Codes of E2M1*: every finite fp32 number, 4,278,190,080, to nearest, at block scale 1 and S = 1.
3. *To nearest*: every finite bf16 number (65,280) at every E4M3 scale (zero and 126), for each outer
   statistic of NEAREST: every bf16 mantissa, and the ends of the range.
4. *Stochastic*: the same with every random byte (256), for each outer statistic of STOCHASTIC: 2.1e9 cases
   each.
5. *Other forms*, by `kernels.general`: every finite bf16 number at every scale of E4M3, UE5M3 and E8M0,
   S = 1, for seven elements, to nearest and with ties away from zero; and with every random byte at scale 1.

`range.headroom` forces a block's scale: every block contains the largest bf16, which the headroom maps to the
wanted scale, so that a block may have any other number. The outer statistic is `static:v`. A random byte is
not forced: elements are put where the reference draws it, and the pairs that occur are counted. At outer
statistics below 1/4 no headroom maps the largest bf16 to the smaller scales; then a smaller one takes its
place, and larger elements, which saturate, are left out, as the number of cases says. An outer statistic
beyond `static:v`, which ends at 1e-30 and 1e30, is the tensor's largest element.

Not enumerated: NaN and infinities, which kernels leave to the reference; other outer statistics; fp32 numbers
at other scales, or stochastic; 16 and 24 random bits (the default is 8); E3M0, other scale formats,
selections, MS-EDEN, exponents of sub-blocks; rotations; GPUs; Philox itself, of which only these bytes are
compared.

The libraries compute through their own functions; +0 equals -0:

- `codes`: E2M1 of every finite fp32 number, by its own cast.
- `scales`: E4M3 block scales of every bf16 amax of a block up to the tensor's, for the tensor amaxes of
  OUTERS, by its NVFP4 quantiser; `zero scales` are those that round to zero here: conventions differ.
- `elements`: code times block scale of every bf16 number at every positive E4M3 scale, by the same
  quantiser, as far as a block can have both: the largest amax with that scale stands in each block. A block
  whose scale differs counts under `scales` alone.

Tallies are kept by chunk in the cache, by a hash of code, libraries, processor and environment, or by the
library's version: a killed run loses one chunk, and a finished one is not repeated. Seconds are CPU time. The
committed table is exhaustive_cast.csv.
"""

import argparse
import csv
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import cast_oracle
import numpy as np
import torch
from cast_oracle import ELEMENTS, LARGEST, SCALES, Cast
from libraries import LIBRARIES, library_subject
from numpy.typing import NDArray
from torch import Tensor

import ablate
from ablate.cache import key_of, root
from ablate.errors import InputError
from ablate.files import Damaged, read_json, write
from ablate.numerics import scaling
from ablate.numerics.kernels import builds, cpu, general
from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Outer, Quant, Range
from ablate.verification import passed_checks
from ablate.verification.check_result import present
from ablate.verification.conformance.numbers import read

STOCHASTIC = (2688.0, 1.0, 3.3895313892515355e38)
"""Outer statistics: S is 1; 2688; and 7.9e-36, its smallest value for bf16 tensors."""
NEAREST = (
    *(1 + mantissa / 128 for mantissa in range(128)),
    *(2688.0, 3.3895313892515355e38, 2.0**-20, 2.0**-116, 2.0**-117, 2.0**-118),
)
"""From 2^-117 down, S is FLT_MAX."""
OUTERS = tuple(0x3F80 + mantissa for mantissa in range(0, 128, 4))
"""Amaxes of the libraries' tensors, as bits of bf16: from 1 to 2."""
BLOCKS = 2**14
"""Blocks of 16 in one call, so that it stays in the cache of a core."""
FEW_BLOCKS = 4608
"""Enough blocks for every bf16 number, and whole tiles."""
CHUNK, CALL = 2**24, 15 * BLOCKS
"""Codes of a chunk, and of one call: a lane of each block has its largest element."""
COLUMNS = ("library", "version", "enumeration", "cases", "differences", "cpu_seconds", "first")


# --- tallies --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tally:
    """Cases of a chunk, those in which something differs, and the first of these in words."""

    cases: int
    differences: int = 0
    first: str = ""
    seconds: float = 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.cases + other.cases,
            self.differences + other.differences,
            self.first or other.first,
            self.seconds + other.seconds,
        )


Part = dict[str, Callable[[], Tally]]
"""Functions that count a chunk, by its name."""


class Record:
    """Tallies by part and chunk, in a file that is written anew after each chunk.

    The file has a hash of its content, so that one that was edited or torn is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tallies: dict[str, Tally] = {}
        try:
            content = read_json(path) if path.exists() else {"chunks": {}, "seal": key_of({})}
            if content["seal"] != key_of(content["chunks"]):
                raise Damaged(path, "its content is not what was written to it")
            self._tallies = {name: Tally(*values) for name, values in content["chunks"].items()}
        except (Damaged, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: cannot be trusted ({error}); delete it to enumerate anew") from None

    def of(self, part: str, chunk: str, count: Callable[[], Tally]) -> Tally:
        """Return the tally of a chunk, counted now if the file does not have it."""
        name = f"{part}: {chunk}"
        if name not in self._tallies:
            started = time.process_time()
            tally = replace(count(), seconds=round(time.process_time() - started, 3))
            self._tallies[name] = tally
            chunks = {name: [*vars(tally).values()] for name, tally in self._tallies.items()}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write(self.path, {"chunks": chunks, "seal": key_of(chunks)})
        return self._tallies[name]


def floats(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the values of bits of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


# --- what is compared -----------------------------------------------------------------------------


class Source(NamedTuple):
    """Blocks to quantise, as a matrix by rows and the same stored by columns."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> "Source":
        return cls(rows, rows.t().contiguous().t())


@dataclass(frozen=True)
class Form:
    """Quantiser of ours, at an outer statistic: S is 2688 / `outer` for each element."""

    outer: float = 2688.0
    rounding: str = "nearest"
    element: str = "e2m1"
    scale: str = "e4m3"
    general: bool = False
    """Use the kernel of all forms, and not NVFP4's."""

    @property
    def statistic(self) -> float | None:
        """The outer statistic that the quantiser is given; None for E8M0, which has none."""
        return None if self.scale == "e8m0" else self.outer * ELEMENTS[self.element][2] / 6

    @property
    def static(self) -> bool:
        """True if `static:v` takes the outer statistic; if not, it must be the tensor's largest element."""
        return 1e-30 <= self.outer <= 1e30

    def quant(self, headroom: float) -> Quant:
        """Return the quantiser with a headroom: MX blocks of 32 for E8M0, else blocks of 16."""
        outer = None
        if self.scale != "e8m0":
            outer = Outer(statistic=f"static:{self.statistic!r}") if self.static else Outer()
        return Quant(
            element=self.element,
            block="1x32" if self.scale == "e8m0" else "1x16",
            scale=BlockScale(format=self.scale),
            rounding=self.rounding,
            range=Range(headroom=headroom),
            outer=outer,
        )

    def forced(self, value: float) -> tuple[int, float]:
        """Return the bits of the largest magnitude that a block with this scale may have, and the headroom.

        The cast takes any headroom in (0, 4], and thereby every pair of element and block scale occurs: a
        block that contains the largest bf16 may contain all others.
        """
        smallest = value or SCALES[self.scale][1] / 4  # which rounds to a scale of zero
        whole = torch.tensor(float(cast_oracle.outer_scale(self.outer)))
        own = int(np.float32(self.outer).view(np.uint32)) >> 16
        for bits in (LARGEST, *range(0x7F00, 0, -0x80)) if self.static else (own,):
            largest = torch.from_numpy(floats(np.array([bits])))
            for room in (1.0, 1 + 2.0**-6, 1 - 2.0**-6):
                top = ELEMENTS[self.element][2]
                headroom = float(np.float32(smallest * room * top / (whole.item() * largest.item())))
                if 0 < headroom <= 4:
                    scale = scaling.block_scales(largest, whole.view(1), self.quant(headroom))
                    if scale.item() == value:
                        return bits, headroom
        raise ValueError(
            f"no headroom gives a block the scale {value:g} at an outer statistic {self.outer:g}"
        )

    def made(
        self, source: Source, headroom: float, clock: Clock | None = None
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield name, values and block scales of each path: the reference, and the kernels if there are any.

        Raises:
            RuntimeError: A kernel leaves these blocks to the reference.
        """
        quant = self.quant(headroom)
        rows = source.rows.reshape(-1, quant.tile[1])
        with builds.using(None):
            reference = quantize(rows, quant, clock=clock)
        yield "reference", reference.values, present(reference.block_scale)
        if builds.build() is None:
            return
        kernel = partial(cpu.quantize, statistic=self.outer)
        paths = {"rows": (rows, quant), "columns": (source.columns, quant)}
        if self.rounding == "nearest":
            paths["tiles"] = (rows, quant.model_copy(update={"block": "16x16"}))
        if self.general:
            kernel, paths = partial(general.quantize, statistic=self.statistic), {"general": (rows, quant)}
        for name, (x, form) in paths.items():
            found = kernel(x, form, 0 if self.general else None, clock, 0)
            if found is None:
                raise RuntimeError(f"the kernel `{name}` left finite blocks to the reference")
            yield name, found.values, present(found.block_scale)


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


# --- ours -----------------------------------------------------------------------------------------


def at_scale(form: Form, value: float) -> Tally:
    """Enumerate every bf16, and every byte if it rounds stochastically, at one block scale."""
    largest, headroom = form.forced(value)
    drawn = form.rounding == "stochastic"
    cast, placed = (
        Cast.of(value, form.outer, form.element),
        layout(largest, drawn, BLOCKS if drawn else FEW_BLOCKS),
    )
    tally = Tally(placed.cases)
    for number, (source, bits) in enumerate(zip(placed.sources, placed.bits, strict=True)):
        expected = (cast.away if form.rounding == "away" else cast.near)[bits]
        if drawn:
            expected = np.where(placed.bytes[number] < cast.position[bits], cast.high[bits], cast.low[bits])
        wanted = torch.from_numpy(expected)
        for name, values, scales in form.made(source, headroom, clock_of(number) if drawn else None):
            kind = f"{form.element} with {form.scale} scales, " if form.general else ""
            where = f"{name}, {kind}{form.rounding}, outer {form.outer:g}, block scale {value:g}"
            wrong = int((scales != value).sum())
            tally += Tally(0, wrong, f"{where}: {wrong} blocks have another" if wrong else "")
            got = values.reshape(-1).view(torch.int16)
            if not torch.equal(got, wanted):
                places = (got != wanted).nonzero().view(-1)
                at = int(places[0])
                byte = f", byte {placed.bytes[number][at]}" if drawn else ""
                case = f"bf16 {bits[at]:#06x} ({floats(bits[at : at + 1])[0]:g}){byte}"
                numbers = [z.view(torch.bfloat16)[at].item() for z in (got, wanted)]
                tally += Tally(0, len(places), f"{where}, {case}: {numbers[0]:g} instead of {numbers[1]:g}")
    return tally


def at_every_scale(form: Form) -> Tally:
    return sum((at_scale(form, value) for value in SCALES[form.scale]), Tally(0))


def our_codes(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each path, and its E2M1 values of fp32 numbers, at block scale 1 and S = 1."""
    form, top = Form(), float(cast_oracle.FLT_MAX)
    lane = int(x.view(torch.int32)[0]) // CALL % 16  # the largest element moves through the lanes
    others = [place for place in range(16) if place != lane]
    padded = torch.zeros(-(-len(x) // 240) * 240)  # whole tiles
    padded[: len(x)] = x
    blocks = torch.full((len(padded) // 15, 16), top)
    blocks[:, others] = padded.view(-1, 15)
    headroom = float(np.float32(6 / top))
    for name, values, scales in form.made(Source.of(blocks), headroom):
        if bool((scales != 1).any()):
            raise ValueError(
                f"{name}: a block with {top:g} and headroom {headroom:g} has another scale than 1"
            )
        yield name, values[:, others].reshape(-1)[: len(x)]


@cache
def every_amax() -> Source:
    """Return a block for each bf16 magnitude, which it has in one lane."""
    bits = torch.arange(LARGEST + 1, dtype=torch.int16)
    blocks = torch.zeros(LARGEST + 1, 16, dtype=torch.int16)
    blocks[torch.arange(LARGEST + 1), bits.long() % 16] = bits | (bits % 3 == 0).to(torch.int16) << 15
    return Source.of(blocks.view(torch.bfloat16))


def our_scales(amax: float, most: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the name of each path, and the scales of the blocks of `every_amax`."""
    magnitudes = torch.arange(LARGEST + 1, dtype=torch.int16).view(torch.bfloat16).float()
    S = scaling.encode_scale(torch.tensor(amax), Quant())
    yield "reference", scaling.block_scales(magnitudes, S, Quant()).numpy()
    for name in ("rows", "columns") if builds.build() else ():
        found = cpu.quantize(getattr(every_amax(), name), Quant(), None, None, 0, statistic=amax)
        if found is None:
            raise RuntimeError(f"the kernel `{name}` left finite blocks to the reference")
        yield name, present(found.block_scale).reshape(-1).numpy()


def own_parts() -> dict[str, Part]:
    """Return the enumerations of our casts."""
    pairs = [(element, scale) for element in ELEMENTS for scale in SCALES]
    form = partial(Form, general=True)
    return {
        "block scales": {
            f"{first:#06x}": partial(
                sum_of,
                partial(every_scale, our_scales, None),
                range(first, min(first + 128, LARGEST + 1)),
            )
            for first in range(1, LARGEST + 1, 128)
        },
        "codes of E2M1": codes_part(our_codes, exact=True),
        "to nearest": {f"{outer!r}": partial(at_every_scale, Form(outer)) for outer in NEAREST},
        **{
            f"stochastic, outer statistic {outer:.6g}": {
                f"{scale!r}": partial(at_scale, Form(outer, "stochastic"), scale) for scale in SCALES["e4m3"]
            }
            for outer in STOCHASTIC
        },
        "other forms": {
            f"{element}, {scale}, {rounding}": partial(at_every_scale, form(2688.0, rounding, element, scale))
            for element, scale in pairs
            for rounding in ("nearest", "away")
        },
        "other forms, stochastic": {
            f"{element}, {scale}": partial(at_scale, form(2688.0, "stochastic", element, scale), 1.0)
            for element, scale in pairs
        },
    }


def sum_of(count: Callable[[int], Tally], numbers: range) -> Tally:
    return sum(map(count, numbers), Tally(0))


# --- ours and the libraries' ----------------------------------------------------------------------


def every_code(codes: Callable[[Tensor], Iterator[tuple[str, Tensor]]], exact: bool, start: int) -> Tally:
    """Compare the codes of finite fp32 numbers from these bits on; `exact`: +0 differs from -0."""
    stop = min(start + CHUNK, (start & 0x80000000) + 0x7F800000)
    tally = Tally(stop - start)
    for first in range(start, stop, CALL):
        patterns = range(first, min(first + CALL, stop))
        x = np.arange(patterns.start, patterns.stop, dtype=np.uint32).view(np.float32)
        expected = floats(cast_oracle.nearest_e2m1(patterns).view(np.uint16))
        for name, values in codes(torch.from_numpy(x.copy())):
            got = values.to(torch.float32).numpy()
            differ = got.view(np.uint32) != expected.view(np.uint32) if exact else got != expected
            wrong = np.flatnonzero(differ)
            if len(wrong):
                at = wrong[0]
                case = (
                    f"fp32 {patterns.start + at:#010x} ({x[at]:.9g}): {got[at]:g} instead of {expected[at]:g}"
                )
                tally += Tally(0, len(wrong), f"{name}, {case}" if name else case)
    return tally


def codes_part(codes: Callable[[Tensor], Iterator[tuple[str, Tensor]]], exact: bool = False) -> Part:
    starts = [sign + first for sign in (0, 1 << 31) for first in range(0, 0x7F800000, CHUNK)]
    return {f"{start:#010x}": partial(every_code, codes, exact, start) for start in starts}


def every_scale(
    scales: Callable[[float, int], Iterator[tuple[str, NDArray[np.float32]]]], zero: bool | None, outer: int
) -> Tally:
    """Compare the scales of every bf16 amax of a block in a tensor with this outer statistic, by its bits.

    Args:
        scales: Yields names and scales, of the outer statistic and the bits of the largest amax.
        zero: Count those that are zero, or those that are not; None: all, also for amaxes above the outer
            statistic.
        outer: Bits of the outer statistic in bf16.
    """
    most, amax = LARGEST if zero is None else outer, float(floats(np.array([outer]))[0])
    magnitudes = cast_oracle.Numbers(*(z[: most + 1] for z in cast_oracle.bf16_magnitudes()))
    expected = cast_oracle.block_scales(magnitudes, amax).astype(np.float32)
    counted = np.ones(most + 1, dtype=bool) if zero is None else (expected == 0) == zero
    tally = Tally(int(counted.sum()))
    for name, got in scales(amax, most):
        wrong = np.flatnonzero((got != expected) & counted)
        if len(wrong):
            at = wrong[0]
            case = f"tensor amax {amax:g}, block amax {floats(wrong[:1])[0]:g}"
            text = f"{case}: {got[at]:g} instead of {expected[at]:g}"
            tally += Tally(0, len(wrong), f"{name}, {text}" if name else text)
    return tally


# --- the libraries --------------------------------------------------------------------------------

Quantiser = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From bf16 [blocks, 16] to code times block scale, fp32 alike, and block scales, fp32 [blocks]."""


def nvfp4(library: str) -> Quantiser:
    """Return a library's quantiser of NVFP4, as the conformance kit calls it."""
    cast = library_subject(library, "nvfp4").cast
    assert cast is not None

    def quantiser(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float() if library == "compressed_tensors" else x  # which computes scales in the type of x
        got = read(cast(x), *x.shape, Quant())
        codes, scales = present(got.codes), present(got.scales)
        return codes * scales, scales.view(-1)

    return quantiser


def scales_of(quantiser: Quantiser, amax: float, most: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the scales of blocks with each bf16 amax from 0 to the tensor's."""
    yield "", quantiser(every_amax().rows[: most + 1])[1].numpy()


def every_element(quantiser: Quantiser, outer: int) -> Tally:
    """Compare every bf16 number at every positive scale, in a tensor with this amax, given by its bits."""
    amax = float(floats(np.array([outer]))[0])
    [(_, theirs)] = scales_of(quantiser, amax, outer)
    magnitudes = cast_oracle.Numbers(*(z[: outer + 1] for z in cast_oracle.bf16_magnitudes()))
    ours = cast_oracle.block_scales(magnitudes, amax).astype(np.float32)
    tally = Tally(0)
    for scale in SCALES["e4m3"][1:]:
        tops = np.flatnonzero((ours == np.float32(scale)) & (theirs == ours))
        if not len(tops):
            continue
        magnitudes = np.arange(tops[-1] + 1)
        bits = np.concatenate([magnitudes, magnitudes | 0x8000])
        blocks = np.zeros((-(-len(bits) // 15) + 1, 16), dtype=np.int64)
        blocks[0], blocks[1:, 0] = outer, tops[-1]
        body = np.zeros((len(blocks) - 1) * 15, dtype=np.int64)
        body[: len(bits)] = bits
        blocks[1:, 1:] = body.reshape(-1, 15)
        x = torch.from_numpy(blocks.astype(np.uint16).view(np.int16)).view(torch.bfloat16)
        got = quantiser(x)[0].to(torch.float32).view(len(blocks), 16).numpy()[1:, 1:].reshape(-1)[: len(bits)]
        expected = floats(Cast.of(scale, amax).near.view(np.uint16)[bits])
        wrong = np.flatnonzero(got != expected)
        case = ""
        if len(wrong):
            at = wrong[0]
            case = (
                f"tensor amax {amax:g}, block scale {scale:g}, bf16 {bits[at]:#06x}"
                f" ({floats(bits[at : at + 1])[0]:g}): {got[at]:g} instead of {expected[at]:g}"
            )
        tally += Tally(len(bits), len(wrong), case)
    return tally


def library_parts(name: str) -> dict[str, Part]:
    """Return the enumerations of a library's casts."""
    codes = LIBRARIES[name].codes()
    parts = {"codes": codes_part(lambda x: iter([("", codes(x))]))}
    if "nvfp4" in (LIBRARIES[name].recipes or {}):
        quantiser = nvfp4(name)
        scales = partial(scales_of, quantiser)
        counts = {
            "scales": partial(every_scale, scales, False),
            "zero scales": partial(every_scale, scales, True),
            "elements": partial(every_element, quantiser),
        }
        for part, count in counts.items():
            parts[part] = {f"{outer:#06x}": partial(count, outer) for outer in OUTERS}
    return parts


# --- the table ------------------------------------------------------------------------------------


def enumerated(name: str, quick: bool) -> Iterator[list[object]]:
    """Yield the rows of ours or of a library, counting what its record lacks; `quick`: a chunk of each."""
    if name == "ablate":
        checked = passed_checks.subject()
        kept = {one: checked[one] for one in ("files", "libraries", "python", "processor", "environment")}
        release, key, parts = ablate.__version__, key_of(kept), own_parts()
    else:
        release = key = LIBRARIES[name].version
        parts = library_parts(name)
    record = Record(root() / "exhaustive" / f"{name}-{key}{'-quick' if quick else ''}.json")
    for part, chunks in parts.items():
        names = [*chunks][: 1 if quick else None]
        tally = sum((record.of(part, chunk, chunks[chunk]) for chunk in names), Tally(0))
        yield [name, release, part, tally.cases, tally.differences, round(tally.seconds, 1), tally.first]


def main() -> None:
    known = ["ablate", *(name for name, library in LIBRARIES.items() if library.codes)]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument("--quick", action="store_true", help="one chunk of each enumeration")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"no such library: {', '.join(unknown)}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if builds.build() is None:
        print("ablate has no compiled quantisers here: the reference alone is enumerated", file=sys.stderr)
    table: list[list[object]] = [[*COLUMNS]]
    for name in options.names or known:
        if name != "ablate" and LIBRARIES[name].version is None:
            print(f"{name}: not installed", file=sys.stderr)
            continue
        for row in enumerated(name, options.quick):
            print(*row, sep="\t", flush=True)
            table.append(row)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)
    sys.exit(any(row[0] == "ablate" and row[4] for row in table[1:]))


if __name__ == "__main__":
    main()
