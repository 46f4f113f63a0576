"""Description of one quantised operand and one rotation. Nothing is computed here and torch is not imported.

Every class is frozen, hashable and closed: an unknown field, an impossible value or a contradiction is
refused, with the reason, when an object is built. "Off" is always None: an unquantised operand has no Quant,
and an unrotated product has no Hadamard.
"""

from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from ablate.numerics.choices import GRANULARITIES, ROUNDINGS, STATISTICS, Rounding, Statistic
from ablate.numerics.formats import SCALES, element_format
from ablate.numerics.own import Own
from ablate.numerics.words import (
    Block,
    BlockStatistic,
    Candidates,
    ChannelFormat,
    Criterion,
    Element,
    ElementRounding,
    OuterStatistic,
    Quantiser,
    ScaleFormat,
    ScaleRounding,
    SignRule,
    tagged,
)

VERSION = 2
"""Raise by hand when a change here or in a kernel changes any bit that a recipe computes: it is part of every
trial's id."""
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""JSON data, as `ablate.files` has it: this package imports none of the others."""

_CAST = tuple(name for name, scale in SCALES.items() if scale.bits >= 16)
"""Scale formats to which torch casts, only to nearest; the others are rounded on their grid."""
_FRACTIONAL = tuple(name for name, form in SCALES.items() if form.bits <= 8 and form.mantissa and form.zero)
"""One-byte scale formats finer than powers of two, with subnormals, for which block scales can be selected
and corrected."""
_MICRO_ELEMENT, _MICRO_SCALE = "e1m2", "e6m2"
"""Formats for which micro-exponents are defined."""
_BF16_BITS = SCALES["bf16"].significant


def tag(tagged: str) -> str:
    """Return the word before the colon: `percentile` for "percentile:0.07"."""
    return tagged.partition(":")[0]


def argument(tagged: str) -> Fraction | None:
    """Return the number behind the colon, exactly as written: 7/100 for "percentile:0.07", None for "amax".
    In binary 0.07 * 100 is above 7, and its ceiling 8."""
    _, colon, text = tagged.partition(":")
    return Fraction(text) if colon else None


class Spec(BaseModel):
    """Frozen description: strict about types, closed to unknown fields, equal and hashable by value."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )

    LATER: ClassVar[frozenset[str]] = frozenset()
    """Fields added since 0.1.0. With its default such a field is not part of a trial's identity, so results
    of earlier releases stay valid."""

    def changed(self, paths: Mapping[str, object] = MappingProxyType({}), /, **fields: object) -> Self:
        """Return this description with other values, which are not checked, of fields and of paths to fields
        at any depth, such as `wgrad.hadamard`; a path leads through no None."""
        update: dict[str, Any] = dict(fields)
        for path, value in paths.items():
            name, dot, rest = path.partition(".")
            update[name] = update.get(name, getattr(self, name)).changed({rest: value}) if dot else value
        return self.model_copy(update=update)

    def canonical(self, exclude: Collection[str] = ()) -> dict[str, Json]:
        """Return the JSON data that identifies this description: its fields without `exclude` and, at every
        depth, without LATER fields that have their defaults, and without the folders of users' functions."""
        data = self.model_dump(mode="json", exclude=set(exclude))
        _drop_later(self, data)
        return data


@cache
def _defaults(kind: type[Spec], names: frozenset[str]) -> dict[str, Any]:
    """Return the defaults of fields by name: a plan asks for those of LATER some 100,000 times."""
    return {name: kind.model_fields[name].get_default(call_default_factory=True) for name in names}


def _drop_later(spec: Spec, data: dict[str, Json]) -> None:
    """Remove LATER fields that have their defaults, and folders, from JSON data, at every depth."""
    later = _defaults(type(spec), spec.LATER)
    for name in [*data]:
        value = getattr(spec, name)
        if name in later and value == later[name]:
            del data[name]
            continue
        if isinstance(value, Own):
            data[name] = value.identity
        content = data[name]
        pairs = [(value, content)]
        if isinstance(value, tuple) and isinstance(content, list):
            pairs = list(zip(value, content, strict=True))
        for part, plain in pairs:
            # A layer rule may be written as one word. pydantic's isinstance() is slow, so it comes last.
            if isinstance(plain, dict) and isinstance(part, Spec):
                _drop_later(part, plain)


