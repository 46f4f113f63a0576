"""Comparison of Transformer Engine's casts with the emulator's reference, and tests of its random rounding.

Codes, block scales and amax of both copies are compared bit for bit. The random bits of stochastic rounding
are not documented, so that its statistics are tested, from many roundings of one tensor. Every row tests at a
level of one in a million: a correct machine fails it in one of a million runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.engines import transformer_engine as native
from ablate.engines.te_casts import Cast, casts
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Select
from ablate.recipes.te_mapping import CopyFormat, Family
from ablate.verification.check_result import Check, Row, present
from ablate.verification.conformance.inputs import grid
from ablate.verification.conformance.numbers import of_operand
from ablate.verification.parity.bench import Bench, data

LEVEL = 1e-6
BINS = 16
"""Number of bins of the position between the two neighbours; each is tested separately."""
CUT = 1 / 256
"""Largest bias: with 8 random bits P(up) is the position truncated to a multiple of this."""
ROWS, COLUMNS = 128, 256


@dataclass(frozen=True)
class Case:
    """Quantiser of TE and its equivalent in the emulator. The columnwise copy is that of the transpose, with
    `rotation` if there is one."""

    name: str
    copy: CopyFormat
    quant: Quant
    rotation: Hadamard | None = None


_MAE = Quant(select=Select(among="scales", criterion="mae"), outer=Outer(bound=256.0))
_MSE = _MAE.model_copy(update={"select": Select(among="scales", criterion="mse")})
_MSE_SQUARE = _MSE.model_copy(update={"block": "16x16"})
_ROWS = Quant(outer=Outer(granularity="row"))
_MX = Quant(element="e4m3", block="1x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None)
_FP8 = Quant(element="e4m3", block=None, scale=None, outer=Outer(bound=1.0))
_four = partial(CopyFormat, "nvfp4", "e2m1")
CASES = (
    Case("NVFP4 to nearest", _four(), Quant()),
    Case("NVFP4, 16x16 weights", _four(square=True), Quant(block="16x16")),
    Case("NVFP4, columnwise rotated", _four(rotated=True), Quant(), Hadamard()),
    Case("NVFP4, rotated without signs", _four(rotated=True, signs=False), Quant(), Hadamard(signs="none")),
    Case("NVFP4, Four Over Six by MAE", _four(chosen="MAE", bound=256), _MAE),
    Case("NVFP4, Four Over Six by MSE", _four(chosen="MSE", bound=256), _MSE),
    Case("NVFP4, Four Over Six 16x16", _four(square=True, chosen="MSE", bound=256), _MSE_SQUARE),
    Case("NVFP4, scaled by rows", _four(rows=True), _ROWS),
    Case("MXFP8 E4M3", CopyFormat("mxfp8", "e4m3"), _MX),
    Case(
        "MXFP8 E4M3, 32x32 weights",
        CopyFormat("mxfp8", "e4m3", square=True),
        _MX.model_copy(update={"block": "32x32"}),
    ),
    Case("FP8 E4M3, one scale a tensor", CopyFormat("fp8", "e4m3"), _FP8),
    Case(
        "FP8 E5M2, one scale a tensor",
        CopyFormat("fp8", "e5m2"),
        _FP8.model_copy(update={"element": "e5m2"}),
    ),
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
        summary = f"{self.differ:,} of {self.total:,} differ" + f", first in {self.first}" * bool(self.first)
        zeros = f", {self.signs:,} zeros by their sign" * bool(self.signs)
        return Row(self.what, summary + zeros, expected, self.differ == 0)


def _compared(case: Case, bench: Bench) -> Iterator[Row]:
    """Compare codes, scales, and the amax if TE stores one. TE rounds the scale of FP8 twice, the emulator
    does not, so that they differ by up to 2^-22."""
    codes, scales, amaxes = (_Tally(f"{case.name}: {part}") for part in ("codes", "block scales", "amax"))
    tensorwise = case.quant.scale is None
    for shape in bench.shapes:
        for kind, x in data(*shape, torch.device("cpu")):
            made = casts(x.to(bench.device), case.copy)
            for way, theirs in zip(("rowwise", "columnwise"), made, strict=False):
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
    rotation = case.rotation if way == "columnwise" else None
    x = x if way == "rowwise" else x.t()
    made = of_operand(quantize(x, case.quant, rotation=rotation, keep=True), *x.shape)
    codes = present(made.codes)
    if case.quant.scale is None:
        amax = present(made.amax)
        largest = ELEMENTS[case.quant.element].max
        return Cast(codes, torch.where(amax == 0, 1.0, amax / largest).view(1, 1), amax)
    return Cast(codes, present(made.scales), made.amax)


class RepeatedCasts(NamedTuple):
    """One copy of a tensor, rounded many times."""

    up: Tensor
    """True if the magnitude was rounded up, bool [draws, rows, columns]."""
    position: Tensor
    """Position of the magnitude between its lower (0) and upper (1) neighbour, fp32 [1, rows, columns]."""
    inside: Tensor
    """True for values strictly between two neighbours, rounded at random; bool [1, rows, columns]."""
    invalid: int
    """Number of results that are neither neighbour, have the wrong sign, or a wrong block scale."""


def stochastic_draws(bench: Bench, family: Family) -> Iterator[Check]:
    """Yield the check of stochastic rounding, which only NVFP4 uses."""
    if family == "nvfp4":
        yield Check("Stochastic rounding", partial(_drawn, bench), title="stochastic rounding")


def _drawn(bench: Bench) -> Iterator[Row]:
    """Test neighbours, bias, independence, and that the seed determines the draws."""
    plain = CopyFormat("nvfp4", "e2m1", stochastic=True)
    turned = CopyFormat("nvfp4", "e2m1", stochastic=True, rotated=True)
    native.seed(bench.device, 1)
    rowwise, columnwise = _repeated(bench, plain)
    rotated = _repeated(bench, turned)[1]
    copies = {"rowwise": rowwise, "columnwise": columnwise, "columnwise, rotated": rotated}
    invalid = sum(repeated.invalid for repeated in copies.values())
    yield Row("stochastic: neither neighbour", f"{invalid:,} draws", "0", invalid == 0)
    for way, repeated in copies.items():
        yield _unbiased(f"stochastic, {way}: share rounded up", repeated)
    yield from _independent(rowwise, columnwise)
    yield _seeded(bench, plain)


def _repeated(bench: Bench, copy: CopyFormat) -> list[RepeatedCasts]:
    """Cast the tensor `bench.draws` times; return its rowwise and its columnwise copies."""
    x = _tensor()
    drawn = [casts(x.to(bench.device), copy) for _ in range(bench.draws)]
    stacks = [
        [torch.stack([getattr(one[way], part).cpu() for one in drawn]) for part in ("codes", "scales")]
        for way in (0, 1)
    ]
    return [_judged(x, copy, way, *stack) for way, stack in enumerate(stacks)]


def _judged(x: Tensor, copy: CopyFormat, way: int, codes: Tensor, scales: Tensor) -> RepeatedCasts:
    """Return the casts of one copy with positions from the emulator's scaled values before rounding."""
    rotation = Hadamard() if copy.rotated and way else None
    ours = quantize(x.t() if way else x, Quant(), rotation=rotation, keep=True)
    scaled, magnitudes = present(ours.scaled).clamp(-6, 6), grid("e2m1")
    low = torch.bucketize(scaled.abs(), magnitudes, right=True).sub(1).clamp(max=6)
    below, above = magnitudes[low], magnitudes[low + 1]
    position = (scaled.abs() - below) / (above - below)
    inside = (position > 0) & (position < 1)
    allowed = (codes.abs() == below) | (codes.abs() == above)
    on_grid = codes.abs() == torch.where(position == 1, above, below)
    sound = torch.where(inside, allowed, on_grid) & ((codes == 0) | (codes.sign() == scaled.sign()))
    expected = present(ours.block_scale).flatten(0, 1).squeeze(-1).squeeze(-1)
    wrong = ~(sound & (scales == expected).repeat_interleave(16, dim=2))
    return RepeatedCasts(codes.abs() == above, position[None], inside[None], int(wrong.sum()))


