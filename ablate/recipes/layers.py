"""Selection of linear layers by block, by name, or by the class of an enclosing module. Torch-free.

A model is given as its `Layer`s, whether it has been built or only described, so that planning and every
engine select alike:

    rules: [{match: {blocks: "last:2", within: Attention}}]     the attention layers of the last two blocks in
        high precision

A layer is selected if all fields that are given hold. Fields are globs, not regular expressions; the case of
letters counts.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, model_serializer, model_validator

from ablate.errors import nearest
from ablate.numerics.spec import Spec

LISTS = ("blocks", "layers", "layer", "h")
"""Names of the module lists that hold a model's blocks; the first three also behind a prefix, such as
`decoder_layers`."""
_BLOCK = re.compile(r"(?P<block>(?:.*?\.)?(?:(?:\w+_)?(?:blocks|layers?)|h)\.(?P<number>\d+))\.")
_BLOCKS = re.compile(
    r"(?P<end>first|last):(?:(?P<count>\d+)|0?\.(?P<decimals>\d+))|(?P<start>\d+)-(?P<stop>\d+)", re.ASCII
)
_CLASS = "class:"
BlockOf = Callable[[str], str | None]
"""Returns the name of the block that a module lies in, given the module's name; None for none."""


# --- a model, as far as rules look at it ----------------------------------------------------------


class Layer(NamedTuple):
    """One linear layer inside a block."""

    name: str
    """Qualified name: `blocks.3.mlp.down`."""
    block: int
    """Number of its block, counted through the whole model: a decoder's go on from the encoder's."""
    classes: frozenset[str]
    """Class names of the modules around it, and `Linear`."""
    weights: int = 0
    """Elements of its weight that a token is multiplied by, on average, to which the FLOPs of each of its
    products are proportional; 0: not known."""


def located(
    classes: Mapping[str, Iterable[str]],
    block_of_layer: Callable[[str], str | None] | None = None,
    weights: Callable[[str], int] = lambda name: 0,
) -> tuple[Layer, ...]:
    """Return the layers of a model, in its order, from the class names of the modules around each layer, by
    its name. `block_of_layer` returns the name of a layer's block, None for none (default: `block_name`);
    `weights` returns the number of elements of its weight. ValueError if a layer is in no block."""
    numbers: dict[str, int] = {}
    layers = []
    for name, around in classes.items():
        block = (block_of_layer or block_name)(name)
        if block is None:
            raise ValueError(f"{name} is in no numbered block")
        layers.append(Layer(name, numbers.setdefault(block, len(numbers)), frozenset(around), weights(name)))
    return tuple(layers)


def block_name(name: str) -> str | None:
    """Return the name of the block of a module: `blocks.3` for `blocks.3.mlp.down`; None for none."""
    match = _BLOCK.match(name)
    return match["block"] if match else None


def block_of(name: str) -> int:
    """Return the number of the block that a module lies in, within its own list of blocks; -1 for none."""
    match = _BLOCK.match(name)
    return int(match["number"]) if match else -1


def blocks_in(layers: Sequence[Layer]) -> int:
    """Return the number of blocks that hold these layers, the layers of a whole model."""
    return 1 + max((layer.block for layer in layers), default=-1)


# --- what a rule selects --------------------------------------------------------------------------


def _canonical(blocks: str) -> str:
    """Return `blocks` in canonical spelling; ValueError if it is invalid or can select no block."""
    match = _BLOCKS.fullmatch(blocks)
    if match and match["start"] and int(match["start"]) <= int(match["stop"]):
        return f"{int(match['start'])}-{int(match['stop'])}"
    if match and int(match["count"] or 0):
        return f"{match['end']}:{int(match['count'])}"
    if match and int(match["decimals"] or 0):
        return f"{match['end']}:0.{match['decimals'].rstrip('0')}"
    raise ValueError(
        "must be 'first:n' or 'last:n' with n of 1 or more, "
        "'first:f' or 'last:f' with a fraction f of all blocks in (0, 1), "
        "or 'n-m', numbers of blocks counted from 0"
    )


