"""Enumerate the casts of the public libraries on a CPU, beside integer arithmetic.

    python benchmarks/exhaustive_cast.py [--csv FILE] [LIBRARY ...]

Each library that is installed (requirements.txt, ml_dtypes, gfloat) computes through its own functions:

- `codes`: E2M1 of every finite fp32 number (4,278,190,080), by its own cast.
- `scales`: E4M3 block scales of every bf16 amax of a block up to the tensor's, for the tensor amaxes of
  OUTERS, by its NVFP4 quantiser; `zero scales` are those that round to zero here: conventions differ.
- `elements`: code times block scale of every bf16 number at every positive E4M3 scale, by the same
  quantiser, as far as a block can have both: the largest amax with that scale stands in each block.

What is expected is ablate/verification/cast_oracle.py, with which `ablate doctor --exhaustive` compares our
kernels. +0 equals -0. A block whose scale differs counts under `scales` alone. Counts are kept by chunk in
the cache, so that a killed run continues; seconds are CPU time. The committed table is exhaustive_cast.csv.
"""

import argparse
import csv
import importlib
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ablate.cache import root
from ablate.numerics.spec import Quant
from ablate.verification import cast_oracle
from ablate.verification.cast_oracle import SCALES, Cast
from ablate.verification.check_result import present
from ablate.verification.conformance.libraries import SUBJECTS, library_subject
from ablate.verification.conformance.numbers import read
from ablate.verification.enumeration import Record, Tally
from ablate.verification.peer_comparison import quiet, shells, version
from ablate.verification.peers import te_reference

OUTERS = tuple(0x3F80 + mantissa for mantissa in range(0, 128, 4))
"""Amaxes of tensors, as bits of bf16: from 1 to 2."""
CHUNK, CALL = 2**24, 2**16
COLUMNS = ("library", "version", "enumeration", "cases", "differences", "cpu_seconds", "first")
Codes = Callable[[Tensor], Tensor]
"""From fp32 [n] to E2M1 values, of any float dtype."""
Quantiser = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From bf16 [blocks, 16] to code times block scale, fp32 alike, and block scales, fp32 [blocks]."""


# --- the libraries --------------------------------------------------------------------------------


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


def transformer_engine() -> Codes:
    te = te_reference().nvfp4
    return lambda x: te.cast_from_fp4x2(te.cast_to_fp4x2(x.view(1, -1)), torch.float32).view(-1)


def ml_dtypes() -> Codes:
    kind = importlib.import_module("ml_dtypes").float4_e2m1fn
    return lambda x: torch.from_numpy(x.numpy().astype(kind).astype(np.float32))


def gfloat() -> Codes:
    gf, formats = importlib.import_module("gfloat"), importlib.import_module("gfloat.formats")
    cast = partial(gf.round_ndarray, formats.format_info_ocp_e2m1, rnd=gf.RoundMode.TiesToEven, sat=True)
    return lambda x: torch.from_numpy(cast(x.double().numpy()))


def torchao() -> Codes:
    with quiet():
        kernels = importlib.import_module("torchao.prototype.mx_formats.kernels")
    return lambda x: kernels.f4_unpacked_to_f32(kernels.f32_to_f4_unpacked(x))


def fouroversix() -> Codes:
    with shells("fouroversix", "quantize", "quantize.pytorch"):
        return importlib.import_module("fouroversix.quantize.pytorch.reference").fake_quantize_to_e2m1


def compressed_tensors() -> Codes:
    return importlib.import_module("compressed_tensors.quantization.quant_args").FP4_E2M1_DATA.cast_to_fp4


def modelopt() -> Codes:
    tensors = importlib.import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor
    values = torch.tensor([*(v := [0, 0.5, 1, 1.5, 2, 3, 4, 6]), *(-z for z in v)])
    return lambda x: values[tensors._cast_fp4(x.clone()).int()]


LIBRARIES: dict[str, Callable[[], Codes]] = {
    "ml_dtypes": ml_dtypes,
    "torchao": torchao,
    "fouroversix": fouroversix,
    "transformer_engine": transformer_engine,
    "compressed_tensors": compressed_tensors,
    "modelopt": modelopt,
    "gfloat": gfloat,
}
"""Casts to E2M1 by the name under which each package is imported."""


# --- the enumerations -----------------------------------------------------------------------------


def floats(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the values of bits of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def every_code(codes: Codes, start: int) -> Tally:
    """Compare the codes of finite fp32 numbers from these bits on."""
    stop = min(start + CHUNK, (start & 0x80000000) + 0x7F800000)
    tally = Tally(stop - start)
    for first in range(start, stop, CALL):
        patterns = range(first, min(first + CALL, stop))
        x = np.arange(patterns.start, patterns.stop, dtype=np.uint32).view(np.float32)
        expected = floats(cast_oracle.nearest_e2m1(patterns).view(np.uint16))
        got = codes(torch.from_numpy(x.copy())).to(torch.float32).numpy()
        wrong = np.flatnonzero(got != expected)
        if len(wrong):
            at = wrong[0]
            case = f"fp32 {patterns.start + at:#010x} ({x[at]:.9g}): {got[at]:g} instead of {expected[at]:g}"
            tally += Tally(0, len(wrong), case)
    return tally


def scales_of(quantiser: Quantiser, outer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the scales of blocks with each bf16 amax from 0 to the tensor's: the library's, and ours."""
    blocks = torch.zeros(outer + 1, 16, dtype=torch.int16)
    blocks[:, 3] = torch.arange(outer + 1, dtype=torch.int16)
    theirs = quantiser(blocks.view(torch.bfloat16))[1].numpy()
    magnitudes = cast_oracle.Numbers(*(z[: outer + 1] for z in cast_oracle.bf16_magnitudes()))
    return theirs, cast_oracle.block_scales(magnitudes, float(floats(np.array([outer]))[0])).astype(
        np.float32
    )