def _listed(words: Collection[str], between: str = "or") -> str:
    """Return words as a list in a sentence: `e4m3, ue5m3 or e8m0`."""
    *others, last = words
    return f"{', '.join(others)} {between} {last}" if others else last


def own_words(spec: Spec) -> Iterator[tuple[str, Own]]:
    """Yield the path and the word of every function of the user's in a description, at every depth."""
    yield from ((path, part) for path, part in _parts(spec) if isinstance(part, Own))


def quants(spec: Spec) -> "Iterator[Quant]":
    """Yield every quantiser in a description, at every depth."""
    yield from (part for _, part in _parts(spec) if isinstance(part, Quant))


def _parts(spec: Spec, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the value of every field, and of the items of tuples, at every depth."""
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        for part in value if isinstance(value, tuple) else (value,):
            yield f"{path}{name}", part
            if isinstance(part, Spec):
                yield from _parts(part, f"{path}{name}.")


def rounding_of(word: str) -> Rounding:
    """Return the properties of a rounding, ours or the user's."""
    return Rounding(draws=word.draws) if isinstance(word, Own) else ROUNDINGS[word]


def statistic_of(word: str) -> Statistic:
    """Return the properties of an outer statistic; one of the user's is a number a tensor."""
    return Statistic(word, per_tensor=True) if isinstance(word, Own) else STATISTICS[tag(word)]


class BlockScale(Spec):
    """Scale that the elements of one block share."""

    format: ScaleFormat = "e4m3"
    rounding: ScaleRounding = "nearest"
    """`floor` with `range.map_to` 4 is OCP's rule for MXFP4, `ceil` never saturates; stochastic draws 24 bits
    a block."""
    zero: Literal["zero", "one", "min_normal"] = "zero"
    """Value of a scale that rounds to zero. Transformer Engine keeps 0, which loses the block; E8M0 has no
    zero."""
    halve_below: float | None = Field(None, gt=0.5, le=1)
    """Halve an E8M0 scale that was rounded up if the number that was rounded is less than this part of it
    (0.87 in MXFP4-v4)."""
    micro_exponents: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, strict=False, min_length=1)
    """Lengths of the sub-blocks that have a one-bit exponent of their own, each a divisor of the one before:
    `[8, 4]` in HiF4."""

    @property
    def levels(self) -> int:
        """Number of levels of micro-exponents."""
        return len(self.micro_exponents or ())

    @model_validator(mode="after")
    def _consistent(self) -> "BlockScale":
        if self.format in _CAST and self.rounding != "nearest" and not isinstance(self.rounding, Own):
            others = _listed([name for name in SCALES if name not in _CAST], "and")
            raise ValueError(
                f"scale.rounding {self.rounding} is for {others}; a {self.format} scale is rounded to nearest"
            )
        if not SCALES[self.format].zero and self.zero != "zero":
            raise ValueError(f"scale.zero does not apply to {self.format}, which has no zero; leave it out")
        if self.halve_below is not None and (self.format, self.rounding) != ("e8m0", "ceil"):
            raise ValueError(
                "scale.halve_below halves powers of two that were rounded up: it needs scale.format e8m0 and"
                f" scale.rounding ceil, not {self.format} and {self.rounding}"
            )
        lengths = self.micro_exponents or ()
        if lengths and self.format != _MICRO_SCALE:
            raise ValueError(
                f"scale.micro_exponents is defined for scale.format {_MICRO_SCALE}, not {self.format}"
            )
        for longer, shorter in pairwise(lengths):
            if shorter >= longer or longer % shorter:
                raise ValueError(
                    f"scale.micro_exponents: a sub-block of {shorter} is no part of one of {longer};"
                    " write lengths that fall, each a divisor of the one before, such as [8, 4]"
                )
        return self