def _unbiased(what: str, repeated: RepeatedCasts) -> Row:
    """Test the fraction rounded up in each bin; it may be up to 1/256 below the mean position."""
    limit = NormalDist().inv_cdf(1 - LEVEL / (2 * BINS))
    up, count = repeated.up.double().sum(0), len(repeated.up)
    worst, bias = 0.0, 0.0
    for number in range(BINS):
        in_bin = (repeated.position >= number / BINS) & (repeated.position < (number + 1) / BINS)
        chosen = (repeated.inside & in_bin)[0]
        p = repeated.position[0][chosen].double()
        if not len(p):
            continue
        excess = float(up[chosen].sum() - count * p.sum())
        sd = max(float((count * p * (1 - p)).sum()) ** 0.5, 1e-9)
        worst = max(worst, excess / sd, -(excess + count * len(p) * CUT) / sd)
        bias = max(bias, excess / (count * len(p)), -excess / (count * len(p)), key=abs)
    summary = f"z at most {worst:.2f}, off by {bias:.4f} at most"
    return Row(what, summary, f"z below {limit:.2f}: the position, or up to 1/256 less", worst < limit)


def _independent(rowwise: RepeatedCasts, columnwise: RepeatedCasts) -> Iterator[Row]:
    """Test correlations of the two copies, of adjacent elements, and of consecutive draws, as z."""
    limit, row = NormalDist().inv_cdf(1 - LEVEL / 2), _residual(rowwise)
    pairs = {
        "the two copies": (row, [z.transpose(1, 2) for z in _residual(columnwise)]),
        "adjacent elements": ([z[:, :, 1:] for z in row], [z[:, :, :-1] for z in row]),
        "one draw and the next": ([z[1:] for z in row], [z[:-1] for z in row]),
    }
    for name, ((a, va), (b, vb)) in pairs.items():
        z = abs(float((a * b).sum())) / max(float((va * vb).sum()) ** 0.5, 1e-9)
        yield Row(f"stochastic: {name} are independent", f"z {z:.2f}", f"below {limit:.2f}", z < limit)


def _residual(repeated: RepeatedCasts) -> tuple[Tensor, Tensor]:
    """Return rounded-up minus its probability, and the variance; zero for values on the grid."""
    inside, p = repeated.inside.double(), repeated.position.double()
    return (repeated.up.double() - p) * inside, (p * (1 - p) * inside).expand_as(repeated.up)


def _seeded(bench: Bench, copy: CopyFormat) -> Row:
    x, results = _tensor().to(bench.device), []
    for number in (7, 7, 8):
        native.seed(bench.device, number)
        results.append([one.codes.cpu() for one in casts(x, copy)])
    repeatable = all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    distinct = not any(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))
    same, other = "the same" if repeatable else "other draws", "others" if distinct else "the same"
    summary, expected = f"{same}, and {other} for another seed", "the same, and others for another seed"
    return Row("stochastic: what one seed draws again", summary, expected, repeatable and distinct)


def _tensor() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
