"""Numbers of one cast in fp32, as a subject returned them or a computation gives them, and their comparison.

A subject may return dequantised values, or codes and scales, in any of the layouts that `Quantised` names.
`read` brings them to one form. `differences` compares two such forms element by element: codes and block
scales exactly, values up to the fp32 or bf16 roundings of dequantisation, which the recipe does not fix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import Operand
from ablate.numerics.spec import Quant
from ablate.numerics.stored import unpack, unswizzle
from ablate.verification.conformance.subject import Quantised

FP32_ROUNDINGS = 2.0**-21
"""Relative tolerance of fp32 values: code x scale x outer is at most four roundings on either side, each of
at most 2^-24. Neighbouring codes and scales are 1/16 apart or more."""
TOLERANCES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
"""Relative tolerance of values by dtype, else that of fp32: and one rounding to the dtype on either side."""
SMALLEST = {torch.float16: 2.0**-24}
"""Absolute tolerance by dtype: the smallest subnormal of fp16; else the smallest normal fp32 number, since a
GPU may flush subnormals."""


class UnreadableError(Exception):
    """A result that has not the form which `Quantised` names; the message is a sentence."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of a cast of x [rows, columns], all fp32; None for what a subject does not return."""

    values: Tensor | None = None
    """Dequantised, [rows, columns]."""
    codes: Tensor | None = None
    """Element values on the grid of the format, [rows, columns]."""
    scales: Tensor | None = None
    """Block scales [rows, blocks of a row]; those of a square block are repeated for its rows."""
    outer: Tensor | None = None
    amax: Tensor | None = None
    dtype: torch.dtype = torch.float32
    """Dtype in which the values were returned."""

    def dequantised(self, length: int) -> Tensor | None:
        """Return the values; those of codes and scales if none were returned. fp32 [rows, columns]."""
        if self.values is not None or self.codes is None or (self.scales is None and self.outer is None):
            return self.values
        decoded = self.codes
        if self.scales is not None:
            decoded = decoded * over_elements(self.scales, length, decoded.shape[1])
        return decoded if self.outer is None else decoded * self.outer


