"""What Transformer Engine makes of one tensor, read back: the values of its codes, its block scales and its amax, of either copy.

This looks at TE's storage (2.20.2), which the engine itself never does: it is for comparing TE with the emulator.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ablate.engines.te_mapping import Format
from ablate.engines.transformer_engine import quantiser
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.stored import unpack


@dataclass(frozen=True)
class Cast:
    """One copy of a quantised tensor [rows, contraction]; the columnwise copy is that of the transpose."""

    codes: Tensor
    """Values on the element's grid, fp32 [rows, contraction]; a zero has its sign."""
    scales: Tensor
    """What a code is multiplied by, but for the amax: block scales, fp32 [rows, blocks] (of square blocks each row has them), or one
    number a tensor, 1 over the factor that was multiplied by."""
    amax: Tensor | None
    """fp32 [1], or [rows]; None where the format keeps none."""


def casts(x: Tensor, copy: Format) -> tuple[Cast, ...]:
    """The rowwise and the columnwise copy of `x` [rows, columns], bf16, as TE's quantiser of this format makes them.

    Scaled by rows there is no columnwise one: TE has that for the forward pass alone.
    """
    maker = quantiser(copy)
    maker.set_usage(rowwise=True, columnwise=not copy.rows)
    made = maker(x)
    return {"nvfp4": _nvfp4, "mxfp8": _mxfp8, "fp8": _fp8}[copy.family](made, x.shape, copy)


def _nvfp4(made: Any, shape: tuple[int, int], copy: Format) -> tuple[Cast, ...]:
    """Two codes a byte, the transpose stored as such; scales are padded to tiles of 128 by 4."""
    (rows, columns), found = shape, []
    for way, (height, width) in (("rowwise", (rows, columns)), ("columnwise", (columns, rows)))[
        : 1 if copy.rows else 2
    ]:
        codes = unpack(getattr(made, f"_{way}_data").view(torch.uint8))
        scales = getattr(made, f"_{way}_scale_inv").view(torch.float8_e4m3fn)[:height, : width // 16]
        found.append(Cast(codes, scales.float(), getattr(made, f"_amax_{way}")))
    return tuple(found)


def _mxfp8(made: Any, shape: tuple[int, int], copy: Format) -> tuple[Cast, ...]:
    """The columnwise copy lies as the tensor does, its scales [rows / 32, columns]; both are padded."""
    rows, columns = shape
    row = made._rowwise_data.view(_dtype(copy.element)), made._rowwise_scale_inv[:rows, : columns // 32]
    column = (
        made._columnwise_data.view(_dtype(copy.element)).t(),
        made._columnwise_scale_inv[: rows // 32, :columns].t(),
    )
    return tuple(
        Cast(codes.float(), torch.exp2(biased.float() - 127), None) for codes, biased in (row, column)
    )


def _fp8(made: Any, shape: tuple[int, int], copy: Format) -> tuple[Cast, ...]:
    """One set of codes; where the GPU multiplies no other layout (Hopper), its transpose beside it."""
    codes, turned = made._data, made._transpose
    scale = made._scale_inv.view(1, 1)
    column = codes.view(_dtype(copy.element)).t() if turned is None else turned.view(_dtype(copy.element))
    return Cast(codes.view(_dtype(copy.element)).float(), scale, None), Cast(column.float(), scale, None)


def _dtype(element: str) -> torch.dtype:
    return getattr(torch, ELEMENTS[element].dtype)
