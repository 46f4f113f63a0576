"""Parts of a report on runs that were not started here: where they are from, and what is known of them."""

from ablate.reports.table import Table
from ablate.store.judged import Judged

_MOST_SOURCES = 40
"""Largest number of sources that a table lists."""


def sources_table(judged: Judged) -> Table:
    """Return the table of the files that were read, with their digests, and of what was decided."""
    rows = [
        {"what": "read from", "which": f"{place}, sha256 {digest[:16]}" if digest else place}
        for place, digest in [*judged.sources.items()][:_MOST_SOURCES]
    ]
    rows += [{"what": "reading", "which": text} for text in dict.fromkeys(judged.said)]
    rows += [{"what": "judged", "which": occasion.text} for occasion in judged.times]
    return Table.of("provenance", rows)


def method_text(pairing: str, arms: str, interval: str) -> str:
    """Return how the numbers were made, for readers who want to quote them.

    Args:
        pairing: How differences were taken.
        arms: Number of arms and runs.
        interval: Name of the interval.
    """
    return (
        f"{arms}, trained elsewhere: that runs of one seed share initial weights and data order is their"
        f" owner's claim. A run counts by its last value. Gaps are arm minus baseline, {pairing}, each with a"
        f" {interval}; an unpaired one has each arm's own deviation (docs/reference/statistics.md)."
    )