def of_operand(operand: Operand, rows: int, columns: int) -> Numbers:
    """Return the numbers of an operand of the reference path; codes, if it keeps them."""
    assert operand.quant is not None
    high, wide = operand.quant.tile
    scales = outer = None
    if operand.block_scale is not None:
        scales = operand.block_scale[:, 0, :, 0].repeat_interleave(high, 0)[:rows, : -(-columns // wide)]
    if operand.amax is not None or operand.divisor != 1:
        outer = (1.0 if operand.amax is None else operand.amax) * (1.0 / torch.tensor(operand.divisor))
    codes = None if operand.codes is None else operand.codes[:, :columns]
    return Numbers(operand.dequantize()[:, :columns], codes, scales, outer, operand.amax)


def over_elements(scales: Tensor, length: int, columns: int) -> Tensor:
    """Return block scales [rows, blocks] repeated for the elements of their blocks, [rows, columns]."""
    return scales.repeat_interleave(length, dim=1)[:, :columns]


def read(result: object, rows: int, columns: int, quant: Quant, swizzled: bool = False) -> Numbers:
    """Return what a subject returned as fp32 numbers on the CPU; UnreadableError if it has another form or
    shape.

    `result`: Quantised; a tensor of values; or a tuple (codes, scales) or (codes, scales, outer). `rows`,
    `columns`: those of the tensor that was cast. `quant` names the formats of codes and scales that come as
    bytes. `swizzled`: scales are in the 128 x 4 layout.
    """
    if isinstance(result, Tensor):
        result = Quantised(values=result)
    elif isinstance(result, tuple) and len(result) in (2, 3):
        parts = [torch.tensor(float(z)) if isinstance(z, int | float) else z for z in result]
        result = Quantised(None, *parts) if all(isinstance(z, Tensor) for z in parts) else result
    if not isinstance(result, Quantised):
        kind = type(result).__name__
        if isinstance(result, tuple):
            kind = f"tuple of {', '.join(type(part).__name__ for part in result)}"
        advice = "; torch.from_numpy makes tensors of arrays" * ("ndarray" in kind)
        raise UnreadableError(
            f"returned a {kind}; a cast returns values, (codes, scales), (codes, scales, outer), or"
            f" conformance.Quantised{advice}"
        )
    names = ("values", "codes", "scales", "outer", "amax")
    values, codes, scales, outer, amax = (_dense(name, getattr(result, name)) for name in names)
    if values is None and (codes is None or (scales is None and quant.block is not None)):
        raise UnreadableError("returned neither values nor both codes and scales")
    if values is not None and values.shape != (rows, columns):
        raise UnreadableError(f"returned values {list(values.shape)} for x {[rows, columns]}")
    if amax is not None and amax.numel() != 1:
        raise UnreadableError(f"returned amax {list(amax.shape)}; it is a scalar")
    codes = None if codes is None else _codes(codes, rows, columns, quant)
    scales = None if scales is None else _scales(scales, rows, columns, quant, swizzled)
    if outer is not None and outer.numel() not in (1, rows):
        raise UnreadableError(f"returned outer {list(outer.shape)}; it is a scalar or [rows, 1]")
    return Numbers(
        None if values is None else values.float(),
        codes,
        scales,
        None if outer is None else outer.float().reshape(() if outer.numel() == 1 else (rows, 1)),
        None if amax is None else amax.float().reshape(()),
        torch.float32 if values is None else values.dtype,
    )


def _dense(name: str, part: object) -> Tensor | None:
    """Return a part of a result on the CPU. UnreadableError if it is no number and no dense tensor."""
    if part is None or isinstance(part, int | float):
        return None if part is None else torch.tensor(float(part))
    if not isinstance(part, Tensor):
        raise UnreadableError(f"returned {name} as a {type(part).__name__}; it is a tensor")
    if part.layout != torch.strided or part.is_meta or part.is_nested or part.is_quantized:
        form = f"{part.layout} and {part.dtype} on {part.device}".replace("torch.", "")
        raise UnreadableError(f"returned {name} of {form}; dense tensors are read")
    return part.detach().cpu()


def _codes(codes: Tensor, rows: int, columns: int, quant: Quant) -> Tensor:
    four = quant.element == "e2m1"
    if codes.dtype not in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        if codes.shape != (rows, columns):
            raise UnreadableError(f"returned codes {list(codes.shape)} for x {[rows, columns]}")
        return codes.float()
    raw = codes.contiguous().view(torch.uint8)
    if four and raw.shape == (rows, -(-columns // 2)):  # the last byte of an odd row has one code
        return unpack(raw)[:, :columns]
    if raw.shape != (rows, columns):
        raise UnreadableError(
            f"returned codes {list(codes.shape)} for x {[rows, columns]}; a byte has two FP4 codes, or one"
        )
    if four:
        return unpack(raw & 15)[:, 0::2]
    name = ELEMENTS[quant.element].dtype
    if name is None:
        raise UnreadableError(f"returned bytes for {quant.element}, of which the kit reads values only")
    return raw.view(getattr(torch, name)).float()


def _scales(scales: Tensor, rows: int, columns: int, quant: Quant, swizzled: bool) -> Tensor:
    if quant.block is None:
        raise UnreadableError(
            f"returned scales {list(scales.shape)} for x {[rows, columns]}; the recipe has no block scales:"
            " return the factor of the tensor, or of each row, as outer of conformance.Quantised"
        )
    high, length = quant.tile
    blocks, name = -(-columns // length), SCALES[quant.scale.format].dtype if quant.scale else None
    if scales.dtype in (torch.uint8, torch.int8):
        if name is None or name in ("bfloat16", "float32"):
            raise UnreadableError("returned scales as bytes, and the recipe's scales have no one-byte dtype")
        scales = scales.view(getattr(torch, name))
    if swizzled:
        if scales.element_size() != 1:
            raise UnreadableError(f"returned swizzled scales of {scales.dtype}; the layout holds bytes")
        try:
            return unswizzle(scales.reshape(-1), rows, blocks).float()
        except ValueError as error:
            raise UnreadableError(f"returned scales of another size: {error}") from None
    if scales.ndim == 1 and scales.numel() == rows * blocks:
        scales = scales.reshape(rows, blocks)
    if scales.ndim == 2:
        if scales.shape in ((rows, blocks), (-(-rows // high), blocks)):
            return scales.float().repeat_interleave(1 if len(scales) == rows else high, dim=0)[:rows]
        other = next((size for size in (16, 32) if scales.shape == (rows, -(-columns // size))), length)
        if other != length and not blocks <= scales.shape[1] <= -(-blocks // 4) * 4:
            raise UnreadableError(
                f"returned scales of blocks of {other}, {list(scales.shape)} for x {[rows, columns]}; the"
                f" recipe has blocks of {length}"
            )
        if scales.shape[0] >= rows and scales.shape[1] >= blocks:  # rows of padding, which nobody reads
            return scales[:rows, :blocks].float()
    raise UnreadableError(
        f"returned scales {list(scales.shape)} for x {[rows, columns]}, not {[rows, blocks]}"
    )


@dataclass(frozen=True)
class Differences:
    """Masks of the elements and of the block scales in which two casts of one tensor differ."""

    elements: Tensor
    """bool [rows, columns]."""
    blocks: Tensor
    """bool [rows, blocks]."""
    cases: int

    @property
    def count(self) -> int:
        return int(self.elements.sum()) + int(self.blocks.sum())

    def first(self, length: int) -> tuple[int, int] | None:
        """Return row and block of the first difference in row-major order; None if there is none."""
        rows, columns = self.elements.shape
        padded = torch.nn.functional.pad(self.elements, (0, -columns % length))
        hit = padded.view(rows, -1, length).any(dim=2) | self.blocks
        where = hit.nonzero()
        return (int(where[0, 0]), int(where[0, 1])) if len(where) else None


def differences(got: Numbers, expected: Numbers, length: int) -> Differences:
    """Compare what a subject returned with the complete numbers of a computation. Codes count if the block
    scale is not zero: under a zero scale every code has the value zero. +0 equals -0, and NaN equals NaN."""
    assert expected.codes is not None
    assert expected.values is not None
    rows, columns = expected.codes.shape
    elements = torch.zeros(rows, columns, dtype=torch.bool)
    blocks = torch.zeros(rows, -(-columns // length), dtype=torch.bool)
    cases = 0
    if got.codes is not None:
        elements = unequal(got.codes, expected.codes)
        if expected.scales is not None:
            spread = over_elements(expected.scales, length, columns)
            elements &= (spread != 0) & ~spread.isnan()
        cases += elements.numel()
    if got.scales is not None and expected.scales is not None:
        blocks = unequal(got.scales, expected.scales)
        cases += blocks.numel()
    if got.values is not None:
        elements |= far(got.values, expected.values, got.dtype)
        cases += elements.numel() if got.codes is None else 0
    return Differences(elements, blocks, cases)


def far(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return where values differ by more than their dequantisation may round; NaN equals NaN."""
    tolerance = TOLERANCES.get(dtype, FP32_ROUNDINGS) * expected.abs() + SMALLEST.get(dtype, 2.0**-126)
    finite = got.isfinite() & expected.isfinite()
    return torch.where(finite, (got - expected).abs() > tolerance, unequal(got, expected))


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the numbers that differ; two NaNs do not."""
    return (one != other) & ~(one.isnan() & other.isnan())
