"""Faults of stochastic rounding, read from the moments of draws and from draws at equal positions."""

import torch
from torch import Tensor

from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.properties.stochastic import POSITIONS, draws, grid
from ablate.verification.conformance.rotation_faults import NEAR

MANY = 64
"""Numbers that have to show a fault of random draws."""
ALIKE = 0.98
"""Share of equal draws at equal positions, above which they share their random bits."""


def stochastic_fault(bench: Examination) -> str:
    """Return the fault that the moments of the draws show, or ''."""
    made = draws(bench)
    inner = made.position > 0
    if all(not value[inner].any() for value in made.values):
        return "draws are zero"
    if fault := _neighbour_fault(bench):
        return fault
    ups = torch.stack([drawn[inner] for drawn in made.drawn])
    same = len({tuple(drawn[inner].tolist()) for drawn in made.drawn}) == 1
    certain = (made.position[inner] - 0.5).abs() > 1e-6
    nearest = (made.position[inner] > 0.5).double()
    if float((ups - nearest).abs()[:, certain].max()) < NEAR:
        return "rounds to nearest, without draws: the seed has no effect" if same else "rounds to nearest"
    position = made.position[inner]
    means = torch.tensor([float(ups[:, (position - p).abs() < 1e-6].mean()) for p in POSITIONS])
    wanted = torch.tensor(POSITIONS)
    variance = float((ups - position).square().mean() / (position * (1 - position)).mean())
    near = 0.02
    if variance > 1.5 and bool((means - wanted).abs().mean() < 10 * near):
        return "dither of twice the grid step"
    for name, other in (
        ("rounds up with probability 1 - f", 1 - wanted),
        ("rounds up with probability 1/2", torch.full_like(wanted, 0.5)),
        ("always rounds toward zero", torch.zeros_like(wanted)),
        ("always rounds away from zero", torch.ones_like(wanted)),
    ):
        if bool((means - other).abs().max() < near):
            return name
    if same:
        return "the seed has no effect"
    if shared := _shared_draws(ups, position, made.position.shape, inner):
        return shared
    off = means - wanted
    if float(off.abs().max()) > near:
        listed = ", ".join(
            f"{mean:.3f} at {p:.3f}" for mean, p in zip(means.tolist(), POSITIONS, strict=True)
        )
        way = "down" if bool((off < 0).all()) else "up" if bool((off > 0).all()) else "to one side"
        return f"draws biased {way}: the mean draw is {listed} of a step"
    return ""


def _neighbour_fault(bench: Examination) -> str:
    """Return the fault if draws that should be the upper neighbour are one multiple of it, or ''."""
    made = draws(bench)
    below, step, position = grid(bench, made.x)
    upper, wrong, ratios = below + step, 0, []
    for drawn, value in zip(made.drawn, made.values, strict=True):
        odd = (
            (position > 0) & ((drawn - drawn.round()).abs() > NEAR)
            | (drawn.round() < 0)
            | (drawn.round() > 1)
        )
        wrong += int(odd.sum())
        ratios.append((value.double() / upper)[odd])
    ratio = torch.cat(ratios)
    if wrong < MANY or not ratio.isfinite().all() or float((ratio - ratio.median()).abs().max()) > NEAR:
        return ""
    factor = float(ratio.median())
    if abs(factor - 0.5) < NEAR:
        return "carry lost: draws that round up to a power of two come out half as large"
    return f"draws that round up come out {factor:.4g} times as large"


def _shared_draws(ups: Tensor, position: Tensor, shape: torch.Size, inner: Tensor) -> str:
    """Return the fault of draws that share their random bits, or ''.

    Shared bits have to show in the draws themselves: at equal positions, they round alike.
    """
    full = torch.full((len(ups), *shape), float("nan"), dtype=torch.float64)
    full[:, inner] = ups
    places = torch.full(tuple(shape), float("nan"), dtype=torch.float64)
    places[inner] = position
    at = places.expand(len(ups), -1, -1)
    shifts = [(f"{by} apart", by) for by in (2, 4, 8, 16, 32, 64, 128)]
    for axis, word in ((1, "rows"), (2, "columns")):
        size = at.shape[axis]
        for distance, by in (("next to each other", 1), *shifts, ("in the two halves", size // 2)):
            if by < size and (said := _alike(full, at, axis, by)):
                return f"{said} random bits in {word} {distance}"
    if said := _alike(full, at, 0, 1):
        return f"{said} random bits for different seeds"
    return ""


def _alike(full: Tensor, at: Tensor, axis: int, by: int) -> str:
    """Return `equal` or `opposite` if draws at equal positions, `by` apart along an axis, are so; else ''."""
    length = full.shape[axis] - by
    one, other = (z.narrow(axis, 0, length) for z in (full, at))
    next_one, next_at = (z.narrow(axis, by, length) for z in (full, at))
    alike = (other - next_at).abs() < 1e-6
    if int(alike.sum()) < MANY:
        return ""
    share = float(((one - next_one).abs()[alike] < 1e-6).double().mean())
    halfway = alike & ((other - 0.5).abs() < 1e-6)
    if share > ALIKE:
        return "equal"
    opposite = float(((one + next_one - 1).abs()[halfway] < 1e-6).double().mean()) if halfway.any() else 0.0
    return "opposite" if opposite > ALIKE else ""
