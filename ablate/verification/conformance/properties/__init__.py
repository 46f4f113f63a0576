"""Properties that an implementation of a recipe has, one file a family, and their registry.

A property hands tensors to the subject, compares what comes back with what the recipe's specification gives
(docs/reference/numerics.md; the reference path of `ablate.numerics`), and gives a row. Tolerances are
derived: what the specification fixes is compared exactly, what it leaves open (order of additions,
dequantisation) by a bound on its roundings, and what is random by an interval of the distribution that the
specification gives. None was fitted to an implementation.
"""

from ablate.verification.conformance.properties import (
    calls,
    casts,
    grouped,
    product,
    rotation,
    stochastic,
)
from ablate.verification.conformance.properties.property import Property

PROPERTIES: dict[str, Property] = {
    one.name: one
    for family in (casts, calls, stochastic, rotation, product, grouped)
    for one in family.PROPERTIES
}
"""All properties by name, in the order of the table."""
