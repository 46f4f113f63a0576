"""Comparison of Transformer Engine's casts with the emulator's reference, bit for bit: codes, block scales
and amax of both copies."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ablate.engines.te_casts import Cast, casts
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Select
from ablate.recipes.te_mapping import CopyFormat, Family
from ablate.verification.check_result import Check, Row, present
from ablate.verification.conformance.numbers import of_operand
from ablate.verification.parity.bench import Bench, data


@dataclass(frozen=True)
class Case:
    """Quantiser of TE and its equivalent in the emulator. The columnwise copy is that of the transpose, with
    `rotation` if there is one."""

    name: str
    copy: CopyFormat
    quant: Quant
    rotation: Hadamard | None = None


def _chosen(criterion: str, block: str = "1x16") -> Quant:
    return Quant(block=block, select=Select(among="scales", criterion=criterion), outer=Outer(bound=256.0))


def _fp8(element: str) -> Quant:
    return Quant(element=element, block=None, scale=None, outer=Outer(bound=1.0))


def _mxfp8(block: str) -> Quant:
    return Quant(element="e4m3", block=block, scale=BlockScale(format="e8m0", rounding="ceil"), outer=None)


CASES = (
    Case("NVFP4 to nearest", CopyFormat("nvfp4", "e2m1"), Quant()),
    Case("NVFP4, 16x16 weights", CopyFormat("nvfp4", "e2m1", square=True), Quant(block="16x16")),
    Case("NVFP4, columnwise rotated", CopyFormat("nvfp4", "e2m1", rotated=True), Quant(), Hadamard()),
    Case(
        "NVFP4, rotated without signs",
        CopyFormat("nvfp4", "e2m1", rotated=True, signs=False),
        Quant(),
        Hadamard(signs="none"),
    ),
    Case("NVFP4, Four Over Six by MAE", CopyFormat("nvfp4", "e2m1", chosen="MAE", bound=256), _chosen("mae")),
    Case("NVFP4, Four Over Six by MSE", CopyFormat("nvfp4", "e2m1", chosen="MSE", bound=256), _chosen("mse")),
    Case(
        "NVFP4, Four Over Six 16x16",
        CopyFormat("nvfp4", "e2m1", square=True, chosen="MSE", bound=256),
        _chosen("mse", "16x16"),
    ),
    Case(
        "NVFP4, scaled by rows", CopyFormat("nvfp4", "e2m1", rows=True), Quant(outer=Outer(granularity="row"))
    ),
    Case("MXFP8 E4M3", CopyFormat("mxfp8", "e4m3"), _mxfp8("1x32")),
    Case("MXFP8 E4M3, 32x32 weights", CopyFormat("mxfp8", "e4m3", square=True), _mxfp8("32x32")),
    Case("FP8 E4M3, one scale a tensor", CopyFormat("fp8", "e4m3"), _fp8("e4m3")),
    Case("FP8 E5M2, one scale a tensor", CopyFormat("fp8", "e5m2"), _fp8("e5m2")),
)


def exact_casts(bench: Bench, family: Family) -> Iterator[Check]:
    """Yield a check for each quantiser of a family, over all shapes and kinds of data."""
    for case in CASES:
        if case.copy.family == family:
            yield Check("Casts, bit for bit", partial(_compared, case, bench), title=case.name)


class _Tally:
    """Count of differing numbers in one part, with the first place."""

    def __init__(self, what: str) -> None:
        self.what, self.differ, self.total, self.first, self.signs = what, 0, 0, "", 0

    def add(self, theirs: Tensor, ours: Tensor, where: str, tolerance: float = 0.0) -> None:
        wrong = ~((theirs - ours).abs() <= tolerance * ours.abs())  # NaN equals nothing
        self.differ += int(wrong.sum())
        self.total += wrong.numel()
        if wrong.any() and not self.first:
            self.first = where
        self.signs += int(((theirs == 0) & (ours == 0) & (theirs.signbit() != ours.signbit())).sum())

    def row(self, expected: str = "0 differ") -> Row:
        summary = f"{self.differ:,} of {self.total:,} differ" + (
            f", first in {self.first}" if self.first else ""
        )
        zeros = f", {self.signs:,} zeros by their sign" if self.signs else ""
        return Row(self.what, summary + zeros, expected, self.differ == 0)


def _compared(case: Case, bench: Bench) -> Iterator[Row]:
    """Compare codes, scales, and the amax if TE stores one. TE rounds the scale of FP8 twice, the emulator
    does not, so that they differ by up to 2^-22."""
    codes, scales, amaxes = (_Tally(f"{case.name}: {part}") for part in ("codes", "block scales", "amax"))
    tensorwise = case.quant.scale is None
    for shape in bench.shapes:
        for kind, x in data(*shape, torch.device("cpu")):
            for way, theirs in zip(
                ("rowwise", "columnwise"), casts(x.to(bench.device), case.copy), strict=False
            ):
                ours = _reference(case, x, way)
                where = f"{way}, {kind}, {shape[0]} x {shape[1]}"
                codes.add(theirs.codes.cpu(), ours.codes, where)
                scales.add(theirs.scales.cpu(), ours.scales, where, 2.0**-22 if tensorwise else 0.0)
                if ours.amax is not None and not tensorwise:
                    amaxes.add(present(theirs.amax).cpu().reshape(-1), ours.amax.reshape(-1), where)
    yield codes.row()
    scales.what = f"{case.name}: scale" if tensorwise else scales.what
    yield scales.row("amax / maximum, within 2^-22" if tensorwise else "0 differ")
    if amaxes.total:
        yield amaxes.row()


def _reference(case: Case, x: Tensor, way: str) -> Cast:
    """Return the emulator's copy of a CPU tensor, computed by its reference quantiser."""
    rotation = case.rotation if way == "columnwise" else None
    x = x if way == "rowwise" else x.t()
    made = of_operand(quantize(x, case.quant, rotation=rotation, keep=True), *x.shape)
    codes = present(made.codes)
    if case.quant.scale is None:
        amax = present(made.amax)
        largest = ELEMENTS[case.quant.element].max
        return Cast(codes, torch.where(amax == 0, 1.0, amax / largest).view(1, 1), amax)
    return Cast(codes, present(made.scales), made.amax)


@cache
def grid() -> Tensor:
    """Return E2M1's magnitudes in ascending order, fp32 [8]."""
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
