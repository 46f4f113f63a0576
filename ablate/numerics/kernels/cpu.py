"""Quantisers for CPU tensors, compiled from nvfp4.c when the package is installed. One thread, one pass after the amax.

They take NVIDIA's forms: E2M1 elements, E4M3 scales to nearest, one amax a tensor, blocks of 16 or 16x16. All else is the reference's.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics.philox import Clock, philox_key
from ablate.numerics.spec import BlockScale, Hadamard, Quant, Range

LEVELS = {"AVX512": "x86_64_v4", "AVX2": "x86_64_v3"}
"""Torch's name for what this CPU can do, and the compiler's; anything else runs the portable build."""


FOLDER = Path(__file__).parent

TILES = {"rows": (1, 16), "columns": (16, 1), "tiles": (16, 16)}
"""Rows and columns of memory that share a block scale, by kernel."""


class Spec(ctypes.Structure):
    """nvfp4.c's `spec`."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("bound", "headroom")),
        *((name, ctypes.c_int32) for name in ("bf16", "stochastic", "rotated")),
        ("signs", ctypes.c_uint32),
        *(("key", ctypes.c_uint32 * 2), ("clock", ctypes.c_uint32 * 3)),
        *((name, ctypes.c_float) for name in ("amax", "multiplier", "inverse")),
    )


@cache
def build() -> ctypes.CDLL | None:
    """The build for this CPU; None, with one line that says so, where the package was installed without."""
    level = LEVELS.get(torch.backends.cpu.get_cpu_capability(), "portable")
    try:
        return load(FOLDER / f"nvfp4_{level}.so")
    except OSError as error:
        print(f"ablate: no compiled quantisers, so all runs on the slow reference ({error}); install ablate-fp4 again", file=sys.stderr)
        return None


def load(path: Path) -> ctypes.CDLL:
    """One build, its functions declared; OSError where it is missing or for another machine."""
    found = ctypes.CDLL(str(path))
    for name in ("rows", "columns", "tiles"):
        getattr(found, name).restype = ctypes.c_int
        getattr(found, name).argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(Spec), *(ctypes.c_void_p,) * 2)
    return found


@cache
def covers(quant: Quant) -> bool:
    """Whether these kernels know this form."""
    drawn = quant.rounding == "stochastic"
    return (
        quant.element == "e2m1"
        and quant.select is None
        and quant.scale == BlockScale()
        and quant.range == Range(headroom=quant.range.headroom)
        and quant.outer is not None
        and (quant.outer.granularity, quant.outer.statistic) == ("tensor", "amax")
        and (quant.block == "1x16" or (quant.block == "16x16" and not drawn))
        and (quant.rounding == "nearest" or (drawn and quant.bits == 8))
    )


def can_quantize(x: Tensor, quant: Quant, rotation: Hadamard | None) -> bool:
    """Whether `quantize` computes this: the form is known, x a matrix in memory by rows or by columns; rotated, bf16 by columns."""
    return (
        covers(quant)
        and (rotation is None or _rotates(x, quant, rotation))
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.numel() > 0
        and (x.is_contiguous() or x.t().is_contiguous())
        and build() is not None
    )


def _rotates(x: Tensor, quant: Quant, rotation: Hadamard) -> bool:
    return rotation.size == 16 and quant.block == "1x16" and x.dtype == torch.bfloat16 and not x.is_contiguous()


def quantize(x: Tensor, quant: Quant, signs: Tensor | None, clock: Clock | None, where: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Values bf16 [rows, columns padded to blocks], amax, block scales [row tiles, 1, column tiles, 1]; None where x is not finite.

    With `signs` [16], x is rotated along its columns first.
    """
    by_columns = not x.is_contiguous()
    kernel = "tiles" if quant.block == "16x16" else "columns" if by_columns else "rows"
    memory = _padded(x.t() if by_columns else x, 1 if kernel == "rows" else 16)
    rows, columns = memory.shape
    tile_rows, tile_columns = TILES[kernel]
    values = torch.empty(rows, columns, dtype=torch.bfloat16)
    scales = torch.empty(rows // tile_rows, columns // tile_columns)
    spec = Spec(bound=quant.outer.bound, headroom=quant.range.headroom, bf16=x.dtype == torch.bfloat16)
    if signs is not None:
        spec.rotated, spec.signs = True, sum(1 << number for number, sign in enumerate(signs.tolist()) if sign < 0)
    if quant.rounding == "stochastic":
        spec.stochastic, spec.key[:], spec.clock[:] = True, philox_key(clock), (clock.step, clock.micro_batch, where)
    if not getattr(build(), kernel)(memory.data_ptr(), rows, columns, spec, values.data_ptr(), scales.data_ptr()):
        return None
    if by_columns:
        values, scales = values.t(), scales.t()
    row_tiles = -(-x.shape[0] // quant.tile[0])
    return values[: x.shape[0]], torch.tensor(spec.amax), scales[:row_tiles].unsqueeze(1).unsqueeze(3)


def _padded(memory: Tensor, rows: int) -> Tensor:
    extra_rows, extra_columns = -memory.shape[0] % rows, -memory.shape[1] % 16
    return F.pad(memory, (0, extra_columns, 0, extra_rows)) if extra_rows or extra_columns else memory
