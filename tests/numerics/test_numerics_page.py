"""docs/reference/numerics.md, the specification: its tables are the registries, and every file that cites a section cites one that exists."""

import re
from pathlib import Path

import pytest

from ablate.numerics import choices, hadamard
from ablate.numerics.formats import ELEMENTS, SCALES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "numerics.md").read_text()


def table(heading: str) -> dict[str, list[str]]:
    """Return the rows of the table whose first column has this heading: its cells by the first one."""
    body = re.search(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in body[1].splitlines()]
    return {row[0]: row[1:] for row in rows}


def number(cell: str) -> float:
    base, _, power = cell.partition("^")
    return float(base) ** int(power) if power else float(cell)


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


@pytest.mark.parametrize(("heading", "registry"), [("element", ELEMENTS), ("block scale", SCALES)])
def test_the_tables_of_formats_are_the_registries(heading, registry):
    rows = table(heading)
    assert list(rows) == list(registry)
    for name, form in registry.items():
        bits, mantissa, smallest, largest, zero = rows[name]
        assert (int(bits), int(mantissa), number(smallest), zero) == (
            form.bits,
            form.mantissa,
            2.0**form.emin,
            yes(form.zero),
        )
        assert number(largest) == pytest.approx(form.max, rel=1e-8)


def test_the_tables_of_words_are_the_registries():
    roundings = {
        name: [yes(how.draws), yes(how.of_elements), yes(how.of_scales)]
        for name, how in choices.ROUNDINGS.items()
    }
    assert {name: cells[1:] for name, cells in table("rounding").items()} == roundings
    assert list(table("outer statistic")) == list(choices.STATISTICS)
    assert list(table("granularity of the outer scale")) == list(choices.GRANULARITIES)
    assert table("signs") == {name: [yes(how.drawn), yes(how.lasting)] for name, how in choices.SIGNS.items()}
    assert list(table("candidates")) == list(choices.CANDIDATES)
    assert all(block in PAGE for block in choices.BLOCKS)


def test_the_fixed_signs_are_those_of_the_code():
    signs = re.search(r"vector `([+-]+)`", PAGE)[1]
    assert signs == "".join("+" if sign > 0 else "-" for sign in hadamard.TE_SIGNS)


def test_cited_sections_exist():
    sections = set(re.findall(r"^## (\d+)\.", PAGE, re.MULTILINE))
    cited = {
        section
        for path in [*(ROOT / "ablate").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
        for match in re.findall(
            r"docs/reference/numerics\.md\s*(?:,|\()\s*sections? (\d+)(?: to (\d+))?", path.read_text()
        )
        for section in match
        if section
    }
    assert cited
    assert cited <= sections
