"""Statistical tests of Transformer Engine's stochastic rounding, from many roundings of one tensor.

Its random bits are not documented, so that they cannot be compared bit for bit. Every row tests at a level of
one in a million: a correct machine fails it in one of a million runs.
"""

from collections.abc import Iterator
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.engines import transformer_engine as native
from ablate.engines.te_casts import casts
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.te_mapping import CopyFormat, Family
from ablate.verification.check_result import Check, Row, present
from ablate.verification.parity.bench import Bench
from ablate.verification.parity.casts import grid

LEVEL = 1e-6
BINS = 16
"""Number of bins of the position between the two neighbours; each is tested separately."""
CUT = 1 / 256
"""Largest bias: with 8 random bits P(up) is the position truncated to a multiple of this."""
ROWS, COLUMNS = 128, 256


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
        yield Check("Stochastic rounding", partial(_compared, bench), title="stochastic rounding")


def _compared(bench: Bench) -> Iterator[Row]:
    """Test neighbours, bias, independence, and that the seed determines the draws."""
    plain, turned = (
        CopyFormat("nvfp4", "e2m1", stochastic=True),
        CopyFormat("nvfp4", "e2m1", stochastic=True, rotated=True),
    )
    native.seed(bench.device, 1)
    rowwise, columnwise = _draws(bench, plain)
    rotated = _draws(bench, turned)[1]
    copies = {"rowwise": rowwise, "columnwise": columnwise, "columnwise, rotated": rotated}
    invalid = sum(repeated.invalid for repeated in copies.values())
    yield Row("stochastic: neither neighbour", f"{invalid:,} draws", "0", invalid == 0)
    for way, repeated in copies.items():
        yield _unbiased(f"stochastic, {way}: share rounded up", repeated)
    yield from _independent(rowwise, columnwise)
    yield _seeded(bench, plain)


def _draws(bench: Bench, copy: CopyFormat) -> list[RepeatedCasts]:
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
    scaled, magnitudes = present(ours.scaled).clamp(-6, 6), grid()
    low = torch.bucketize(scaled.abs(), magnitudes, right=True).sub(1).clamp(max=6)
    below, above = magnitudes[low], magnitudes[low + 1]
    position = (scaled.abs() - below) / (above - below)
    inside = (position > 0) & (position < 1)
    allowed = (codes.abs() == below) | (codes.abs() == above)
    on_grid = codes.abs() == torch.where(position == 1, above, below)
    sound = torch.where(inside, allowed, on_grid) & ((codes == 0) | (codes.sign() == scaled.sign()))
    same_scale = (
        scales == present(ours.block_scale).flatten(0, 1).squeeze(-1).squeeze(-1)
    ).repeat_interleave(16, dim=2)
    return RepeatedCasts(
        codes.abs() == above, position[None], inside[None], int((~(sound & same_scale)).sum())
    )


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
    summary = f"{same}, and {other} for another seed"
    return Row(
        "stochastic: what one seed draws again",
        summary,
        "the same, and others for another seed",
        repeatable and distinct,
    )


def _tensor() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