class Range(Spec):
    """Mapping of a block's largest magnitude to the element grid."""

    statistic: BlockStatistic = "amax"
    """Statistic that is mapped: `amax`, or `rms:c` or `std:c` (QuEST), which clip larger magnitudes."""
    map_to: float | None = Field(None, gt=0)
    """Element value to which it is mapped; null: the element's maximum. 4 with E2M1 and floor is OCP's
    rule."""
    headroom: float = Field(1.0, gt=0, le=4)
    """Factor of the block scale: 1 in Transformer Engine; 17/16 leaves stochastic rounding unbiased
    (docs/reference/numerics.md, section 3)."""
    prescale: float = Field(1.0, gt=0, le=8)
    """Factor of the scaled elements, by which the product is divided: 3/4 keeps OCP's floor rule from
    saturating (arXiv 2502.20586); 6 with `map_to` 1 in MXFP4-v4."""


class Outer(Spec):
    """Second level of the scaling, in fp32."""

    granularity: Annotated[str, AfterValidator(partial(tagged, words=GRANULARITIES))] = "tensor"
    """`tensor`; `row`: one a token or output channel; `rows:n`: one for n consecutive rows, counted from the
    first; `block:128`: one for 128 elements along the contraction."""
    statistic: OuterStatistic = "amax"
    """`amax`; `percentile:p` of the magnitudes; `delayed:n`: the largest amax of the n steps before;
    `hold:n`: the amax of the first of every n steps; `static:v`: v."""
    bound: float = Field(448.0, gt=0)
    """Largest block scale used; 448 is the maximum of E4M3. 1 if there is no block scale."""

    @property
    def rows(self) -> int | None:
        """Number of consecutive rows that share an outer scale; None: all of them."""
        if self.granularity == "tensor":
            return None
        return int(argument(self.granularity) or 1) if tag(self.granularity) == "rows" else 1

    @model_validator(mode="after")
    def _consistent(self) -> "Outer":
        word = tag(self.statistic)
        if statistic_of(self.statistic).per_tensor and self.granularity != "tensor":
            raise ValueError(
                f"outer.statistic {self.statistic} is one number a tensor; "
                f"granularity {self.granularity} takes amax"
            )
        if word == "percentile" and self.granularity == "block:128":
            raise ValueError(
                "outer.statistic percentile needs granularity tensor or row; "
                "a block of 128 is too short for one"
            )
        if word == "percentile" and tag(self.granularity) == "rows":
            raise ValueError(
                "outer.statistic percentile is defined for granularity tensor or row; "
                f"granularity {self.granularity} takes amax"
            )
        return self


class Select(Spec):
    """Choice, for each block, of the candidate with the smallest error."""

    among: Candidates
    """`scales`: the largest magnitude mapped to 6 or to 4 (Four Over Six, arXiv 2512.02010); `grids`: E2M1 or
    INT4 (IF4); `search`: every scale code near the first guess."""
    criterion: Criterion = "mse"
    map_to: tuple[float, float] = Field((6.0, 4.0), strict=False)
    """Values to which the two candidates of `scales` map the block's largest magnitude; the first wins where
    errors are equal."""

    @model_validator(mode="after")
    def _pair(self) -> "Select":
        if self.among != "scales" and self.map_to != (6.0, 4.0):
            raise ValueError(
                f"select.map_to is the pair of among scales; {self.among} has none: leave it out"
            )
        first, second = self.map_to
        if first == second or not all(1 <= value <= 48 for value in self.map_to):
            raise ValueError("select.map_to takes two different values from 1 to 48")
        return self


