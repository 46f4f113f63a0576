"""Row of a check: subject, measured and expected value, and functions that compare the two."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """Subject of a check, measured and expected value."""

    what: str
    measured: str
    expected: str = ""
    ok: bool | None = None
    """None if there is no expected value: a fact about the machine, or a package that is not installed."""


@dataclass(frozen=True)
class Check:
    """Function that yields rows, with the heading `group` that they are printed under. `only` restricts it to
    the full or to the fast run. `title` replaces the function's name."""

    group: str
    run: Callable[[], Iterable[Row]]
    only: Literal["full", "fast"] | None = None
    title: str = ""
    family: str | None = None
    """Family of formats that an engine is compared in; None: all of them."""

    @property
    def name(self) -> str:
        """The title, or else the function's name in words."""
        return self.title or getattr(self.run, "func", self.run).__name__.replace("_", " ")

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the check. An exception becomes a row that failed."""
        try:
            yield from self.run()
        except Exception as error:
            yield Row(self.name, f"{type(error).__name__}: {error}", "no exception", False)


def by_group(
    checks: Sequence[Check], show: Callable[[str], object] | None = None
) -> Iterator[tuple[str, list[tuple[Check, Row]]]]:
    """Run checks; yield each heading with its rows, each beside its check, once they are complete. `show`
    receives the check that begins, as text in rich's markup."""
    for group in dict.fromkeys(check.group for check in checks):
        rows: list[tuple[Check, Row]] = []
        for number, check in enumerate(checks, 1):
            if check.group == group:
                if show:
                    show(f"[dim]{number} of {len(checks)}[/] {group}: {check.name} ...")
                rows += [(check, row) for row in check.rows()]
        if rows:
            yield group, rows


def present(value: T | None) -> T:
    """Return a value that a computation must have set; ValueError if it is None."""
    if value is None:
        raise ValueError("a value that this check needs was not computed")
    return value


def equal(what: str, measured: object, expected: object) -> Row:
    """Return a row that passes if both values have the same text."""
    return Row(what, str(measured), str(expected), str(measured) == str(expected))


def near(what: str, measured: float, expected: float, tolerance: float, cause: str = "") -> Row:
    """Return a row that passes within the relative `tolerance`; `cause` is the reason for that tolerance."""
    limits = f"{expected:g} ± {100 * tolerance:g} %"
    return Row(
        what,
        f"{measured:.4g}",
        f"{limits}, {cause}" if cause else limits,
        bool(abs(measured / expected - 1) <= tolerance),
    )


def below(what: str, measured: float, limit: float, cause: str) -> Row:
    """Return a row that passes at or below the limit; NaN fails. `cause` names the reason for the limit."""
    return Row(what, f"{measured:.2g}", f"at most {limit:.2g}, {cause}" if limit else "0", measured <= limit)


def same(what: str, *pairs: tuple[Tensor, Tensor]) -> Row:
    """Return a row that passes if all elements of each pair are equal; NaN equals nothing."""
    differ = sum(int((ours.double() != theirs.double()).sum()) for ours, theirs in pairs)
    return Row(
        what, f"{differ:,} of {sum(ours.numel() for ours, _ in pairs):,} differ", "0 differ", differ == 0
    )


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers, fp32 [rows, columns], the same in every run."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
