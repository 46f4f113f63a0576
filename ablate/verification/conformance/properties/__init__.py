"""Properties that an implementation of a recipe has, one file a family, and their registry.

A property is a function of an examination. It hands tensors to the subject, compares what comes back with
what the recipe's specification gives (docs/reference/numerics.md; the reference path of `ablate.numerics`),
and returns a row. Tolerances are derived: what the specification fixes is compared exactly, what it leaves
open (order of additions, dequantisation) by a bound on its roundings, and what is random by an interval of
the distribution that the specification gives. None was fitted to an implementation.
"""

from ablate.verification.conformance.properties import (
    cast,
    extremes,
    grouped,
    layout,
    product,
    rotation,
    scales,
    stochastic,
)
from ablate.verification.conformance.properties.property import Property

PROPERTIES: dict[str, Property] = {
    one.name: one
    for family in (cast, scales, extremes, layout, stochastic, rotation, product, grouped)
    for one in family.PROPERTIES
}
"""All properties by name, in the order of the table."""
LATER = ("rotation_large", "long_sums", "grouped_widths", "grouped_fp32", "contraction_sizes")
"""Properties that were added after faults of somebody else had been run: two after the first set, two after
the second, one after the third; 60 were fixed before.
Since then, `near_ties_of_choice` has other tensors, and `random_bf16`, `random_fp32` and `square_blocks` one
more, whose largest magnitude is negative."""
