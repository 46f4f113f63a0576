"""The engine `scaled_mm`: every product whose operands tensor cores can hold is multiplied by them.

The problem. Transformer Engine computes a recipe as a whole or not at all, since it makes the operands
itself. Most published recipes differ from it in how operands are made (another rotation, rounding, choice of
scales), not in what is multiplied.

The idea. The operands are the emulator's own, made by this package's quantisers. `numerics/encoded.py` writes
them as bytes, and torch's scaled product (`torch.nn.functional.scaled_mm`) multiplies those. Products that do
not fit (recipes/scaled_mapping.py) are computed as the emulator computes them, one by one, so a recipe loses
speed there and nothing else. Random bits, histories, telemetry, checkpoints, forks and readings are the
emulator's.

What the native product does, and what the emulator does:

    family                 native                                      emulated
    nvfp4                  alpha times the sum in fp32, in the         the same, after the product
                           product's epilogue; one rounding
    fp8                    the same, as scale of the first operand     the same, after the product
    nvfp4, rows            the sum in fp32, then times alpha, one      the same
                           rounding
    fp8, rows              times the scale of the row, then times      times their product
                           that of the column, one rounding
    mxfp8, mxfp4           no factor; one rounding. With a factor      the same
                           (mxfp8 alone): as nvfp4 with rows

Alpha is `product.alpha` in all but one line of the table, so it has the emulator's bits; there its two halves
are applied one after the other, which differs by at most 2^-22. The order of fp32 additions is the device's.

The name of the engine says which library multiplies FP4: `scaled_mm` is torch's own choice (cuBLASLt for
NVFP4, CUTLASS kernels of MSLK for MXFP4), `scaled_mm:cudnn` and `scaled_mm:cutlass` are those of FlashInfer's
`mm_fp4`.

Of packed experts, each matrix of each expert is a layer, and each of its products one call. The tokens of an
expert are padded with rows of zeros, like those of any layer (`encoded.ROWS`), which change no scale. An
expert without tokens is not multiplied. torch's grouped product (`scaled_grouped_mm`) is not used: it would
save 3 in 100 kernel calls of a step, since the casts of each expert remain, it writes bf16 alone and takes no
FP8 with one scale a tensor, and torch 2.13 has no shape function that could check its calls without a GPU.

On a CPU, torch multiplies FP8 alone, and the engine takes recipes that need nothing else. Refused, with a
ValueError: a device that lacks a family which the recipe needs, and what FlashInfer cannot write.
docs/project/status.md says what has run on a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.engines.emulated import Engine, replace_layers
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.expert_layers import EmulatedExpert
from ablate.engines.hardware import Machine, scaled_refusal, this_machine
from ablate.numerics.encoded import COLUMNS, Encoded, Family, encode
from ablate.numerics.kernels.cuda import PLAIN, Finish
from ablate.numerics.philox import Clock
from ablate.numerics.product import alpha, split_product
from ablate.numerics.quantize import Operand
from ablate.recipes.reasons import all_of
from ablate.recipes.recipe import Recipe
from ablate.recipes.scaled_mapping import FLASHINFER, FP4, Backend, eight_bits, families, refusals, verdict

ScaledMm = Callable[..., Tensor]
"""Function with the arguments of `torch.nn.functional.scaled_mm`."""
MmFp4 = Callable[..., Tensor]
"""Function with the arguments of FlashInfer's `mm_fp4`."""


def _torch_scaled_mm(*arguments: object, **options: object) -> Tensor:
    return F.scaled_mm(*arguments, **options)


def _flashinfer_mm_fp4(*arguments: object, **options: object) -> Tensor:
    return import_module("flashinfer").mm_fp4(*arguments, **options)


