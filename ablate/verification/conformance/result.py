"""Findings on a subject: a row a property, with the first block that differs."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Outcome(StrEnum):
    """Result of the examination of one property."""

    PASS = "pass"
    VARIANT = "variant"
    """Differs from the recipe as the subject declares, in a way that is legitimate."""
    FAIL = "fail"
    REPORT = "report"
    """Measured; neither right nor wrong by the recipe."""
    NOT_APPLICABLE = "n/a"
    """The subject has no such function, or does not take what the property needs."""


@dataclass(frozen=True)
class Block:
    """One block in which a subject differs, with both computations."""

    place: str
    """`row 3, columns 16 to 31`; of a dump: layer and product as well."""
    source: tuple[float, ...]
    """Input elements."""
    expected: tuple[float, ...]
    got: tuple[float, ...]
    computed: str = ""
    """Computation that the recipe makes, in numbers: `amax 6.0, S 448, scale 1.0 (e4m3 0x38)`."""
    computed_by_subject: str = ""
    """The same of the subject, as far as its result shows it."""


class Wrong(NamedTuple):
    """One wrong number of a stage."""

    tensor: str
    """Tensor of the property in words, or the product."""
    row: int
    column: int
    """Column; of a block scale, number of the block in its row."""
    input: float
    """Input element; of a block scale, its largest magnitude; NaN of a product."""
    recipe: float
    subject: float


@dataclass(frozen=True)
class Row:
    """Finding on one property: outcome, number of cases, and where the first difference is."""

    property: str
    outcome: Outcome
    cases: int = 0
    """Compared numbers: elements, blocks or draws, as the property counts."""
    differing: int = 0
    block: Block | None = None
    stage: str = ""
    """First stage that is wrong, and what is measured of it: `code: 3 % of 8,192 wrong, ...`."""
    detail: str = ""
    """One sentence: measured number with its bound, variant, or reason of n/a."""
    declare: str = ""
    """Sentence, also in `detail`: what to declare for the property to hold; '' if nothing does."""
    wrong: tuple[Wrong, ...] = field(default=(), repr=False)
    """Every wrong number of that stage."""


def decided(cases: int, differing: int, block: Block | None = None, detail: str = "") -> Row:
    """Return the row of a property, still without its name, that fails if anything differs."""
    return Row("", Outcome.FAIL if differing else Outcome.PASS, cases, differing, block, detail=detail)


def counts(row: Row) -> str:
    """Return the number of compared numbers of a row, or of those that differ, in words."""
    if not row.cases:
        return "not compared"
    if not row.differing:
        return f"{row.cases:,} compared"
    if row.property in ("random_gradients", "grouped_random"):
        return f"{row.differing} of {row.cases} figures outside"
    return f"{row.differing:,} of {row.cases:,} differ"
