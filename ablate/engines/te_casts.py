"""Read back a tensor that Transformer Engine has quantised: codes, block scales and amax of both copies.

It reads TE's private storage (2.20.2), to compare TE with the emulator. The engine itself never does.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.engines.transformer_engine import TeObject, quantiser
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.stored import unpack
from ablate.recipes.te_mapping import CopyFormat


@dataclass(frozen=True)
class Cast:
    """One copy of a quantised tensor [rows, contraction]; the columnwise copy is that of the transpose."""

    codes: Tensor
    """Values on the element's grid, fp32 [rows, contraction]; zeros keep their sign."""
    scales: Tensor
    """Factors of the codes, without the amax: block scales, fp32 [rows, blocks], where square blocks repeat
    theirs in each row; or fp32 [1, 1], the inverse of the factor that the tensor was multiplied by."""
    amax: Tensor | None
    """fp32 [1], or [rows]; None if the format has none."""


def casts(x: Tensor, copy: CopyFormat) -> tuple[Cast, ...]:
    """Quantise a tensor, bf16 [rows, columns] on a GPU, by TE's quantiser of a format; return its rowwise and
    columnwise copy. With one amax per row (`copy.rows`) the rowwise one alone: TE has that for the forward
    pass only."""
    maker = quantiser(copy)
    maker.set_usage(rowwise=True, columnwise=not copy.rows)
    made = maker(x)
    return {"nvfp4": nvfp4_casts, "mxfp8": mxfp8_casts, "fp8": fp8_casts}[copy.family](made, x.shape, copy)


def nvfp4_casts(made: TeObject, shape: tuple[int, int], copy: CopyFormat) -> tuple[Cast, ...]:
    """Read NVFP4: two codes a byte, the columnwise copy transposed, scales padded to tiles of 128x4."""
    rows, columns = shape
    layouts = (("rowwise", rows, columns), ("columnwise", columns, rows))
    result = []
    for layout, height, width in layouts[: 1 if copy.rows else 2]:
        codes = unpack(getattr(made, f"_{layout}_data").view(torch.uint8))
        scales = getattr(made, f"_{layout}_scale_inv").view(torch.float8_e4m3fn)[:height, : width // 16]
        result.append(Cast(codes, scales.float(), getattr(made, f"_amax_{layout}")))
    return tuple(result)


def mxfp8_casts(made: TeObject, shape: tuple[int, int], copy: CopyFormat) -> tuple[Cast, ...]:
    """Read MXFP8: the columnwise copy not transposed, its scales [rows / 32, columns]; both padded."""
    rows, columns = shape
    row = made._rowwise_data.view(_dtype(copy.element)), made._rowwise_scale_inv[:rows, : columns // 32]
    column = (
        made._columnwise_data.view(_dtype(copy.element)).t(),
        made._columnwise_scale_inv[: rows // 32, :columns].t(),
    )
    return tuple(
        Cast(codes.float(), torch.exp2(biased.float() - 127), None) for codes, biased in (row, column)
    )


def fp8_casts(made: TeObject, shape: tuple[int, int], copy: CopyFormat) -> tuple[Cast, ...]:
    """Read FP8: one set of codes, and its transpose on a GPU that multiplies no other layout (Hopper)."""
    codes, turned = made._data, made._transpose
    scale = made._scale_inv.view(1, 1)
    column = codes.view(_dtype(copy.element)).t() if turned is None else turned.view(_dtype(copy.element))
    return Cast(codes.view(_dtype(copy.element)).float(), scale, None), Cast(column.float(), scale, None)


def _dtype(element: str) -> torch.dtype:
    return getattr(torch, ELEMENTS[element].dtype or "")  # every element that TE has is a type of torch