@dataclass(frozen=True)
class Native:
    """Library that multiplies FP4, and the two functions that multiply."""

    backend: Backend = "cublaslt"
    scaled_mm: ScaledMm = _torch_scaled_mm
    mm_fp4: MmFp4 = _flashinfer_mm_fp4

    def product(self, a: Encoded, b: Encoded, scales: "Factors", out: torch.dtype) -> Tensor:
        """Return a b^T times its factor, [rows of a, rows of b], rounded once to `out`."""
        if a.family in FP4 and self.backend in FLASHINFER:
            y = self._by_flashinfer(a, b, scales.scalar, out)
        else:
            y = self._by_torch(a, b, scales, out)
        return y[: a.rows, : b.rows].contiguous()

    def _by_torch(self, a: Encoded, b: Encoded, scales: "Factors", out: torch.dtype) -> Tensor:
        kinds, swizzles = F.ScalingType, F.SwizzleType
        left, right = a.data, b.data.t()
        one = torch.ones((), dtype=torch.float32, device=left.device)
        tiled, flat = swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE
        if a.family == "fp8" and scales.rows is not None:
            own, other = (_column(scale, part) for scale, part in zip(scales.rows, (a, b), strict=True))
            kind = kinds.RowWise
            return self.scaled_mm(left, right, own, kind, other.t(), kind, output_dtype=out)
        if a.family == "fp8":
            kind = kinds.TensorWise
            return self.scaled_mm(left, right, scales.scalar_or(one), kind, one, kind, output_dtype=out)
        left_scales: list[Tensor | None] = [a.scales]
        right_scales: list[Tensor | None] = [b.scales]
        if a.family == "nvfp4":
            # The whole factor is the first operand's: torch multiplies the two, and by 1 exactly.
            kind, swizzle = [kinds.BlockWise1x16, kinds.TensorWise], [tiled, flat]
            left_scales, right_scales = [*left_scales, scales.scalar_or(one)], [*right_scales, one]
            later = scales.matrix
        else:
            kind, swizzle = [kinds.BlockWise1x32], [tiled]
            later = scales.matrix if scales.scalar is None else scales.scalar
        wide = out if later is None else torch.float32
        y = self.scaled_mm(
            left,
            right,
            left_scales,
            kind,
            right_scales,
            kind,
            swizzle_a=swizzle,
            swizzle_b=swizzle,
            output_dtype=wide,
        )
        if later is None:
            return y
        # Cropped first: a factor of rows has no padding.
        return (y[: a.rows, : b.rows] * later).to(out)

    def _by_flashinfer(self, a: Encoded, b: Encoded, scalar: Tensor | None, out: torch.dtype) -> Tensor:
        if out == torch.float32:
            raise ValueError(
                "FlashInfer's FP4 products write bf16, and fp32 is wanted; use engine: scaled_mm"
            )
        assert a.tiled_scales is not None
        assert b.tiled_scales is not None
        one = torch.ones((), dtype=torch.float32, device=a.data.device)
        nvidia = a.family == "nvfp4"
        return self.mm_fp4(
            a.data.view(torch.uint8),
            b.data.view(torch.uint8).t(),
            a.tiled_scales,
            b.tiled_scales.t(),
            one if scalar is None else scalar,
            out,
            block_size=16 if nvidia else 32,
            use_8x4_sf_layout=False,
            backend=self.backend,
            use_nvfp4=nvidia,
        )


@dataclass(frozen=True)
class Factors:
    """Factor of a product, fp32: one number, or a matrix that is a column times a row; none if it is 1."""

    scalar: Tensor | None = None
    matrix: Tensor | None = None
    """[M, N], or a shape that broadcasts to it."""
    rows: tuple[Tensor, Tensor] | None = None
    """The factors of both operands apart, each a scalar or [rows, 1]; given with `matrix`."""

    def scalar_or(self, other: Tensor) -> Tensor:
        """Return the factor if it is one number, else `other`."""
        return other if self.scalar is None else self.scalar

    @classmethod
    def of(cls, a: Operand, b: Operand) -> "Factors":
        """Return the factor of the product of two operands: that of the emulator."""
        whole = alpha(a, b)
        if whole is None or whole.numel() == 1:
            return cls(None if whole is None else whole.reshape(()))
        return cls(None, whole, (_own_factor(a), _own_factor(b)))


def _own_factor(operand: Operand) -> Tensor:
    """Return amax / divisor of one operand, fp32, a scalar or [rows, 1]."""
    amax = operand.amax
    if amax is None:
        amax = torch.ones((), dtype=torch.float32, device=operand.values.device)
    return amax / torch.full_like(amax, operand.divisor)


