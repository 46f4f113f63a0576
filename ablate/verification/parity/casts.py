"""Transformer Engine's casts beside the emulator's reference, bit for bit: codes, block scales and amax of
both copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ablate.engines.te_casts import Cast, casts
from ablate.engines.te_mapping import Family, Format
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Select
from ablate.verification.check_result import Check, Row
from ablate.verification.parity.bench import Bench, data


@dataclass(frozen=True)
class Case:
    """One quantiser of TE, and what the emulator calls it: the columnwise copy is of the transpose, rotated
    where that is said.
    """

    name: str
    copy: Format
    quant: Quant
    rotation: Hadamard | None = None


def _chosen(criterion: str, block: str = "1x16") -> Quant:
    return Quant(block=block, select=Select(among="scales", criterion=criterion), outer=Outer(bound=256.0))


def _fp8(element: str) -> Quant:
    return Quant(element=element, block=None, scale=None, outer=Outer(bound=1.0))


def _mxfp8(block: str) -> Quant:
    return Quant(element="e4m3", block=block, scale=BlockScale(format="e8m0", rounding="ceil"), outer=None)


CASES = (
    Case("NVFP4 to nearest", Format("nvfp4", "e2m1"), Quant()),
    Case("NVFP4, 16x16 weights", Format("nvfp4", "e2m1", square=True), Quant(block="16x16")),
    Case("NVFP4, columnwise rotated", Format("nvfp4", "e2m1", rotated=True), Quant(), Hadamard()),
    Case(
        "NVFP4, rotated without signs",
        Format("nvfp4", "e2m1", rotated=True, signs=False),
        Quant(),
        Hadamard(signs="none"),
    ),
    Case("NVFP4, Four Over Six by MAE", Format("nvfp4", "e2m1", chosen="MAE", bound=256), _chosen("mae")),
    Case("NVFP4, Four Over Six by MSE", Format("nvfp4", "e2m1", chosen="MSE", bound=256), _chosen("mse")),
    Case(
        "NVFP4, Four Over Six 16x16",
        Format("nvfp4", "e2m1", square=True, chosen="MSE", bound=256),
        _chosen("mse", "16x16"),
    ),
    Case("NVFP4, scaled by rows", Format("nvfp4", "e2m1", rows=True), Quant(outer=Outer(granularity="row"))),
    Case("MXFP8 E4M3", Format("mxfp8", "e4m3"), _mxfp8("1x32")),
    Case("MXFP8 E4M3, 32x32 weights", Format("mxfp8", "e4m3", square=True), _mxfp8("32x32")),
    Case("FP8 E4M3, one scale a tensor", Format("fp8", "e4m3"), _fp8("e4m3")),
    Case("FP8 E5M2, one scale a tensor", Format("fp8", "e5m2"), _fp8("e5m2")),
)


def exact_casts(bench: Bench, family: Family) -> Iterator[Check]:
    """Each quantiser of a family: a row for each part, over all shapes and kinds of data."""
    for case in CASES:
        if case.copy.family == family:
            yield Check("Casts, bit for bit", partial(_compared, case, bench), title=case.name)


class _Tally:
    """How many numbers of one part differ, and where that was first seen."""

    def __init__(self, what: str) -> None:
        self.what, self.differ, self.total, self.first, self.signs = what, 0, 0, "", 0

    def add(self, theirs: Tensor, ours: Tensor, where: str, tolerance: float = 0.0) -> None:
        wrong = ~((theirs - ours).abs() <= tolerance * ours.abs())  # NaN is like nothing
        self.differ += int(wrong.sum())
        self.total += wrong.numel()
        if wrong.any() and not self.first:
            self.first = where
        self.signs += int(((theirs == 0) & (ours == 0) & (theirs.signbit() != ours.signbit())).sum())

    def row(self, expected: str = "0 differ") -> Row:
        said = f"{self.differ:,} of {self.total:,} differ" + (
            f", first in {self.first}" if self.first else ""
        )
        zeros = f", {self.signs:,} zeros by their sign" if self.signs else ""
        return Row(self.what, said + zeros, expected, self.differ == 0)


def _compared(case: Case, bench: Bench) -> Iterator[Row]:
    """Codes, scales, and the amax where TE keeps one.

    TE's scale of FP8 is rounded twice, the emulator's not at all: 2^-22 apart.
    """
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
                    amaxes.add(theirs.amax.cpu().reshape(-1), ours.amax.reshape(-1), where)
    yield codes.row()
    scales.what = f"{case.name}: scale" if tensorwise else scales.what
    yield scales.row("amax / maximum, within 2^-22" if tensorwise else "0 differ")
    if amaxes.total:
        yield amaxes.row()


def _reference(case: Case, x: Tensor, way: str) -> Cast:
    """The emulator's copy of a CPU tensor, by its reference: what every kernel of it must equal."""
    rotation = case.rotation if way == "columnwise" else None
    made = quantize(x if way == "rowwise" else x.t(), case.quant, rotation=rotation, keep=True)
    if case.quant.scale is None:
        largest = ELEMENTS[case.quant.element].max
        return Cast(made.codes, torch.where(made.amax == 0, 1.0, made.amax / largest).view(1, 1), made.amax)
    scales = made.block_scale.expand(-1, case.quant.tile[0], -1, 1).flatten(0, 1).squeeze(-1)
    return Cast(made.codes, scales[: made.codes.shape[0]], made.amax)


@cache
def grid() -> Tensor:
    """E2M1's magnitudes, ascending."""
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