class Match(Spec):
    """The layers that a rule is about: those for which all given fields hold.

    A string is a short spelling of one field: `class:Attention` of `within: Attention`, any other of `name`.
    What a string can say is written as that string, so both spellings have one id.
    """

    blocks: Annotated[str, AfterValidator(_canonical)] | None = None
    """`first:2`, `last:2`, `last:0.15` (of all blocks, rounded up), or `4-7`: numbers counted from 0, both
    included."""
    name: str | None = Field(None, min_length=1)
    """A glob on the layer's whole qualified name: `blocks.*.mlp.down`."""
    within: str | None = Field(None, min_length=1)
    """A glob on the class of a module around the layer: `Attention`."""

    @model_validator(mode="before")
    @classmethod
    def _short_spelling(cls, data: object) -> object:
        if isinstance(data, str):
            return {"within": data.removeprefix(_CLASS)} if data.startswith(_CLASS) else {"name": data}
        if not isinstance(data, dict | cls):
            raise ValueError(
                "must be a glob on layers' names, 'class:' and a glob on classes, "
                "or fields: blocks, name, within"
            )
        return data

    @model_validator(mode="after")
    def _selects_something(self) -> "Match":
        if not self.fields:
            raise ValueError("must have a field: blocks, name or within; name '*' selects every layer")
        return self

    @model_serializer
    def _shortest(self) -> str | dict[str, str]:
        given = self.fields
        (field, value), *more = given.items()
        short = {"name": value, "within": f"{_CLASS}{value}"}.get(field)
        return short if not more and short and Match.model_validate(short) == self else given

    @property
    def fields(self) -> dict[str, str]:
        return {
            field: value for field in type(self).model_fields if (value := getattr(self, field)) is not None
        }

    def __str__(self) -> str:
        """Return the fields in one line: `blocks last:2, within Attention`."""
        return ", ".join(f"{field} {value}" for field, value in self.fields.items())

    def span(self, blocks: int) -> range:
        """Return the numbers, of `blocks` in all, that the field `blocks` selects; all without that field."""
        match = _BLOCKS.fullmatch(self.blocks or f"0-{blocks}")
        assert match, "_canonical has checked the field"
        if match["start"]:
            return range(int(match["start"]), min(blocks, int(match["stop"]) + 1))
        count = (
            int(match["count"]) if match["count"] else math.ceil(Fraction(f"0.{match['decimals']}") * blocks)
        )
        return range(min(count, blocks)) if match["end"] == "first" else range(max(0, blocks - count), blocks)


class Selection(NamedTuple):
    """The layers that a match selects in one model, and if there are none, why."""

    layers: tuple[Layer, ...]
    lacking: str | None = None
    """Field that selects no layer by itself; `match` if only all of them together select none; None if layers
    are selected."""
    given: str = ""
    """Value of that field."""
    there: tuple[str, ...] = ()
    """Values that would select layers: names, classes or the range of blocks."""

    @property
    def reason(self) -> str | None:
        """The sentence for people; None if layers are selected."""
        if self.lacking is None:
            return None
        if self.lacking == "blocks":
            return f"blocks {self.given!r} selects no layer: the model has blocks {', '.join(self.there)}"
        return f"{self.lacking} {self.given!r} selects no layer; {nearest(self.given, self.there)}"


def select(match: Match, layers: Sequence[Layer]) -> Selection:
    """Return the layers of a model for which all fields of a rule hold, in the model's order. If there are
    none, the selection names the first field that selects no layer by itself, and the values that would."""
    span = match.span(blocks_in(layers))
    holds: dict[str, Callable[[Layer], bool]] = {
        "blocks": lambda layer: layer.block in span,
        "name": lambda layer: fnmatchcase(layer.name, match.name or "*"),
        "within": lambda layer: any(fnmatchcase(name, match.within or "*") for name in layer.classes),
    }
    selected = tuple(layer for layer in layers if all(holds[field](layer) for field in match.fields))
    if selected:
        return Selection(selected)
    there = {
        "blocks": (f"0-{blocks_in(layers) - 1}",),
        "name": tuple(layer.name for layer in layers),
        "within": tuple(sorted({name for layer in layers for name in layer.classes})),
    }
    for field, value in match.fields.items():
        if not any(map(holds[field], layers)):
            return Selection((), field, value, there[field])
    return Selection((), "match", str(match), there["name"])