def _column(factor: Tensor, part: Encoded) -> Tensor:
    """Return a factor for every padded row of an operand, [padded rows, 1]; 1 in the padding."""
    column = torch.ones(part.data.shape[0], 1, dtype=torch.float32, device=part.data.device)
    column[: part.rows] = factor
    return column


class ScaledLinear(EmulatedLinear):
    """A layer whose products are multiplied by tensor cores where its operands fit. The arguments are those
    of `EmulatedLinear`, then `native`, the functions that multiply."""

    emulates = False

    def __init__(self, *place: Any, native: Native, **how: Any) -> None:
        super().__init__(*place, **how)
        self.native = native

    def multiply(
        self, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
    ) -> Tensor:
        """Return the product a b^T of two operands, each given as its parts, rounded once to `out`. The first
        parts, which the operands' own quantisers made, are multiplied by tensor cores if they fit."""
        family = self.family_of(a, b, out)
        if family is None:
            return super().multiply(a, b, out, finish)
        inner = out if len(a) == len(b) == 1 else torch.float32
        return split_product(a, b, out, self.native_product(a[0], b[0], family, inner), finish)

    def native_product(self, a: Operand, b: Operand, family: Family, out: torch.dtype) -> Tensor:
        """Return a b^T, multiplied in a family that both operands fit in, rounded once to `out`."""
        return self.native.product(*self.encoded(a, b, family), Factors.of(a, b), out)

    def encoded(self, a: Operand, b: Operand, family: Family) -> tuple[Encoded, Encoded]:
        """Return the bytes of both operands of a product, with as many columns as the wider one has."""
        columns = max(a.values.shape[1], b.values.shape[1])
        return self.bytes_of(a, family, columns), self.bytes_of(b, family, columns)

    def family_of(self, a: list[Operand], b: list[Operand], out: torch.dtype) -> Family | None:
        """Return the family in which tensor cores multiply the first parts of two operands, or None."""
        if self.emulated or not (a[0].values.numel() and b[0].values.numel()):
            return None
        wide = out == torch.float32
        return verdict(a[0].quant, b[0].quant, wide, self.native.backend).family

    def bytes_of(self, operand: Operand, family: Family, columns: int) -> Encoded:
        """Return an operand's bytes, with as many columns; kept as long as `casts` keeps the operand."""
        assert operand.quant is not None
        columns += -columns % COLUMNS
        element = eight_bits(operand.quant.element) or "e4m3"
        return self.casts.derived(
            operand, (family, columns), lambda: encode(operand, family, element, columns)
        )


class ScaledExpert(ScaledLinear, EmulatedExpert):
    """One matrix of one expert. The arguments are those of `EmulatedExpert`, then `native`."""


def convert(
    model: nn.Module,
    recipe: Recipe,
    clock: Clock,
    backend: Backend = "cublaslt",
    *,
    native: Native | None = None,
    machine: Machine | None = None,
) -> Engine:
    """Replace every nn.Linear inside a transformer block, and the matrices of packed experts there, in place.

    All is as in the emulated engine's `convert`, its errors too, but that the model's device decides what can
    be multiplied: ValueError if it lacks a family that the recipe needs, or the back end cannot write what
    the recipe wants. `backend` is the library that multiplies FP4 operands; `native` has the functions that
    multiply, None: those of the library; `machine` None: this one.
    """
    native = native or Native(backend)
    device = next(model.parameters()).device.type
    reason = all_of(refusals(recipe, native.backend)) or scaled_refusal(
        machine or this_machine(), device, families(recipe, native.backend), native.backend
    )
    if reason:
        engine = "scaled_mm" if native.backend == "cublaslt" else f"scaled_mm:{native.backend}"
        raise ValueError(f"engine {engine}: {reason}")
    linear, expert = (partial(kind, native=native) for kind in (ScaledLinear, ScaledExpert))
    replace_layers(model, recipe, clock, linear, expert)
    return Engine(model, recipe, clock)
