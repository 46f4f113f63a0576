"""Cells of a table, by the name of their column."""

from ablate.reports.table import Cell, Table


def cells(table: Table) -> list[dict[str, Cell]]:
    """Return a mapping for each row; a head of two lines has a space in place of the break."""
    return [{one.name.replace("\n", " "): one.cell(row) for one in table.columns} for row in table.rows]
