"""What workloads that train no model have in common: no blocks, no layers with names, nothing that takes long to import."""

from typing import ClassVar

from ablate.numerics.spec import Spec
from ablate.recipes.layers import Layer


class Modelless(Spec):
    """A workload whose recipe applies to no model's layers: a layer policy has nothing to count or to name."""

    imports: ClassVar[tuple[str, ...]] = ()
    UNITS: ClassVar[dict[str, str]] = {}
    blocks: ClassVar[int] = 0
    linear_layers: ClassVar[tuple[Layer, ...]] = ()
    linears: ClassVar[tuple[str, ...]] = ()

    def summary(self) -> dict[str, float]:
        """Nothing puts these numbers in proportion but each other."""
        return {}
