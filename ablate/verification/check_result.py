"""Row of a check: what was looked at, measured and expected, with ways to compare the two."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """Subject of a check, measured and expected value."""

    what: str
    measured: str
    expected: str = ""
    ok: bool | None = None
    """None where nothing in particular is expected: a fact, or something that is not installed."""


@dataclass(frozen=True)
class Check:
    """A function that yields rows, under a heading. `only` full or fast: left out of the other run."""

    group: str
    run: Callable[[], Iterable[Row]]
    only: Literal["full", "fast"] | None = None
    title: str = ""

    @property
    def name(self) -> str:
        """Its title, or the function's name in words."""
        return self.title or getattr(self.run, "func", self.run).__name__.replace("_", " ")

    def rows(self) -> Iterator[Row]:
        """Its rows. An exception is one too: what cannot be checked has not passed."""
        try:
            yield from self.run()
        except Exception as error:
            yield Row(self.name, f"{type(error).__name__}: {error}", "no exception", False)


def equal(what: str, measured: object, expected: object) -> Row:
    """Both must print alike."""
    return Row(what, str(measured), str(expected), str(measured) == str(expected))


def near(what: str, measured: float, expected: float, tolerance: float, cause: str = "") -> Row:
    """Within a share `tolerance` of a figure, which `cause` explains."""
    limits = f"{expected:g} ± {100 * tolerance:g} %"
    return Row(
        what,
        f"{measured:.4g}",
        f"{limits}, {cause}" if cause else limits,
        bool(abs(measured / expected - 1) <= tolerance),
    )


def below(what: str, measured: float, limit: float, cause: str) -> Row:
    """At most the limit; NaN is not."""
    return Row(what, f"{measured:.2g}", f"at most {limit:.2g}, {cause}" if limit else "0", measured <= limit)


def same(what: str, *pairs: tuple[Tensor, Tensor]) -> Row:
    """Every element of each pair alike; NaN is like nothing."""
    differ = sum(int((ours.double() != theirs.double()).sum()) for ours, theirs in pairs)
    return Row(
        what, f"{differ:,} of {sum(ours.numel() for ours, _ in pairs):,} differ", "0 differ", differ == 0
    )


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Standard normal fp32 [rows, columns], the same in every run."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
