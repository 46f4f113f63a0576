"""Common base of workloads that train no model: no blocks, no named layers, no slow imports."""

from typing import ClassVar

from ablate.numerics.spec import Spec
from ablate.recipes.layers import Layer


class Modelless(Spec):
    """Workload whose recipe applies to no model's layers: a layer policy has nothing to count or select."""

    imports: ClassVar[tuple[str, ...]] = ()
    UNITS: ClassVar[dict[str, str]] = {}
    blocks: ClassVar[int] = 0
    linear_layers: ClassVar[tuple[Layer, ...]] = ()
    linears: ClassVar[tuple[str, ...]] = ()

    def summary(self) -> dict[str, float]:
        """Return no facts: these numbers can be compared only with each other."""
        return {}
