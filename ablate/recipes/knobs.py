"""Short names for the usual combinations of full paths: `sr: true` instead of two slots' roundings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import Field, TypeAdapter

from ablate.files import Json
from ablate.numerics.choices import BLOCKS
from ablate.numerics.spec import BlockScale, Hadamard, Quant, Select, Spec
from ablate.recipes.presets import mxfp8, nvfp4
from ablate.recipes.recipe import DIRECTIONS, Phase, Recipe

GRADIENTS = ("dgrad.g", "wgrad.g")
WEIGHTS = ("fprop.w", "dgrad.w")
WGRAD = ("wgrad.g", "wgrad.x")

Value = TypeVar("Value")
Paths = Mapping[str, Json]
"""Full paths below `recipe.` with the values that a short knob sets there."""


@dataclass(frozen=True)
class Turn:
    """Context of a short knob: the recipe before any knob, and the other short knobs set with it."""

    recipe: Recipe
    others: Mapping[str, Json] = field(default_factory=dict)

    def quantised(self, *slots: str) -> list[str]:
        """Return those of these operands, of SLOTS, that the recipe quantises; without `slots`, of all.
        ValueError if there are none."""
        names = [name for name, _ in self.recipe.quantised() if name in slots or not slots]
        if not names:
            raise ValueError(
                f"this recipe does not quantise {' or '.join(slots) or 'anything'}; there is nothing to turn"
            )
        return names

    def anything(self) -> Recipe:
        if self.recipe.plain:
            raise ValueError("this recipe does not quantise anything; there is nothing to turn")
        return self.recipe


@dataclass(frozen=True)
class Knob(Generic[Value]):
    """Short name: its values, an example, a help text, and the full paths that a value sets. `paths` raises
    ValueError if the recipe has nothing that the knob sets."""

    type: Any
    """Type of the values, as pydantic takes it."""
    example: Value
    help: str
    paths: Callable[[Value, Turn], Paths]
    shown_as: str = ""
    """Values as tables show them, of a type that is neither bool nor a list of words."""

    @property
    def values(self) -> str:
        """Values as tables show them."""
        if self.shown_as or self.type is bool:
            return self.shown_as or "true, false"
        optional = NoneType in get_args(self.type)
        words = get_args(get_args(self.type)[0] if optional else self.type)
        return ", ".join(map(str, words)) + ", or null" * optional

    def check(self, value: object) -> Value:
        """Return the value, checked strictly against the knob's type; pydantic.ValidationError if it is none
        of its values."""
        adapter: TypeAdapter[Value] = TypeAdapter(self.type)
        return adapter.validate_python(value, strict=True)

    def shown(self) -> list[str]:
        """Return the paths that it sets in preset nvfp4."""
        return list(self.paths(self.example, Turn(nvfp4(), {"cooldown": 0.1}))) or ["schedule"]


def _rht(on: bool, turn: Turn) -> Paths:
    others = turn.others
    turn.quantised(*WGRAD)
    rotation: Json = {"size": others.get("rht_size", 16), "signs": others.get("rht_signs", "fixed")}
    return {"wgrad.hadamard": rotation if on else None}


def _of_rht(name: str) -> Callable[[Json, Turn], Paths]:
    def paths(value: Json, turn: Turn) -> Paths:
        if turn.others.get("rht") is False:
            raise ValueError("has no effect with rht false; name such arms one by one under arms")
        turn.quantised(*WGRAD)
        return {} if "rht" in turn.others else {f"wgrad.hadamard.{name}": value}

    return paths


def _at(path: str, *slots: str) -> Callable[[Json, Turn], Paths]:
    """Return the paths of a knob that sets one field of these operands; without `slots`, of all."""
    return lambda value, turn: dict.fromkeys((f"{slot}.{path}" for slot in turn.quantised(*slots)), value)


def _sr(on: bool, turn: Turn) -> Paths:
    return _at("rounding", *GRADIENTS)("stochastic" if on else "nearest", turn)


def _weights_2d(on: bool, turn: Turn) -> Paths:
    slots = turn.quantised(*WEIGHTS)
    quants = {slot: quant for slot, quant in turn.recipe.quantised() if slot in slots}
    rows = {slot: quant.block if quant.tile[0] == 1 else "1x16" for slot, quant in quants.items()}
    return {f"{slot}.block": "16x16" if on else turn.others.get("block", rows[slot]) for slot in quants}


def _block(shape: str, turn: Turn) -> Paths:
    turn.quantised()  # raises if there is nothing to set
    slots = [slot for slot, quant in turn.recipe.quantised() if quant.tile[0] == 1]
    if "weights_2d" in turn.others:
        slots = [slot for slot in slots if slot not in WEIGHTS]
    return dict.fromkeys((f"{slot}.block" for slot in slots), shape)


def _amax_percentile(p: float | None, turn: Turn) -> Paths:
    return _at("outer.statistic")("amax" if p is None else f"percentile:{p}", turn)


def _four_over_six(criterion: str | None, turn: Turn) -> Paths:
    slots = [slot for slot in turn.quantised() if slot not in GRADIENTS]
    select: Json = {"among": "scales", "criterion": criterion} if criterion else None
    parts: Paths = {"select": select, "outer.bound": 256.0 if criterion else 448.0}
    return {f"{slot}.{part}": value for slot in slots for part, value in parts.items()}


def _cooldown(fraction: float, turn: Turn) -> Paths:
    own: list[Json] = [phase.model_dump(mode="json") for phase in turn.anything().schedule]
    text = f"{1 - fraction:.12f}".rstrip("0").rstrip(".")
    last: Json = {"start": f"fraction:{text}", "slots": turn.others.get("cooldown_slots", "all")}
    return {"schedule": [*own, last] if fraction else own}


def _cooldown_slots(slots: str, turn: Turn) -> Paths:
    if not turn.others.get("cooldown"):
        raise ValueError("has no effect without cooldown, the fraction of the run that it is about")
    return {}


def _skip(end: str) -> Callable[[int, Turn], Paths]:
    return lambda count, turn: {f"layers.skip_{end}": count} if turn.anything() else {}


def _backward(how: str, turn: Turn) -> Paths:
    of_backward = ("rht", "rht_size", "rht_signs", "sr", "sr_bits", "sr_headroom")
    if taken := [name for name in of_backward if name in turn.others]:
        raise ValueError(
            f"{', '.join(taken)} and backward are about the same products; name such arms under arms"
        )
    if how == "quantised":
        turn.quantised(*GRADIENTS)
        return {}
    turn.quantised()  # raises if there is nothing to turn
    if how == "dequantised":
        turn.quantised("fprop.x")
        turn.quantised("fprop.w")
    slots = ("dgrad.g", "dgrad.w", "dgrad.hadamard", "wgrad.g", "wgrad.x", "wgrad.hadamard")
    flags = dict.fromkeys(("dgrad.dequantised", "wgrad.dequantised"), True) if how == "dequantised" else {}
    return {**dict.fromkeys(slots), **flags}


def _weight_noise(start: float | None, turn: Turn) -> Paths:
    return {"weights.noise": None if start is None else {"start": start, "end": start / 100}}


def _product(name: str) -> Callable[[str, Turn], Paths]:
    """Return the paths of a knob that turns a whole product: `fp4`, `fp8` or `bf16`."""

    def paths(how: str, turn: Turn) -> Paths:
        turn.quantised()  # raises if there is nothing to turn
        if how == "fp4" and getattr(turn.recipe, name).fp4:
            return {}
        kept = {"fp4": nvfp4, "fp8": mxfp8}.get(how, Recipe)()
        product = getattr(kept, name).model_dump(mode="json")
        operands = getattr(kept, name).operands
        names = (*operands, "hadamard", *(["dequantised"] if "dequantised" in product else []))
        return {f"{name}.{field}": product[field] for field in names}

    return paths


def _type(model: type[Spec], field: str) -> Any:
    return model.model_fields[field].annotation


_Count = Annotated[int, Field(ge=0)]
if TYPE_CHECKING:  # a type checker does not compute the words
    _Rows = str
else:
    _Rows = Literal[tuple(block for block in BLOCKS if block.startswith("1x"))]

KNOBS: dict[str, Knob[Any]] = {
    "rht": Knob(
        bool, True, "Random Hadamard transform, 16 points with fixed signs, on both operands of wgrad.", _rht
    ),
    "rht_size": Knob(
        _type(Hadamard, "size"), 32, "Points of the Hadamard transform of wgrad.", _of_rht("size")
    ),
    "rht_signs": Knob(
        _type(Hadamard, "signs"),
        "per_step",
        "Signs of the Hadamard transform of wgrad: Transformer Engine's, or drawn how often.",
        _of_rht("signs"),
    ),
    "sr": Knob(bool, True, "Stochastic rounding of both copies of the output gradient.", _sr),
    "sr_bits": Knob(
        _type(Quant, "bits"),
        24,
        "Random bits an element: 8 as Transformer Engine, 24 exact.",
        _at("bits", *GRADIENTS),
    ),
    "sr_headroom": Knob(
        Annotated[float, Field(gt=0, le=4)],
        1.0625,
        "Room above the block maximum of the gradients: 1 as Transformer Engine, "
        "17/16 leaves stochastic rounding unbiased.",
        _at("range.headroom", *GRADIENTS),
        "factor",
    ),
    "backward": Knob(
        Literal["quantised", "bf16", "dequantised"],
        "dequantised",
        "Products of the backward pass: as the recipe has them, in bf16, or in bf16 on the forward pass's"
        " quantised x and w.",
        _backward,
    ),
    **{
        name: Knob(
            Literal["fp4", "fp8", "bf16"],
            "fp8",
            f"Both operands of {name}: fp4 as the recipe has them (else as nvfp4); fp8 as preset mxfp8 (not"
            " as fp8_current), without rotation; or bf16.",
            _product(name),
        )
        for name in DIRECTIONS["all"]
    },
    "weights_2d": Knob(
        bool, True, "One scale for a 16x16 weight tile, so that w and w^T are the same numbers.", _weights_2d
    ),
    "block": Knob(_Rows, "1x32", "Elements that share a scale; 16x16 weight tiles stay.", _block),
    "element": Knob(
        _type(Quant, "element") | Annotated[str, Field(pattern=r":[A-Za-z_]\w*$")],
        "int4",
        "Number format of every quantised operand.",
        _at("element"),
        f"{', '.join(get_args(_type(Quant, 'element')))}, or FILE:NAME of your own",
    ),
    "scale_format": Knob(
        _type(BlockScale, "format"),
        "ue5m3",
        "Number format of the block scales.",
        _at("scale.format"),
    ),
    "four_over_six": Knob(
        _type(Select, "criterion") | None,
        "mse",
        "Each block of x and w mapped to 6 or 4, whichever errs less by this criterion (bound 256); "
        "null: to 6 (bound 448).",
        _four_over_six,
    ),
    "amax_percentile": Knob(
        Annotated[float, Field(gt=0, le=1)] | None,
        0.999,
        "Tensor scale from the p-quantile of the magnitudes; null: from the largest.",
        _amax_percentile,
        "p in (0, 1], or null",
    ),
    "weight_noise": Knob(
        Annotated[float, Field(gt=0, le=1)] | None,
        0.01,
        "Standard deviation of noise on norms in training (QeRL): none in the first of 11 parts of the run,"
        " then this, which falls to a hundredth; null: none.",
        _weight_noise,
        "sigma, or null",
    ),
    "cooldown": Knob(
        Annotated[float, Field(ge=0, le=1)],
        0.1,
        "Fraction of the run, at its end, in bf16. Never moves the learning rate.",
        _cooldown,
        "0 to 1",
    ),
    "cooldown_slots": Knob(
        _type(Phase, "slots"), "forward", "Which products the cooldown changes.", _cooldown_slots
    ),
    "skip_first": Knob(
        _Count, 1, "Transformer blocks at the input kept in bf16.", _skip("first"), "0, 1, 2, ..."
    ),
    "skip_last": Knob(
        _Count, 1, "Transformer blocks at the output kept in bf16.", _skip("last"), "0, 1, 2, ..."
    ),
}