class Dge(Spec):
    """Differentiable gradient estimator of the cast (arXiv 2501.17116).

    The slope is |2t - 1|^(1/k - 1) / k, at most `clip`, with
    t the position between the two neighbours."""

    k: float = Field(5.0, ge=1)
    clip: float = Field(3.0, gt=0)


class Transform(Spec):
    """Parts of an operand that are split off before quantisation and multiplied in higher precision."""

    mean: bool = False
    """The mean over tokens of every channel, in the operand's own precision."""
    low_rank: int | None = Field(None, ge=1)
    """The leading components of a singular value decomposition, in the operand's own precision."""
    channels: float | None = Field(None, gt=0, lt=1)
    """The fraction of channels with the largest magnitude, in `channels_in` (TetraJet-v2's OutControl)."""
    channels_in: ChannelFormat = "mxfp8"
    clamp: float | None = Field(None, gt=0, lt=1)
    """Clamp to this quantile of the magnitudes (OCC, arXiv 2501.17116)."""
    residual: bool = True
    """True: what clamping cuts off is multiplied in the operand's own precision. False: it is lost."""
    patch: float | None = Field(None, gt=0, lt=1)
    """The fraction of channels with the largest magnitude whose quantisation error is added back to the
    product (Hot-Channel Patch, arXiv 2602.02047)."""

    @model_validator(mode="after")
    def _consistent(self) -> "Transform":
        if not (self.mean or self.low_rank or self.channels or self.clamp or self.patch):
            raise ValueError("transform takes nothing out; write null")
        if self.channels is None and self.channels_in != "mxfp8":
            raise ValueError("transform.channels_in has no effect without transform.channels")
        if self.clamp is None and not self.residual:
            raise ValueError("transform.residual has no effect without transform.clamp")
        return self


class Error(Spec):
    """Quantisation error of an operand, in place of q(x) - x itself, to make its effect on training visible.

    The operand becomes x + times (q(x) - x), in fp32; x is rotated if the product is.
    """

    times: float = Field(1.0, ge=1)
    """Factor of the error; 1 is the quantised operand, to the bit."""
    permuted: bool = False
    """Move each error to another element of the operand, drawn anew in each step: a placebo, whose errors
    have the same sizes and no relation to the elements."""


