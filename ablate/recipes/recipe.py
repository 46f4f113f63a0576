"""A recipe as one frozen object: what each product of a linear layer does, in which layers, and from when on.

For x [T, K], w [N, K] and dy [T, N]: fprop y = x w^T contracts K, dgrad dx = dy w contracts N, wgrad dw = dy^T x contracts T.
"""

import math
import re
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ablate.numerics.spec import Hadamard, Quant, Spec, argument

SLOTS = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")
"""The six operands; g is the gradient of the layer's output."""
DIRECTIONS = {"all": ("fprop", "dgrad", "wgrad"), "forward": ("fprop",), "backward": ("dgrad", "wgrad")}
GemmOutput = Literal["bf16_out", "fp32_out"]


class Product(Spec):
    """What all three products share. The rotation belongs here, so that rotating one operand alone cannot be written."""

    hadamard: Hadamard | None = None

    @property
    def plain(self) -> bool:
        """Whether this is the unquantised, unrotated product."""
        return self.hadamard is None and all(getattr(self, slot) is None for slot in self.operands)

    @property
    def operands(self) -> tuple[str, str]:
        """The names of its two operands, the one with the output's rows first."""
        return tuple(name for name in type(self).model_fields if len(name) == 1)

    def high_precision(self) -> "Product":
        """The same product without quantisation or rotation."""
        return self.model_copy(update=dict.fromkeys((*self.operands, "hadamard")))


class Fprop(Product):
    """y = x w^T, contracting in-features."""

    x: Quant | None = None
    w: Quant | None = None
    gemm: GemmOutput = "bf16_out"


class Dgrad(Product):
    """dx = dy w, contracting out-features."""

    g: Quant | None = None
    w: Quant | None = None
    gemm: GemmOutput = "bf16_out"


class Wgrad(Product):
    """dw = dy^T x, contracting tokens. `dw` names the type it leaves the GEMM in; gradients accumulate in fp32 either way."""

    g: Quant | None = None
    x: Quant | None = None
    dw: Literal["bf16", "fp32"] = "bf16"


class Layers(Spec):
    """Which transformer blocks stay in high precision. Embeddings, norms, attention products and the head always do."""

    skip_first: int = Field(0, ge=0)
    skip_last: int = Field(0, ge=0)
    last_fraction: float = Field(0.0, ge=0, le=1)
    """The last ceil(fraction * blocks) blocks; 0.15 in NVIDIA's recipe."""

    def quantises(self, block: int, blocks: int) -> bool:
        """Whether block number `block` of `blocks` is quantised."""
        last = max(self.skip_last, math.ceil(Fraction(repr(self.last_fraction)) * blocks))
        return self.skip_first <= block < blocks - last


def _when(value: str) -> str:
    if not re.fullmatch(r"step:\d+|fraction:(0?\.\d+|0|1|1\.0*|0\.\d*)", value):
        raise ValueError("must be 'step:n' or 'fraction:f' with f in [0, 1]")
    return value


class Phase(Spec):
    """From `start` to the end of the run, the products of `slots` in high precision. Precision only, never the learning rate."""

    start: Annotated[str, AfterValidator(_when)]
    slots: Literal["all", "forward", "backward"] = "all"

    def active(self, step: int, steps: int) -> bool:
        """Whether the phase holds in step `step` (from 0) of `steps`."""
        number = argument(self.start)
        return step >= (number if self.start.startswith("step") else number * steps)


class Recipe(Spec):
    """A complete recipe. `dtype` is the type of activations and of operands that are not quantised."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    fprop: Fprop = Fprop()
    dgrad: Dgrad = Dgrad()
    wgrad: Wgrad = Wgrad()
    layers: Layers = Layers()
    schedule: tuple[Phase, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _fp32_is_unquantised(self) -> "Recipe":
        if self.dtype == "fp32" and not self.plain:
            raise ValueError("dtype fp32 quantises nothing: the input chain of a quantised operand is bf16")
        return self

    @property
    def plain(self) -> bool:
        """Whether nothing is quantised or rotated anywhere."""
        return self.fprop.plain and self.dgrad.plain and self.wgrad.plain

    def at(self, step: int, steps: int) -> "Recipe":
        """The recipe in force in step `step` (from 0) of `steps`: the products of active phases in high precision."""
        names = {name for phase in self.schedule if phase.active(step, steps) for name in DIRECTIONS[phase.slots]}
        return self.model_copy(update={name: getattr(self, name).high_precision() for name in names}) if names else self

    def slot(self, name: str) -> Quant | None:
        """The operand `name`, one of SLOTS."""
        product, operand = name.split(".")
        return getattr(getattr(self, product), operand)