def every_scale(quantiser: Quantiser, zero: bool, outer: int) -> Tally:
    """Compare the scales, zero or not, of every bf16 amax of a block in a tensor with this amax."""
    theirs, ours = scales_of(quantiser, outer)
    counted = (ours == 0) == zero
    wrong = np.flatnonzero((theirs != ours) & counted)
    case = ""
    if len(wrong):
        at = wrong[0]
        amaxes = f"tensor amax {floats(np.array([outer]))[0]:g}, block amax {floats(wrong[:1])[0]:g}"
        case = f"{amaxes}: {theirs[at]:g} instead of {ours[at]:g}"
    return Tally(int(counted.sum()), len(wrong), case)


def every_element(quantiser: Quantiser, outer: int) -> Tally:
    """Compare every bf16 number at every positive scale, in a tensor with this amax, given by its bits."""
    theirs, ours = scales_of(quantiser, outer)
    amax = float(floats(np.array([outer]))[0])
    tally = Tally(0)
    for scale in SCALES[1:]:
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


def installed(name: str) -> str | None:
    """Return the installed version of a library, or None; imports nothing."""
    return SUBJECTS[name].version if name in SUBJECTS else version(name)


def enumerated(name: str, quick: bool) -> list[list[object]]:
    """Return the rows of a library, counting what its record lacks; `quick` takes one chunk of each."""
    codes, release = LIBRARIES[name](), installed(name)
    record = Record(root() / "exhaustive" / f"{name}-{release}{'-quick' if quick else ''}.json")
    signs = (0,) if quick else (0, 1 << 31)
    starts = [sign + first for sign in signs for first in range(0, 0x7F800000, CHUNK)]
    parts = {"codes": {f"{start:#010x}": partial(every_code, codes, start) for start in starts}}
    if name in SUBJECTS and "nvfp4" in SUBJECTS[name].recipes:
        quantiser = nvfp4(name)
        counts = {
            "scales": partial(every_scale, quantiser, False),
            "zero scales": partial(every_scale, quantiser, True),
            "elements": partial(every_element, quantiser),
        }
        for part, count in counts.items():
            parts[part] = {f"{outer:#06x}": partial(count, outer) for outer in OUTERS}
    rows = []
    with record.held():
        for part, chunks in parts.items():
            names = ["0x3f000000"] if quick and part == "codes" else [*chunks][: 1 if quick else None]
            tally = sum((record.of(part, chunk, chunks[chunk]) for chunk in names), Tally(0))
            rows.append(
                [name, release, part, tally.cases, tally.differences, round(tally.seconds, 1), tally.first]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--csv", type=Path, help="file for the table")
    parser.add_argument("--quick", action="store_true", help="one chunk of each enumeration")
    parser.add_argument(
        "libraries", nargs="*", metavar="LIBRARY", help=f"of {', '.join(LIBRARIES)}; default: all"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.libraries if name not in LIBRARIES]:
        parser.error(f"no such library: {', '.join(unknown)}; there are {', '.join(LIBRARIES)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table: list[list[object]] = [[*COLUMNS]]
    for name in options.libraries or LIBRARIES:
        if installed(name) is None:
            print(f"{name}: not installed", file=sys.stderr)
            continue
        for row in enumerated(name, options.quick):
            print(*row, sep="\t", flush=True)
            table.append(row)
    if options.csv:
        with options.csv.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


if __name__ == "__main__":
    main()
