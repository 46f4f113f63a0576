"""Transformer Engine's stochastic rounding, of which no bits are published: what can be said of it from many
draws of one tensor.

Every z is judged at a level of one in a million for its row: a sound machine is called off in one of a
million runs.
"""

from collections.abc import Iterator
from functools import partial
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.engines import transformer_engine as native
from ablate.engines.te_casts import casts
from ablate.engines.te_mapping import Family, Format
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Hadamard, Quant
from ablate.verification.check_result import Check, Row
from ablate.verification.parity.bench import Bench
from ablate.verification.parity.casts import grid

LEVEL = 1e-6
BINS = 16
"""Of the position between the two neighbours, each judged on its own."""
CUT = 1 / 256
"""With 8 random bits P(up) is the position cut to a multiple of this; with more it is nearer to the
position."""
ROWS, COLUMNS = 128, 256


class Draws(NamedTuple):
    """One copy of a tensor, many times: all fp32 or bool [draws, rows, columns], or [1, rows, columns] what
    does not change.
    """

    up: Tensor
    position: Tensor
    """Between the lower neighbour (0) and the upper (1), by magnitude."""
    inside: Tensor
    """Where the value lies strictly between two neighbours: nothing is drawn on the grid, and none is above
    6."""
    strangers: int
    """Draws that are neither neighbour, or of the other sign, or of a block with another scale."""


def stochastic_draws(bench: Bench, family: Family) -> Iterator[Check]:
    """NVFP4 alone rounds so."""
    if family == "nvfp4":
        yield Check("Stochastic rounding", partial(_compared, bench), title="stochastic rounding")


def _compared(bench: Bench) -> Iterator[Row]:
    """Neighbours, unbiasedness, independence, and that a seed determines the draws."""
    plain, turned = (
        Format("nvfp4", "e2m1", stochastic=True),
        Format("nvfp4", "e2m1", stochastic=True, rotated=True),
    )
    native.seed(bench.device, 1)
    rowwise, columnwise = _draws(bench, plain)
    rotated = _draws(bench, turned)[1]
    together = {"rowwise": rowwise, "columnwise": columnwise, "columnwise, rotated": rotated}
    strangers = sum(found.strangers for found in together.values())
    yield Row("stochastic: neither neighbour", f"{strangers:,} draws", "0", strangers == 0)
    for way, found in together.items():
        yield _unbiased(f"stochastic, {way}: share rounded up", found)
    yield from _independent(rowwise, columnwise)
    yield _seeded(bench, plain)


def _draws(bench: Bench, copy: Format) -> list[Draws]:
    """Both copies, drawn again and again."""
    x = _tensor()
    drawn = [casts(x.to(bench.device), copy) for _ in range(bench.draws)]
    stacks = [
        [torch.stack([getattr(one[way], part).cpu() for one in drawn]) for part in ("codes", "scales")]
        for way in (0, 1)
    ]
    return [_judged(x, copy, way, *stack) for way, stack in enumerate(stacks)]


def _judged(x: Tensor, copy: Format, way: int, codes: Tensor, scales: Tensor) -> Draws:
    """Draws of one copy beside what the emulator would round, scaled but not rounded yet."""
    rotation = Hadamard() if copy.rotated and way else None
    ours = quantize(x.t() if way else x, Quant(), rotation=rotation, keep=True)
    scaled, magnitudes = ours.scaled.clamp(-6, 6), grid()
    low = torch.bucketize(scaled.abs(), magnitudes, right=True).sub(1).clamp(max=6)
    below, above = magnitudes[low], magnitudes[low + 1]
    position = (scaled.abs() - below) / (above - below)
    inside = (position > 0) & (position < 1)
    allowed = (codes.abs() == below) | (codes.abs() == above)
    on_grid = codes.abs() == torch.where(position == 1, above, below)
    sound = torch.where(inside, allowed, on_grid) & ((codes == 0) | (codes.sign() == scaled.sign()))
    same_scale = (scales == ours.block_scale.flatten(0, 1).squeeze(-1).squeeze(-1)).repeat_interleave(
        16, dim=2
    )
    return Draws(codes.abs() == above, position[None], inside[None], int((~(sound & same_scale)).sum()))


def _unbiased(what: str, found: Draws) -> Row:
    """In each bin of positions the share that went up, against the mean position, or up to 1/256 less: the
    largest z.
    """
    limit = NormalDist().inv_cdf(1 - LEVEL / (2 * BINS))
    up, count = found.up.double().sum(0), len(found.up)
    worst, bias = 0.0, 0.0
    for number in range(BINS):
        chosen = (found.inside & (found.position >= number / BINS) & (found.position < (number + 1) / BINS))[
            0
        ]
        p = found.position[0][chosen].double()
        if not len(p):
            continue
        excess = float(up[chosen].sum() - count * p.sum())
        sd = max(float((count * p * (1 - p)).sum()) ** 0.5, 1e-9)
        worst = max(worst, excess / sd, -(excess + count * len(p) * CUT) / sd)
        bias = max(bias, excess / (count * len(p)), -excess / (count * len(p)), key=abs)
    said = f"z at most {worst:.2f}, off by {bias:.4f} at most"
    return Row(what, said, f"z below {limit:.2f}: the position, or up to 1/256 less", worst < limit)


def _independent(rowwise: Draws, columnwise: Draws) -> Iterator[Row]:
    """The two copies of dy, adjacent elements, and one draw and the next: correlations as z."""
    limit, row = NormalDist().inv_cdf(1 - LEVEL / 2), _residual(rowwise)
    pairs = {
        "the two copies": (row, [z.transpose(1, 2) for z in _residual(columnwise)]),
        "adjacent elements": ([z[:, :, 1:] for z in row], [z[:, :, :-1] for z in row]),
        "one draw and the next": ([z[1:] for z in row], [z[:-1] for z in row]),
    }
    for name, ((a, va), (b, vb)) in pairs.items():
        z = abs(float((a * b).sum())) / max(float((va * vb).sum()) ** 0.5, 1e-9)
        yield Row(f"stochastic: {name} are independent", f"z {z:.2f}", f"below {limit:.2f}", z < limit)


def _residual(found: Draws) -> tuple[Tensor, Tensor]:
    """Up or not less its chance, and the variance of that; zero where nothing is drawn."""
    inside, p = found.inside.double(), found.position.double()
    return (found.up.double() - p) * inside, (p * (1 - p) * inside).expand_as(found.up)


def _seeded(bench: Bench, copy: Format) -> Row:
    x, made = _tensor().to(bench.device), []
    for number in (7, 7, 8):
        native.seed(bench.device, number)
        made.append([one.codes.cpu() for one in casts(x, copy)])
    again = all(torch.equal(a, b) for a, b in zip(made[0], made[1], strict=True))
    other = not any(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))
    said = (
        f"{'the same' if again else 'other draws'}, and {'others' if other else 'the same'} for another seed"
    )
    return Row(
        "stochastic: what one seed draws again",
        said,
        "the same, and others for another seed",
        again and other,
    )


def _tensor() -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
