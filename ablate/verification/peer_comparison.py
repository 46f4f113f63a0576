"""Comparison of the quantiser with another implementation on the same inputs, element by element.

This file creates the inputs, counts mismatches, and loads packages whose plain import fails. `peers` has one
function per package.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, Format
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import ROUNDINGS
from ablate.numerics.spec import BlockScale, Hadamard, Quant, Range
from ablate.verification.check_result import present

Arrays = tuple[Tensor, ...]
SHAPE = (64, 256)


@dataclass(frozen=True)
class PeerComparison:
    """Comparison of one peer and the quantiser on equal inputs; +0 equals -0, NaN equals nothing."""

    what: str
    elements: int
    mismatches: int
    allowed: float = 0.0
    """Largest fraction of mismatches, explained by `why`; 0 if every bit must agree."""
    why: str = ""
    peer: str = ""
    version: str = ""

    @property
    def agrees(self) -> bool:
        """True if no more elements differ than is explained."""
        return self.mismatches <= self.allowed * self.elements


def version(peer: str) -> str | None:
    """Return the installed version of a peer, or None; imports nothing."""
    try:
        return metadata.version(peer)
    except metadata.PackageNotFoundError:
        return None


# --- inputs ---------------------------------------------------------------------------------------


@cache
def tensors() -> dict[str, Tensor]:
    """Return the fixed bf16 tensors [64, 256], by name, that every quantiser receives."""
    g = torch.Generator().manual_seed(20)
    normal = partial(torch.randn, SHAPE, generator=g)
    exponent = torch.randint(-14, 1, (SHAPE[0], 1), generator=g)
    hit = torch.rand(SHAPE, generator=g) < 0.01
    kept = torch.rand(SHAPE[0] // 32, SHAPE[1] // 32, generator=g) < 0.5
    kinds = {
        "gaussian": normal(),
        "outliers": torch.where(hit, 1e4, 1.0) * normal(),  # most E4M3 scales become subnormal or zero
        "ties": torch.randint(-24, 25, SHAPE, generator=g)
        * 0.25
        * 2.0**exponent,  # halfway points of E2M1 and of E4M3
        "spread": normal() * 2.0**exponent,  # block scales over the whole of E4M3
        "zero_blocks": normal() * kept.repeat_interleave(32, 0).repeat_interleave(32, 1),
        "zero": torch.zeros(SHAPE),
        "tiny": normal() * 1e-30,
        "huge": normal() * 1e30,
        "subnormal": normal() * 2.0**-130,
    }
    return {name: x.bfloat16() for name, x in kinds.items()}


@cache
def values(grid: Format) -> Tensor:
    """Return inputs of a cast to `grid`, fp32 [n].

    They are its points, the halfway points, their fp32 neighbours, Gaussians, tiny and huge values.
    """
    g = torch.Generator().manual_seed(21)
    steps = torch.arange(2**grid.mantissa) * 2.0 ** (grid.emin - grid.mantissa)
    binades = 2.0 ** torch.arange(int(np.log2(grid.max)) - grid.emin + 1)
    points = torch.cat((steps, ((steps + 2.0**grid.emin) * binades[:, None]).flatten()))
    middles = (points[1:] + points[:-1]) / 2
    exact = torch.cat((points, middles, torch.tensor([grid.max * 1.25, grid.max * 1e3, 1e-45, 1e-30, 1e30])))
    near = [torch.nextafter(exact, torch.tensor(end)) for end in (0.0, float("inf"))]
    y = torch.randn(8192, generator=g).abs()
    magnitudes = torch.cat((exact, *near, y * grid.max / 2, y, y * 2.0**grid.emin))
    return torch.cat((magnitudes, -magnitudes))


def on_tensors(
    what: str, ours: Callable, theirs: Callable, *, without: str = "", allowed: float = 0.0, why: str = ""
) -> PeerComparison:
    """Compare two functions of a tensor that return tuples of tensors of equal shapes.

    Args:
        what: Subject of the comparison.
        ours: The quantiser.
        theirs: The peer.
        without: Names of tensors to leave out, separated by spaces.
        allowed: Largest fraction of mismatches.
        why: Reason for these mismatches.
    """
    pairs = [(ours(x), theirs(x)) for name, x in tensors().items() if name not in without.split()]
    return count(
        what, [pair for mine, other in pairs for pair in zip(mine, other, strict=True)], allowed, why
    )


def on_values(
    what: str, grid: Format, ours: Callable, theirs: Callable, *, signed: bool = True
) -> PeerComparison:
    """Compare two casts to `grid`, value by value."""
    y = values(grid) if signed else values(grid).abs()
    return count(what, [(ours(y), theirs(y))])


def count(
    what: str, pairs: list[tuple[Tensor, Tensor]], allowed: float = 0.0, why: str = ""
) -> PeerComparison:
    """Count the mismatches in pairs of tensors; ValueError if their shapes differ."""
    for mine, other in pairs:
        if mine.shape != other.shape:
            raise ValueError(f"{what}: ours is {list(mine.shape)}, theirs {list(other.shape)}")
    mismatches = sum(int((mine.double() != other.double()).sum()) for mine, other in pairs)
    return PeerComparison(what, sum(mine.numel() for mine, _ in pairs), mismatches, allowed, why)


# --- the quantiser --------------------------------------------------------------------------------


def mx(element: str, rounding: str) -> Quant:
    """Return an MX quantiser: 1x32 blocks with power-of-two scales, and no outer scale.

    `rounding` is OCP's `floor`, or `ceil`, which never saturates. OCP's floor rule maps the power of two at
    or below a block's amax to the element's largest power of two.
    """
    top = ELEMENTS[element].top_power if rounding == "floor" else None
    scale = BlockScale(format="e8m0", rounding=rounding)
    return Quant(element=element, block="1x32", scale=scale, range=Range(map_to=top), outer=None)


def quantized(quant: Quant, x: Tensor, rotation: Hadamard | None = None) -> Arrays:
    """Return code times block scale [rows, columns], and the block scales [rows, blocks]."""
    operand = quantize(x, quant, rotation=rotation)
    return operand.values, present(operand.block_scale)[:, 0, :, 0].repeat_interleave(quant.tile[0], 0)


def cast(name: str) -> Callable[[Tensor], Tensor]:
    """Return the cast to an element format, rounded to nearest."""
    return partial(ROUNDINGS["nearest"], grid=ELEMENTS[name])


# --- packages whose import fails ------------------------------------------------------------------


@contextmanager
def shells(package: str, *subpackages: str) -> Iterator[None]:
    """Replace a package and some of its subpackages by empty modules within the block.

    Their submodules can then be imported, for a library whose `__init__` needs something that is missing.
    Afterwards sys.modules is restored, so that a real import still works.
    """
    kept = {name: sys.modules.pop(name) for name in _modules_of(package)}
    try:
        for name in (package, *(f"{package}.{sub}" for sub in subpackages)):
            shell(name, __path__=[str(metadata.distribution(package).locate_file(name.replace(".", "/")))])
        yield
    finally:
        for name in _modules_of(package):
            del sys.modules[name]
        sys.modules.update(kept)


def _modules_of(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]


def shell(name: str, **attributes: object) -> None:
    """Put an empty module with these attributes into sys.modules."""
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(attributes)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress log messages below errors: torchao logs missing GPU libraries when it is imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