class Quant(Spec):
    """Quantisation of one operand of one product. Blocks run along the contraction (the last dimension).

    `element`, `rounding`, `scale.rounding`, `range.statistic` and `outer.statistic` also take a function of
    the user's, `mine_rounding.py:mine` (docs/use/own_numerics.md).
    """

    LATER: ClassVar[frozenset[str]] = frozenset({"own", "error"})

    element: Element = "e2m1"
    select: Select | None = None
    block: Block | None = "1x16"
    """Rows and columns that share a block scale; null, with `scale` null, if there is only the outer
    scale."""
    scale: BlockScale | None = BlockScale()
    range: Range = Range()
    outer: Outer | None = Outer()
    rounding: ElementRounding = "nearest"
    """Ties go to the even code, or `away` from zero. `ms_eden` (Quartet II, arXiv 2601.22813): nearest, and
    block scales corrected, then rounded stochastically."""
    bits: Literal[8, 16, 24] = 8
    """Random bits per element under stochastic rounding: P(up) = floor(2^bits f) / 2^bits. TE uses 8; 24 is
    exact."""
    source: Literal["original", "forward", "forward_bf16"] = "original"
    """Tensor that is quantised for the backward pass: the original, or the forward copy, in fp32 or rounded
    to bf16 first."""
    transform: Transform | None = None
    estimator: Literal["clip_mask"] | Dge | None = None
    """The gradient of the forward cast: null passes it straight through; `clip_mask` stops it where the cast
    saturated."""
    own: Quantiser | None = None
    """Function of the user's that makes the operand's values in place of all the above; `element` is then the
    format that the operand counts as."""
    error: Error = Error()

    @model_validator(mode="before")
    @classmethod
    def _without_scales(cls, data: object) -> object:
        """An operand that a function of the user's makes has no scales of ours."""
        if isinstance(data, dict) and data.get("own") is not None:
            return {"block": None, "scale": None, "outer": None} | data
        return data

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns that share one block scale; (1, 1) without block scales."""
        if self.block is None:
            return 1, 1
        rows, columns = self.block.split("x")
        return int(rows), int(columns)

    @property
    def top(self) -> float:
        """Largest multiple of its block scale that an element can be."""
        return element_format(self.element).max * 2.0 ** (self.scale.levels if self.scale else 0)

    @property
    def draws(self) -> bool:
        """Return True if quantising takes random bits."""
        if self.error.permuted:
            return True
        if self.own is not None:
            return rounding_of(self.own).draws
        return rounding_of(self.rounding).draws or (
            self.scale is not None and rounding_of(self.scale.rounding).draws
        )

    @property
    def altered(self) -> bool:
        """Return True if the error is amplified or permuted, which no hardware does."""
        return self.error.permuted or self.error.times != 1

    @property
    def cast(self) -> "Quant":
        """Return the quantiser with its own error."""
        return self.changed(error=Error()) if self.altered else self

    @property
    def owned(self) -> tuple[tuple[str, Own], ...]:
        """Fields that name a function of the user's, with the word."""
        return tuple(own_words(self))

    @property
    def from_forward(self) -> bool:
        """Return True if the forward pass's quantised copy is quantised again."""
        return self.source != "original"

    @property
    def four_bits(self) -> bool:
        """Return True if an element has four bits; parts that a transform takes out are not counted."""
        return element_format(self.element).bits == 4

    @property
    def wide(self) -> bool:
        """Return True if code times scale may exceed bf16's 8 significant bits: products take fp32."""
        if self.own is not None:
            return True
        significant = element_format(self.element).significant + (
            SCALES[self.scale.format].significant if self.scale else 0
        )
        split = self.outer is not None and self.outer.granularity == "block:128"
        return significant > _BF16_BITS or split or (self.select is not None and self.select.among == "grids")

    @model_validator(mode="after")
    def _consistent(self) -> "Quant":
        if self.estimator is not None and self.altered:
            raise ValueError("error changes what the forward pass multiplies, of which estimator is no slope")
        checks = (self._scales, self._outer, self._selection, self._roundings, self._micro, self._grid)
        for check in checks if self.own is None else (self._own_alone,):
            reason = check()
            if reason:
                raise ValueError(reason)
        return self

    def _own_alone(self) -> str | None:
        usual = {"range": Range(), "rounding": "nearest"}
        for name in ("block", "scale", "outer", "range", "select", "rounding", "estimator"):
            if getattr(self, name) != usual.get(name):
                return f"own {self.own} makes the whole operand, so {name} has no effect: write {{own: ...}}"
        if self.bits != 8 and not self.draws:
            return f"bits {self.bits} has no effect: {self.own} draws no bits"
        return None

    def _grid(self) -> str | None:
        if isinstance(self.element, Own) and isinstance(self.estimator, Dge):
            return f"estimator k, clip is defined for our own elements, not for {self.element}"
        return None

    def _scales(self) -> str | None:
        if (self.block is None) != (self.scale is None):
            return "block and scale go together: set both, or both null where there is only the outer scale"
        if self.scale is None:
            if self.outer is None:
                return "neither a block scale nor an outer scale: set at least one"
            if self.outer.bound != 1:
                return f"outer.bound {self.outer.bound:g} bounds a block scale, and there is none: write 1"
            if self.range != Range():
                return "range places a block's largest magnitude, and there is no block scale: leave it out"
        elif self.outer and self.outer.bound > (largest := SCALES[self.scale.format].max):
            scale = self.scale.format
            return f"outer.bound {self.outer.bound:g} is above the largest {scale} scale, {largest:g}"
        return None

    def _outer(self) -> str | None:
        rows = self.outer.rows if self.outer else None
        if self.outer is None or rows is None or rows % self.tile[0] == 0:
            return None
        if tag(self.outer.granularity) == "rows":
            return (
                f"outer.granularity {self.outer.granularity} would cut blocks of {self.block}: "
                f"the number of rows must be a multiple of {self.tile[0]}"
            )
        return f"outer.granularity {self.outer.granularity} needs blocks of one row, not {self.block}"

    def _selection(self) -> str | None:
        if self.select is None:
            return None
        if self.rounding != "nearest":
            return f"select chooses by error, which would bias rounding {self.rounding}; use nearest"
        if self.element != "e2m1" or self.scale is None or self.scale.format not in _FRACTIONAL:
            return f"select is defined for element e2m1 with {_listed(_FRACTIONAL)} block scales"
        if self.scale.rounding == "stochastic" or isinstance(self.scale.rounding, Own):
            return (
                "select compares candidates whose scales are certain: "
                f"scale.rounding cannot be {self.scale.rounding}; use nearest"
            )
        if self.range != Range():
            return "select chooses the range itself; leave range out"
        return None

    def _roundings(self) -> str | None:
        if self.bits != 8 and (self.rounding == "ms_eden" or not rounding_of(self.rounding).draws):
            return f"bits {self.bits} has no effect with rounding {self.rounding}"
        if self.rounding != "ms_eden":
            return None
        if (
            self.element != "e2m1"
            or self.tile[0] != 1
            or self.scale is None
            or self.scale.format not in _FRACTIONAL
        ):
            return f"rounding ms_eden corrects {_listed(_FRACTIONAL)} scales of e2m1 blocks of one row"
        if self.scale.rounding == "stochastic" or isinstance(self.scale.rounding, Own):
            return (
                "rounding ms_eden rounds the corrected scales stochastically itself; "
                "scale.rounding is for the first guess: use nearest"
            )
        if self.outer is None or self.outer.bound > SCALES[self.scale.format].max * 4 / 7:
            return (
                "rounding ms_eden raises block scales: "
                "it needs outer.bound at most 256, so that they do not saturate"
            )
        return None

    def _micro(self) -> str | None:
        if self.scale is None or self.scale.micro_exponents is None:
            return None
        longest = self.scale.micro_exponents[0]
        if self.element != _MICRO_ELEMENT:
            return f"scale.micro_exponents is defined for element {_MICRO_ELEMENT}, not {self.element}"
        if self.tile[0] != 1 or self.tile[1] % longest or longest == self.tile[1]:
            return (
                f"scale.micro_exponents divides blocks of one row into sub-blocks, and {self.block} has no"
                f" sub-blocks of {longest}"
            )
        if isinstance(self.scale.rounding, Own):
            return f"scale.micro_exponents rounds scales itself, not by {self.scale.rounding}; use nearest"
        if self.outer is not None:
            return "scale.micro_exponents takes the block scale from the tensor itself: write outer null"
        if self.range != Range():
            return "scale.micro_exponents maps a block's largest magnitude itself; leave range out"
        return None


class Hadamard(Spec):
    """Rotation of both operands of a product along the contraction; it cancels in the product."""

    size: Literal[4, 8, 16, 32, 64, 128] = 16
    signs: SignRule = "fixed"
    """`fixed`: Transformer Engine's one sign vector, repeated to `size`. Others are drawn: once per product
    and layer, per optimizer step, or per micro-batch."""


def grain(quant: Quant, rotation: Hadamard | None, axis: int) -> int:
    """Return the number of which the rows (axis 0) or columns (1) of a part must be a multiple. Only then can
    the part be quantised to the same bits as the whole matrix."""
    if axis == 0:
        shared = quant.outer is not None and tag(quant.outer.granularity) == "rows"
        return (quant.outer.rows if shared and quant.outer else None) or quant.tile[0]
    blocks = 128 if quant.outer and quant.outer.granularity == "block:128" else quant.tile[1]
    return max(blocks, rotation.size if rotation else 1, 16)  # 16 elements share one call of the generator
