"""Figures of reports. Each has the question that it answers as its title, and the numbers that it draws.

A function takes summaries of arms, the tidy frame of records, or a grid, and returns a `Picture`, or None if
there is nothing to draw. It draws at most 40 arms, with the baselines of these, and states how many there
are. Only this folder imports seaborn.
"""

from ablate.reports.figures.bench import bars, shares, speeds
from ablate.reports.figures.curves import curves, decay, gap_curve
from ablate.reports.figures.effects import (
    interaction,
    operand_errors,
    throughput_gap,
)
from ablate.reports.figures.health import divergence, slot_errors
from ablate.reports.figures.search import history, importance, objectives
from ablate.reports.figures.style import Picture
from ablate.reports.figures.tensors import errors_by_slot, rotation_histogram, rounding_histogram

__all__ = [
    "Picture",
    "bars",
    "curves",
    "decay",
    "divergence",
    "errors_by_slot",
    "gap_curve",
    "history",
    "importance",
    "interaction",
    "objectives",
    "operand_errors",
    "rotation_histogram",
    "rounding_histogram",
    "shares",
    "slot_errors",
    "speeds",
    "throughput_gap",
]
