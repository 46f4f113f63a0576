"""Treatment of mixtures of experts by a recipe, in which training stacks differ. Torch-free.

    experts: {padding: "routed:128", gate_up: split, rounding_state: shared}

The rest of a recipe applies to each matrix of each expert as to any other layer: an outer scale belongs to
one expert, and blocks and rotations do not cross its tokens. Zero rows that pad an expert to a multiple of
the block are not modelled: they change no scale and no product.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator

from ablate.numerics.spec import Spec
from ablate.recipes.layers import Layer


def _padding(value: str) -> str:
    word, _, number = value.partition(":")
    if value == "zeros":
        return value
    multiple = int(number or 128) if number.isdecimal() or value == "routed" else 0
    if word != "routed" or not 2 <= multiple <= 4096:
        raise ValueError(
            "must be 'zeros', or 'routed:n': tokens fill each expert to a multiple of n, from 2 to 4096"
        )
    return f"routed:{multiple}"


def _halves(layer: Layer) -> tuple[Layer, ...]:
    """Return gate and up of an expert's layer that holds both; any other layer as it is."""
    stem, _, own = layer.name.rpartition(".")
    if own != "gate_up" or "Expert" not in layer.classes:
        return (layer,)
    return tuple(layer._replace(name=f"{stem}.{n}", weights=layer.weights // 2) for n in ("gate", "up"))


ONLY_IN_FORKS = (
    "follows an unquantised training from the same checkpoint, which only forks have; add a design to the"
    " file, or use free"
)
"""Reason for which routes cannot be replayed in a whole run."""


class Experts(Spec):
    """Differences between training stacks in how they quantise experts."""

    padding: Annotated[str, AfterValidator(_padding)] = "zeros"
    """`zeros`, as Transformer Engine and torchao pad; `routed:n`, as Megatron-LM with
    `--moe-router-padding-for-quantization`: tokens that are not routed to an expert fill it to a multiple of
    n, with probability 0. An expert without tokens stays empty."""
    gate_up: Literal["fused", "split"] = "fused"
    """`fused`: gate and up are one matrix with one outer scale, as they are stored; `split`: two."""
    rounding_state: Literal["own", "shared"] = "own"
    """`own`: each expert draws its own random words; `shared`: all experts of a layer draw the same, as
    kernels do that are launched with one state."""
    routing: Literal["free", "replay"] = "free"
    """`free`: tokens go where the router sends them; `replay`: where unquantised training from the same
    checkpoint sent them at the same step. Evaluations route freely. In forks of one rank alone, not compiled.
    """

    def matrices(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """Return a described model's layers as this recipe quantises them: gate and up apart, if they are."""
        if self.gate_up == "fused":
            return tuple(layers)
        return tuple(part for layer in layers for part in _halves(layer))

    @property
    def replays(self) -> bool:
        """True if tokens go where an unquantised training sent them."""
        return self.routing == "replay"
