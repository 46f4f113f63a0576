"""Short names for the usual combinations of full paths: `sr: true` instead of two slots' roundings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ablate.recipes.recipe import SLOTS


@dataclass(frozen=True)
class Knob:
    """A short name: the values it takes, one of them, what it is for, and the full paths (rooted at the recipe) that a value sets."""

    type: Any
    values: str
    example: Any
    help: str
    paths: Callable[[Any], dict[str, Any]]

    def check(self, value: Any) -> Any:
        """The value, or pydantic's ValidationError."""
        return TypeAdapter(self.type).validate_python(value, strict=True)


def _rht(on: bool) -> dict[str, Any]:
    return {"wgrad.hadamard": {"size": 16, "signs": "fixed"} if on else None}


def _sr(on: bool) -> dict[str, Any]:
    return dict.fromkeys(("dgrad.g.rounding", "wgrad.g.rounding"), "stochastic" if on else "nearest")


def _weights_2d(on: bool) -> dict[str, Any]:
    return dict.fromkeys(("fprop.w.block", "dgrad.w.block"), "16x16" if on else "1x16")


def _amax_percentile(p: float | None) -> dict[str, Any]:
    return dict.fromkeys((f"{slot}.outer.statistic" for slot in SLOTS), "amax" if p is None else f"percentile:{p}")


def _rest(fraction: float) -> str:
    text = f"{1 - fraction:.12f}".rstrip("0").rstrip(".")
    return f"fraction:{text}"


def _cooldown(fraction: float) -> dict[str, Any]:
    return {"schedule": [{"start": _rest(fraction), "slots": "all"}] if fraction else []}


_Count = Annotated[int, Field(ge=0)]

KNOBS = {
    "rht": Knob(bool, "true, false", True, "Random Hadamard transform, 16 points with fixed signs, on both operands of wgrad.", _rht),
    "sr": Knob(bool, "true, false", True, "Stochastic rounding of both copies of the output gradient.", _sr),
    "weights_2d": Knob(
        bool, "true, false", True, "One scale for a 16x16 weight tile, so that w and w^T are the same numbers.", _weights_2d
    ),
    "amax_percentile": Knob(
        Annotated[float, Field(gt=0, le=1)] | None,
        "p in (0, 1], or null",
        0.999,
        "Tensor scale from the p-quantile of the magnitudes; null: from the largest.",
        _amax_percentile,
    ),
    "cooldown": Knob(
        Annotated[float, Field(ge=0, le=1)],
        "0 to 1",
        0.1,
        "Fraction of the run, at its end, in bf16. Never moves the learning rate.",
        _cooldown,
    ),
    "skip_first": Knob(_Count, "0, 1, 2, ...", 1, "Transformer blocks at the input kept in bf16.", lambda n: {"layers.skip_first": n}),
    "skip_last": Knob(_Count, "0, 1, 2, ...", 1, "Transformer blocks at the output kept in bf16.", lambda n: {"layers.skip_last": n}),
}
