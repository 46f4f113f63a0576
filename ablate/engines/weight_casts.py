"""Casts of one layer's weight, kept while no parameter changes: `WeightCasts`.

The problem. A step of several micro-batches, or an evaluation of many batches, quantises the same weight
again and again to the same operand. A cast that is used too long is worse: the model then trains on weights
of an earlier step, and its loss looks right.

The idea. A cast is kept beside all that it depends on: slot, format, rotation, and the content of the weight
(memory and version). It is used again only if all of these are equal, and only between `begin` and `end`,
which the engine calls around what does not change parameters.

    casts.begin()
    casts.add("fprop.w", quant, None, weight, operands)
    casts.find("fprop.w", quant, None, weight)        # the same operands; None after a change of the weight
    casts.end()

Not seen is a change in place through `.data`, which torch does not count.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from ablate.numerics.quantize import Operand
from ablate.numerics.spec import Hadamard, Quant

Derived = TypeVar("Derived")


class Source:
    """Content of a weight at one moment: equal for the same memory in the same version.

    A version alone would not do: another tensor in the weight's place (torch.func.functional_call,
    `load_state_dict(assign=True)`, `p.data = ...`) often has the same one. The alias keeps the memory, so
    that a later tensor cannot take its address.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        # An inference tensor counts no versions, so it equals none.
        self.version = object() if weight.is_inference() else weight._version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Source)
            and self.version == other.version
            and self.weight.data_ptr() == other.weight.data_ptr()
            and self.weight.shape == other.weight.shape
            and self.weight.stride() == other.weight.stride()
            and self.weight.dtype == other.weight.dtype
        )


@dataclass
class _Cast:
    quant: Quant
    rotation: Hadamard | None
    source: Source
    parts: list[Operand]
    derived: dict[Hashable, Any] = field(default_factory=dict)
    """Made of the first part by `WeightCasts.derived`, by key."""


class WeightCasts:
    """Operands of one layer's weight by slot. A copy of a layer begins without any, and keeps none."""

    def __init__(self) -> None:
        self._kept: dict[str, _Cast] | None = None

    def __deepcopy__(self, memo: object) -> "WeightCasts":
        return WeightCasts()

    def begin(self) -> None:
        """Keep casts from now on."""
        self._kept = {}

    def end(self) -> None:
        """Drop all casts, and keep none from now on."""
        self._kept = None

    def forget(self) -> None:
        """Drop all casts: the optimizer has moved the weight."""
        if self._kept is not None:
            self._kept = {}

    def parts(self) -> list[Operand]:
        """Return all operands that are kept."""
        return [part for cast in (self._kept or {}).values() for part in cast.parts]

    def find(
        self, slot: str, quant: Quant, rotation: Hadamard | None, weight: Tensor
    ) -> list[Operand] | None:
        """Return the weight's operand `fprop.w` or `dgrad.w`, as its parts; None if it must be made.

        dgrad's operand is fprop's transposed for unrotated blocks of 16x16, unless an outer scale belongs to
        rows: those of the transpose are other sets of elements. The weight is [out, in]; of a sharded one,
        this rank's rows.
        """
        if self._kept is None:
            return None
        source = Source(weight)
        if parts := self._same(slot, quant, rotation, source):
            return parts
        one_outer = quant.outer is None or quant.outer.rows is None
        plain = rotation is None and quant.transform is None and not quant.altered
        square = quant.block == "16x16" and plain and one_outer
        forward = self._same("fprop.w", quant, None, source) if slot == "dgrad.w" and square else None
        if forward is None or forward[0].values.shape != weight.shape:
            return None
        parts = [forward[0].transposed()]
        self._kept[slot] = _Cast(quant, rotation, source, parts)
        return parts

    def _same(
        self, slot: str, quant: Quant, rotation: Hadamard | None, source: Source
    ) -> list[Operand] | None:
        cast = (self._kept or {}).get(slot)
        same = cast and (cast.quant, cast.rotation, cast.source) == (quant, rotation, source)
        return cast.parts if cast and same else None

    def add(
        self, slot: str, quant: Quant, rotation: Hadamard | None, weight: Tensor, parts: list[Operand]
    ) -> None:
        """Keep an operand that was made of the weight, with the arguments of `find`."""
        if self._kept is not None:
            self._kept[slot] = _Cast(quant, rotation, Source(weight), parts)

    def derived(self, operand: Operand, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """Return what `make` makes of an operand, once for each key and first part of a cast that is kept."""
        for cast in (self._kept or {}).values():
            if cast.parts[0] is operand:
                if key not in cast.derived:
                    cast.derived[key] = make()
                return cast.derived[key]
        return make()
