"""Numbers as pictures, each named by its question, with the numbers behind it. The only folder that knows
seaborn.

A function takes what the reading wing gives (arms, the frame, a grid) and returns a Picture, or None where
there is nothing to draw. It draws at most forty arms, and the baselines of those, and says of how many.
"""

from ablate.results.figures.bench import bars, shares, speeds
from ablate.results.figures.curves import curves, decay, gap_curve
from ablate.results.figures.effects import (
    contrast_forest,
    dots,
    forest,
    interaction,
    seed_spread,
    throughput_gap,
)
from ablate.results.figures.health import divergence, fractions, slot_errors, slot_layers
from ablate.results.figures.search import history, importance, objectives, parallel
from ablate.results.figures.style import Picture
from ablate.results.figures.tensors import errors_by_slot, rotation_histogram, rounding_histogram

__all__ = [
    "Picture",
    "bars",
    "contrast_forest",
    "curves",
    "decay",
    "divergence",
    "dots",
    "errors_by_slot",
    "forest",
    "fractions",
    "gap_curve",
    "history",
    "importance",
    "interaction",
    "objectives",
    "parallel",
    "rotation_histogram",
    "rounding_histogram",
    "seed_spread",
    "shares",
    "slot_errors",
    "slot_layers",
    "speeds",
    "throughput_gap",
]
