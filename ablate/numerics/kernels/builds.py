"""Compiled CPU kernels as ctypes sees them: the builds, their functions, and the structures that these take.

A build is all C files of this folder for one instruction set. None is needed: the reference computes the same
bits.
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

LEVELS = {"AVX512": "x86_64_v4", "AVX2": "x86_64_v3"}
"""Torch's name for what this CPU can do, and the compiler's; anything else runs the portable build."""
FOLDER = Path(__file__).parent


class CastArguments(ctypes.Structure):
    """Arguments of one cast: `spec` in nvfp4.c."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("bound", "headroom")),
        *((name, ctypes.c_int32) for name in ("bf16", "stochastic", "rotated")),
        ("signs", ctypes.c_uint32),
        *(("key", ctypes.c_uint32 * 2), ("clock", ctypes.c_uint32 * 3)),
        *((name, ctypes.c_float) for name in ("amax", "largest", "multiplier", "inverse")),
    )


SUMS = ("power", "error", "inner", "quantised_power", "fourth")
COUNTS = ("zeros", "saturated", "clipped")


class Sums(ctypes.Structure):
    """Arguments and results of a census: `sums` in census.c."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("amax", "inverse", "factor")),
        *((name, ctypes.c_int32) for name in ("bf16", "tile_rows", "tile_columns")),
        *((name, ctypes.c_double) for name in SUMS),
        *((name, ctypes.c_int64) for name in COUNTS),
    )


class Grid(ctypes.Structure):
    """Grid and rounding: `grid` in general.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("mantissa", "least")),
        ("top", ctypes.c_float),
        ("rounding", ctypes.c_int32),
    )


class Form(ctypes.Structure):
    """Description of a form and arguments of one call: `form` in general.c."""

    _fields_ = (
        *((name, Grid) for name in ("element", "scale")),
        *((name, ctypes.c_int32) for name in ("bits", "scale_format", "tile_rows", "tile_columns")),
        *((name, ctypes.c_float) for name in ("zero", "map", "headroom", "prescale")),
        *(("statistic", ctypes.c_int32), ("spread", ctypes.c_float)),
        *((name, ctypes.c_int32) for name in ("outer", "selection", "group")),
        *((name, ctypes.c_float) for name in ("outer_top", "divisor")),
        *((name, ctypes.c_int32) for name in ("bf16", "wide")),
        *(("key", ctypes.c_uint32 * 2), ("clock", ctypes.c_uint32 * 3)),
        *((name, ctypes.c_float) for name in ("amax", "largest")),
        ("outer_rows", ctypes.c_int32),
        ("halve", ctypes.c_float),
        ("pair", ctypes.c_float * 2),
        *(("grids", ctypes.c_int32), ("smallest", ctypes.c_float)),
        *(("levels", ctypes.c_int32), ("lengths", ctypes.c_int32 * 5)),
        ("unit", ctypes.c_float),
    )


class Turn(ctypes.Structure):
    """Arguments of a rotation: `turn_by` in general.c."""

    _fields_ = (
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("size", "back", "bf16")),
    )


_FORCED: list[ctypes.CDLL | None] = []
"""Builds that `using` puts in the place of the installed one; the last one counts."""


def build() -> ctypes.CDLL | None:
    """Return the build that quantises: that of `using`, else the installed one; None: the reference does."""
    return _FORCED[-1] if _FORCED else installed_build()


@contextmanager
def using(library: ctypes.CDLL | None) -> Iterator[None]:
    """Quantise with another build within the block; None: with the reference."""
    _FORCED.append(library)
    try:
        yield
    finally:
        _FORCED.pop()


@cache
def installed_build(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Return the build for this CPU that is installed in a folder; print a line, once, and return None if
    there is none."""
    try:
        return load(path(level(), folder))
    except OSError as error:
        print(
            f"ablate: no compiled quantisers, so all runs on the slow reference ({error}); "
            "install ablate-fp4 again",
            file=sys.stderr,
        )
        return None


def built() -> ctypes.CDLL:
    """Return the build for this CPU, which the caller has checked to exist (`build`)."""
    library = build()
    assert library is not None
    return library


def level() -> str:
    """Return the name of the best build that this CPU runs."""
    return LEVELS.get(torch.backends.cpu.get_cpu_capability(), "portable")


def path(name: str, folder: Path = FOLDER) -> Path:
    """Return the path of a build."""
    return folder / f"nvfp4_{name}.so"


def load(path: Path) -> ctypes.CDLL:
    """Load one build and declare its functions; OSError if it is missing, for another machine, or of other
    sources: another version of `form` would be read at wrong places, which would give wrong numbers."""
    library, pointer, integer = ctypes.CDLL(str(path)), ctypes.c_void_p, ctypes.c_int64
    if not hasattr(library, "form_size") or library.form_size() != ctypes.sizeof(Form):
        raise OSError(f"{path.name} was compiled from other sources")
    for name in ("rows", "columns", "tiles"):
        getattr(library, name).restype = ctypes.c_int
        getattr(library, name).argtypes = (
            pointer,
            integer,
            integer,
            ctypes.POINTER(CastArguments),
            pointer,
            pointer,
        )
    library.amax.restype, library.amax.argtypes = ctypes.c_float, (pointer, integer, ctypes.c_int32)
    library.turn.restype, library.turn.argtypes = (
        ctypes.c_float,
        (pointer, integer, integer, ctypes.c_uint32, pointer),
    )
    library.quantize.restype, library.quantize.argtypes = (
        ctypes.c_int,
        (pointer, *(integer,) * 3, ctypes.POINTER(Form), *(pointer,) * 3),
    )
    library.largest.restype, library.largest.argtypes = ctypes.c_float, (pointer, integer, ctypes.c_int32)
    library.rotate_rows.restype = library.transpose_whole.restype = library.random_bits.restype = None
    library.random_bits.argtypes = (pointer, pointer, ctypes.c_int32, integer, pointer)
    library.rotate_rows.argtypes = (pointer, *(integer,) * 3, ctypes.POINTER(Turn), *(pointer,) * 2)
    library.transpose_whole.argtypes = (pointer, integer, integer, pointer, ctypes.c_int32)
    library.decode.restype = library.census.restype = None
    library.decode.argtypes = (
        pointer,
        integer,
        integer,
        pointer,
        integer,
        integer,
        ctypes.c_float,
        ctypes.c_float,
        pointer,
    )
    library.census.argtypes = (
        pointer,
        pointer,
        integer,
        integer,
        pointer,
        ctypes.POINTER(Sums),
        *(pointer,) * 4,
    )
    return library
