"""Randomised differential test of the compiled quantisers: compare random cases with the reference, bit for bit.

A case is a matrix, a quantiser, a rotation and a clock, drawn from a seed and the case's number alone, so that a failing
case can be repeated by itself. `FIELDS` says how each field of each specification class is drawn; `missing_fields` names
the fields that it lacks, so that a new field cannot be left out by accident. Most cases have a form that the kernels
accept; the others vary any field, so that a kernel that wrongly accepts a form is compared on it too.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import ValidationError
from torch import Tensor

from ablate.numerics.census import census
from ablate.numerics.choices import GRANULARITIES
from ablate.numerics.history import History
from ablate.numerics.kernels import builds, cpu, general
from ablate.numerics.partition import Partition
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Keep, Operand, quantize
from ablate.numerics.scaling import BLOCK_STATISTICS, STATISTICS
from ablate.numerics.spec import (
    BlockScale,
    Dge,
    Error,
    Hadamard,
    Outer,
    Quant,
    Range,
    Select,
    Spec,
    Transform,
    grain,
    tag,
)

Draw = Callable[[Random], Any]


def choices(*values: Any) -> Draw:
    """Draw one of some values."""
    return lambda random: random.choice(values)


def optional(spec: type[Spec]) -> Draw:
    """Draw None or an instance of a class."""
    return lambda random: instance(spec, random) if random.random() < 0.5 else None


ARGUMENTS = {
    "percentile": ("0.5", "0.95", "1.0"),
    "delayed": ("1", "4"),
    "hold": ("1", "3"),
    "static": ("3.0", "0.01", "1e+30", "1e-30"),
}
"""Arguments of outer statistics that take one."""
BLOCK_ARGUMENTS = {"rms": ("2.5",), "std": ("2.92",)}
ROWS = {"rows": ("2", "3", "16", "32", "48"), "block": ("128",)}
"""Arguments of granularities that take one."""
HEADROOM = (17 / 16, 17 / 16 * 0.93, 0.25, 4.0)
BOUNDS = (448.0, 448.0, 256.0, 100.0, 1.0, 0.01, 1e-30)


def statistics(words: Mapping[str, Any], arguments: Mapping[str, Sequence[str]]) -> Draw:
    """Draw a statistic of a registry with one of its arguments. KeyError where a new one has none here."""
    spelled = {
        word: [f"{word}:{argument}" for argument in arguments[word]] for word in words if word != "amax"
    }
    spelled["amax"] = ["amax"]
    return lambda random: random.choice(spelled[random.choice(list(spelled))])


def granularity(random: Random) -> str:
    """Draw a granularity of the registry. KeyError where a new one has no argument here."""
    word = random.choice(list(GRANULARITIES))
    return f"{word}:{random.choice(ROWS[word])}" if GRANULARITIES[word].number else word


FIELDS: dict[type[Spec], dict[str, Draw]] = {
    Quant: {
        "select": optional(Select),
        "scale": lambda random: None if random.random() < 0.1 else instance(BlockScale, random),
        "range": lambda random: instance(Range, random),
        "outer": lambda random: None if random.random() < 0.2 else instance(Outer, random),
        "transform": optional(Transform),
        "estimator": lambda random: random.choice((None, "clip_mask", instance(Dge, random))),
        "own": choices(None),  # functions of the user's: numerics/test_own.py
        "error": choices(Error()),  # made around the cast: numerics/test_error.py
    },
    Error: {"times": choices(1.0), "permuted": choices(False)},
    Transform: {
        "mean": choices(True, False),
        "low_rank": choices(None, 2),
        "channels": choices(None, 0.1),
        "clamp": choices(None, 0.9),
        "residual": choices(True, False),
        "patch": choices(None, 0.2),
    },
    Dge: {"k": choices(1.0, 5.0), "clip": choices(2.0, 3.0)},
    BlockScale: {
        "halve_below": choices(None, 0.87, 1.0),
        "micro_exponents": choices(None, (8, 4), (8,), (32, 4, 2)),
    },
    Range: {
        "statistic": statistics(BLOCK_STATISTICS, BLOCK_ARGUMENTS),
        "map_to": choices(None, 4.0, 1.0),
        "headroom": choices(1.0, *HEADROOM),
        "prescale": choices(1.0, 0.75, 6.0),
    },
    Outer: {
        "granularity": granularity,
        "statistic": statistics(STATISTICS, ARGUMENTS),
        "bound": choices(*BOUNDS),
    },
    Select: {"map_to": choices((6.0, 4.0), (6.0, 12.0), (4.0, 6.0), (5.0, 7.0))},
    Hadamard: {},
}
"""Strategies that draw each field, beside those of Literal type, of which every value is drawn. `quantize` ignores transform,
estimator and source, which the layer around it obeys; a kernel must ignore them too."""


def literal_values(spec: type[Spec], name: str) -> tuple[Any, ...]:
    """All values of a field of Literal type, None included if the field takes it; nothing for other types."""
    annotation = spec.model_fields[name].annotation
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    members = get_args(annotation)
    literals = [value for member in members if get_origin(member) is Literal for value in get_args(member)]
    return (*literals, None) if literals and set(map(get_origin, members)) <= {Literal, None} else ()


def missing_fields(quant: type[Quant] = Quant) -> list[str]:
    """The fields of the specification that no draw varies, `Class.field`."""
    return [
        f"{spec.__name__}.{name}"
        for spec in reachable(quant) | {Hadamard}
        for name in spec.model_fields
        if name not in FIELDS.get(spec, {}) and not literal_values(spec, name)
    ]


def unseen_values(seen: Mapping[str, Counter]) -> list[str]:
    """Values of Literal fields and registered statistics that a run has not compared, and fields of one value only."""
    lacking = []
    for spec in reachable(Quant) | {Hadamard}:
        for name in spec.model_fields:
            values = seen.get(f"{spec.__name__}.{name}", Counter())
            registries = {
                (Outer, "statistic"): STATISTICS,
                (Outer, "granularity"): GRANULARITIES,
                (Range, "statistic"): BLOCK_STATISTICS,
            }
            words = registries.get((spec, name), literal_values(spec, name))
            lacking += [f"{spec.__name__}.{name} {word}" for word in words if word not in values]
            kind = spec.model_fields[name].annotation
            nested = isinstance(kind, type) and issubclass(kind, Spec)
            single = nested or (spec, name) == (Quant, "own") or spec is Error  # no kernel computes these
            lacking += [f"{spec.__name__}.{name}"] if len(values) < 2 and not single else []
    return sorted(lacking)


def reachable(spec: type[Spec]) -> set[type[Spec]]:
    """A specification class and those of its fields."""
    found, waiting = set(), [spec]
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and issubclass(one, Spec):
            found.add(one)
            waiting += [
                kind
                for its in one.model_fields.values()
                for kind in (its.annotation, *get_args(its.annotation))
            ]
    return found


def value_of(spec: type[Spec], name: str, random: Random) -> Any:
    """Draw a field's value."""
    if name in FIELDS[spec]:
        return FIELDS[spec][name](random)
    return random.choice(literal_values(spec, name))


def instance(spec: type[Spec], random: Random) -> Spec:
    """Draw an instance of a class, each field at its default or, one time in three, drawn."""
    while True:
        fields = {
            name: value_of(spec, name, random)
            for name, its in spec.model_fields.items()
            if random.random() < 0.3 or its.is_required()
        }
        try:
            return spec(**fields)
        except ValidationError:
            continue


def accepted_form(random: Random) -> Quant:
    """Draw a form that the kernels accept; `covers` decides, this only aims."""
    block = random.choice(("1x16", "1x16", "1x16", "16x16"))
    rounding = "stochastic" if block == "1x16" and random.random() < 0.5 else "nearest"
    outer = Outer(statistic=FIELDS[Outer]["statistic"](random), bound=random.choice(BOUNDS))
    return Quant(
        block=block, rounding=rounding, outer=outer, range=Range(headroom=random.choice((1.0, *HEADROOM)))
    )


def any_form(random: Random) -> Quant:
    """Draw a form of which every other field of the arithmetic is drawn, and every third of its parts."""
    arithmetic = ("element", "block", "scale", "range", "outer", "rounding", "bits")
    seldom = {"select": 0.25, "transform": 0.1, "estimator": 0.1, "source": 0.1}
    while True:
        names = [name for name in (*arithmetic, *seldom) if random.random() < seldom.get(name, 0.5)]
        fields = {name: value_of(Quant, name, random) for name in names}
        outer = fields.get("outer")
        if outer and random.random() < 0.5:  # the statistic that every granularity takes
            fields["outer"] = Outer(granularity=granularity(random), bound=outer.bound)
        try:
            return Quant(**fields)
        except ValidationError:
            continue


def quantiser(random: Random) -> Quant:
    """Draw a quantiser: one of NVIDIA's forms, some of them with fields drawn anew, or one of any form."""
    while True:
        kind = random.random()
        if kind < 0.4:
            return any_form(random)
        quant, kind = accepted_form(random), (kind - 0.4) / 0.6
        if kind < 0.03:
            outer = Outer(bound=1.0, statistic=FIELDS[Outer]["statistic"](random))
            return Quant(
                element=random.choice(literal_values(Quant, "element")), block=None, scale=None, outer=outer
            )
        if kind < 0.06:
            try:
                select = Select(**{name: value_of(Select, name, random) for name in Select.model_fields})
            except ValidationError:
                continue
            return Quant(select=select, outer=quant.outer)
        if kind < 0.10:  # powers of two that are rounded up, which may be halved
            scale = BlockScale(
                format="e8m0", rounding="ceil", halve_below=value_of(BlockScale, "halve_below", random)
            )
            ranged = Range(map_to=random.choice((None, 1.0)), prescale=random.choice((1.0, 6.0)))
            return Quant(block=random.choice(("1x32", "32x32")), scale=scale, range=ranged, outer=None)
        if kind < 0.12:  # micro-exponents
            scale = BlockScale(format="e6m2", micro_exponents=value_of(BlockScale, "micro_exponents", random))
            rounding = value_of(Quant, "rounding", random)
            try:
                return Quant(element="e1m2", block="1x64", scale=scale, outer=None, rounding=rounding)
            except ValidationError:
                continue
        if kind < 0.25:
            names = random.sample(list(Quant.model_fields), random.choice((1, 1, 2, 3)))
            try:
                quant = Quant.model_validate(
                    dict(quant) | {name: value_of(Quant, name, random) for name in names}
                )
            except ValidationError:
                continue
        return quant


# --- matrices -------------------------------------------------------------------------------------

SIZES = (1, 2, 7, 15, 16, 16, 16, 17, 31, 32, 32, 32, 33, 47, 48, 48, 64, 64, 80)
LAYOUTS = (
    "rows",
    "columns",
    "every other column",
    "every other row",
    "window",
    "window transposed",
    "unaligned",
    "expanded",
)
CONTENTS = (
    "normal",
    "wide range",
    "ties",
    "few values",
    "one magnitude",
    "zeros",
    "zero blocks",
    "one spike",
    "not finite",
)
FACTORS = (1.0, 1.0, 1.0, 1e-3, 1e3, 1e-30, 1e-38, 1e-40, 1e30, 1e38)
"""1e-40 is subnormal in fp32 and bf16; 1e38 overflows where sixteen elements are added."""


def shape(random: Random) -> tuple[int, int]:
    """Draw a small shape, seldom empty, seldom longer than what a kernel handles at a time."""
    rows, columns = random.choice(SIZES), random.choice(SIZES)
    extra = random.random()
    if extra < 0.02:
        return random.choice(((0, columns), (rows, 0)))
    if extra < 0.10:
        short, long = random.choice(((2, 1060), (3, 1056), (7, 320), (16, 300)))
        return (short, long) if random.random() < 0.5 else (long, short)
    return rows, columns


def contents(kind: str, rows: int, columns: int, random: Random) -> Tensor:
    """Draw a matrix in fp32."""
    g = torch.Generator().manual_seed(random.getrandbits(48))
    x = torch.randn(rows, columns, generator=g)
    if kind == "wide range":
        x *= torch.exp(6 * torch.randn(rows, columns, generator=g))
    elif kind == "ties":
        x = (1 + torch.randint(0, 128, x.shape, generator=g) / 128) * x.sign()
    elif kind == "few values":
        x = torch.randint(-12, 13, x.shape, generator=g) / 2
    elif kind == "one magnitude":
        x = x.sign() * random.choice((1.0, 3.0, 5.0, 6.0, 0.4375))
    elif kind == "zeros":
        x = x * 0.0  # of both signs
    elif kind == "zero blocks":
        x *= (
            torch.rand(-(-rows // 16), -(-columns // 16), generator=g)
            .round()
            .repeat_interleave(16, 0)
            .repeat_interleave(16, 1)[:rows, :columns]
        )
    elif x.numel() and kind in ("one spike", "not finite"):
        place = random.randrange(rows), random.randrange(columns)
        x[place] = (
            random.choice((math.nan, math.inf, -math.inf))
            if kind == "not finite"
            else random.choice((1e4, -1e8))
        )
    return x


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same matrix in another memory layout; `expanded` repeats its first row."""
    rows, columns = x.shape
    if layout == "columns":
        return x.t().contiguous().t()
    if layout.startswith("window"):
        down = layout == "window transposed"
        room = torch.full((columns + 3, rows + 5) if down else (rows + 3, columns + 5), 7.0, dtype=x.dtype)
        view = room.t()[2 : 2 + rows, 1 : 1 + columns] if down else room[1 : 1 + rows, 2 : 2 + columns]
    elif layout == "every other column":
        view = torch.full((rows, 2 * columns), 7.0, dtype=x.dtype)[:, ::2]
    elif layout == "every other row":
        view = torch.full((2 * rows, columns), 7.0, dtype=x.dtype)[::2]
    elif layout == "unaligned":
        view = torch.full((rows * columns + 1,), 7.0, dtype=x.dtype)[1:].view(rows, columns)
    elif layout == "expanded" and rows:
        return x[:1].expand(rows, columns)
    else:
        return x.contiguous()
    return view.copy_(x)


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One comparison: calls of `quantize` in the order of `clocks`, on `x` times each of `factors`."""

    number: int
    quant: Quant
    rotation: Hadamard | None
    x: Tensor
    layout: str
    content: str
    clocks: tuple[Clock, ...]
    factors: tuple[float, ...]
    where: int
    product: int
    part: tuple[int, int] | None
    """Axis and index of the half of `x` that is quantised as a part of the whole; None for all of it."""

    def __str__(self) -> str:
        how = f"{self.layout} {tuple(self.x.shape)} {self.x.dtype}, {self.content}, rotation {self.rotation}, part {self.part}"
        return f"case {self.number}: {how}, clocks {self.clocks}, {self.quant!r}"


def case(seed: int, number: int) -> Case:
    """Draw one case."""
    random = Random(f"{seed} {number}")
    quant, rotation = quantiser(random), None
    if random.random() < 0.4 or quant.rounding == "ms_eden":
        size = 16 if random.random() < 0.8 else random.choice(literal_values(Hadamard, "size"))
        rotation = Hadamard(size=size, signs=random.choice(literal_values(Hadamard, "signs")))
    if quant.rounding == "ms_eden" and rotation.size % quant.tile[1]:
        rotation = Hadamard(size=128, signs=rotation.signs)
    dtypes = (torch.bfloat16,) * 5 + (torch.float32,) * 4 + (torch.float16,)
    dtype = torch.bfloat16 if rotation and random.random() < 0.8 else random.choice(dtypes)
    common = "columns" if rotation or random.random() < 0.4 else "rows"
    layout = common if random.random() < 0.85 else random.choice(LAYOUTS)
    content = random.choice(CONTENTS[:-1]) if random.random() < 0.96 else CONTENTS[-1]
    rows, columns = shape(random)
    part = None
    if (
        random.random() < 0.06
        and rotation is None
        and quant.transform is None
        and quant.outer
        and quant.outer.statistic == "amax"
    ):
        part = random.randrange(2), random.randrange(2)
        rows, columns = (2 * grain(quant, None, axis) * random.choice((1, 2)) for axis in range(2))
    x = contents(content, rows, columns, random) * random.choice(FACTORS)
    x = laid_out(x.to(dtype), layout)
    stream = "evaluation" if random.random() < 0.2 else "training"
    steps = range(3) if quant.outer and tag(quant.outer.statistic) in ("delayed", "hold") else range(1)
    start, seed_word = random.randrange(10_000), random.getrandbits(40)
    clocks = tuple(
        Clock(seed_word, stream if step else "training", start + step, random.randrange(4)) for step in steps
    )
    factors = (1.0, *(random.choice((1.0, 0.5, 2.0)) for _ in clocks[1:]))
    return Case(
        number,
        quant,
        rotation,
        x,
        layout,
        content,
        clocks,
        factors,
        random.getrandbits(32),
        random.getrandbits(32),
        part,
    )


def cases(seed: int, count: int) -> Iterator[Case]:
    """Draw the cases of a run."""
    return (case(seed, number) for number in range(1, count + 1))


# --- builds ---------------------------------------------------------------------------------------


def runnable_builds() -> list[Path]:
    """The compiled builds that this CPU has the instructions for."""
    known = list(builds.LEVELS.values())  # the best first
    runnable = {"portable", *(known[known.index(builds.level()) :] if builds.level() in known else ())}
    return [
        path
        for path in sorted(builds.FOLDER.glob("nvfp4_*.so"))
        if path.stem.removeprefix("nvfp4_") in runnable
    ]


# --- comparison -----------------------------------------------------------------------------------


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, no compiled kernel is asked, neither to quantise nor to rotate or decode."""
    before, builds.build = builds.build, lambda: None
    try:
        yield
    finally:
        builds.build = before


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in shape, dtype and every bit, the sign of zero included; any NaN is as good as another."""
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integer = torch.int16 if a.element_size() == 2 else torch.int32
    a, b = a.contiguous(), b.contiguous()
    if torch.equal(a.view(integer), b.view(integer)):
        return True
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        *(torch.where(z.isnan(), 0, z.view(integer)) for z in (a, b))
    )


class Half(Partition):
    """Half of a matrix that this process knows whole, in place of asking another process."""

    whole: Tensor
    rows: int | None
    """Rows that share an outer scale; None: all."""

    def largest(self, amax: Tensor) -> Tensor:
        """The largest magnitude of the whole; of each group of its rows where the statistic is one of rows."""
        if self.rows is None:
            return self.whole.abs().amax().to(torch.float32).expand(amax.shape)
        groups = [group.abs().amax().expand(len(group)) for group in self.whole.split(self.rows)]
        return torch.cat(groups)[:: len(self.whole) // amax.numel()].to(torch.float32).view(amax.shape)


def half_of(x: Tensor, part: tuple[int, int], quant: Quant) -> Half:
    """One of the halves of x along an axis."""
    partition = Half(part[0], part[1], 2)
    object.__setattr__(partition, "whole", x)
    object.__setattr__(partition, "rows", quant.outer.rows if quant.outer else None)
    return partition


def operands(one: Case, keep: Keep, history: History, whole: bool = False) -> Iterator[Operand]:
    """Return the results of a case's calls; with `whole` those of all of x, even if the case quantises a part."""
    for clock, factor in zip(one.clocks, one.factors, strict=True):
        x = one.x * factor if factor != 1 else one.x
        partition = half_of(x, one.part, one.quant) if one.part and not whole else None
        options = {"clock": clock, "where": one.where, "product": one.product, "history": history}
        yield quantize(
            partition.local(x) if partition else x,
            one.quant,
            rotation=one.rotation,
            keep=keep,
            partition=partition,
            **options,
        )


def part_of(z: Tensor | None, one: Case) -> Tensor | None:
    """Return the part of a whole operand's tensor that belongs to the case's part."""
    if z is None or z.ndim == 0 or one.part is None:
        return z
    axis, index = one.part
    dimension = 2 * axis if z.ndim == 4 else axis
    return z if z.shape[dimension] == 1 else z.chunk(2, dimension)[index]


@dataclass
class Coverage:
    """Counts of the comparisons of a run."""

    cases: int = 0
    compiled: Counter = field(default_factory=Counter)
    """Cases of which a kernel quantised at least one call, by kernel: `cpu` (NVIDIA's forms) or `general`."""
    decoded: int = 0
    """Operands that a kernel decoded."""
    values: dict[str, Counter] = field(default_factory=dict)
    """Occurrences of each value of each field, by `Class.field`."""
    by_kernel: dict[str, dict[str, Counter]] = field(default_factory=dict)
    """The same by kernel, of the cases that it quantised."""

    def add(self, one: Case, kernel: str) -> None:
        """Count a case and its fields; `kernel`: which one quantised it, empty for none."""
        self.cases += 1
        if kernel:
            self.compiled[kernel] += 1
        by_kernel = self.by_kernel.setdefault(kernel, {}) if kernel else {}
        for values in (self.values, by_kernel):
            for spec in filter(None, (one.quant, one.rotation)):
                _count(values, spec)
            rest = {
                "dtype": one.x.dtype,
                "layout": one.layout,
                "content": one.content,
                "rotated": one.rotation is not None,
            }
            for name, value in (rest | {"part": one.part is not None}).items():
                values.setdefault(name, Counter())[value] += 1

    def __str__(self) -> str:
        varied = [f"{name} {len(counts)}" for name, counts in sorted(self.values.items())]
        return f"{self.cases} cases, {dict(self.compiled)} by a kernel, {self.decoded} decoded by one; values by field: {', '.join(varied)}"


def _count(values: dict[str, Counter], spec: Spec) -> None:
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        word = (
            type(value).__name__
            if isinstance(value, Spec)
            else tag(value)
            if name in ("statistic", "granularity")
            else value
        )
        values.setdefault(f"{type(spec).__name__}.{name}", Counter())[word] += 1
        if isinstance(value, Spec):
            _count(values, value)


OUTPUTS = ("values", "amax", "block_scale", "largest")


def _on_cpu(value: Any) -> Any:
    """The value on the CPU, if it is a tensor."""
    return value.cpu() if isinstance(value, Tensor) else value


def difference(one: Case, coverage: Coverage) -> str | None:
    """The first output in which kernels and reference differ, with or without telemetry; None if there is none.

    The kernels run on the device of the case, the reference always on the CPU.
    """
    histories = [History() for _ in range(3)]
    calls = _Calls()
    with calls:
        trained, looked_at = (
            list(operands(one, keep, history))
            for keep, history in zip((False, "source"), histories, strict=False)
        )
    coverage.add(one, calls.made)
    one = replace(one, x=one.x.cpu())
    with reference_only():
        expected = list(operands(one, True, histories[2], whole=True))
    for step, (mine, kept, theirs) in enumerate(zip(trained, looked_at, expected, strict=True)):
        for name in OUTPUTS:
            if name == "largest" and one.part:
                continue  # of the part
            wanted = part_of(getattr(theirs, name), one)
            for operand, how in ((mine, "in training"), (kept, "kept for telemetry")):
                if not same(_on_cpu(getattr(operand, name)), wanted):
                    return f"{name} {how}, call {step + 1}"
        source = part_of(theirs.source, one)
        if kept.source is not None and not same(kept.source.float().cpu()[: len(source)], source):
            return f"source, call {step + 1}"
        with reference_only():
            decoded = part_of(theirs.dequantize(), one)
        coverage.decoded += mine.block_scale is not None and cpu.can_decode(
            mine.values, mine.block_scale, mine.amax
        )
        if not same(mine.dequantize().cpu(), decoded):
            return f"decoded operand, call {step + 1}"
        if kept.scaled is None and (name := _census_difference(kept, theirs, one)):
            return f"census: {name}, call {step + 1}"
    kept_by = [{step: _on_cpu(amax) for step, amax in history.amax.items()} for history in histories]
    if kept_by[0] != kept_by[2] or kept_by[1] != kept_by[2]:
        return "history"
    return None


def _census_difference(mine: Operand, theirs: Operand, one: Case) -> str | None:
    """The first number of the census that differs; sums in double precision may differ in their last digits."""
    if one.part:
        return None
    ours, wanted = census(mine), census(theirs)
    counts = ("zeros", "saturated", "clipped", "filled", "blocks_saturated")
    for name in ("elements", *counts, "scales_zero", "scales_saturated", "scales_clipped"):
        if getattr(ours, name) != getattr(wanted, name):
            return name
    a, b = (its.blocks.flatten().double().cpu() for its in (ours, wanted))
    if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
        return "blocks"
    pairs = {
        name: torch.tensor([getattr(ours, name), getattr(wanted, name)], dtype=torch.float64)
        for name in ("power", "error", "inner")
    }
    return next(
        (
            name
            for name, (a, b) in pairs.items()
            if not torch.isclose(a, b, rtol=1e-9, atol=0.0, equal_nan=True)
        ),
        None,
    )


class _Calls:
    """Inside, note which kernel made an operand."""

    made = ""

    def __enter__(self) -> None:
        self.before = {module: module.quantize for module in (cpu, general)}
        for module, quantise in self.before.items():
            module.quantize = self._noting(module.__name__.rpartition(".")[2], quantise)

    def _noting(self, name: str, quantise: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **options: Any) -> Any:
            result = quantise(*args, **options)
            if result is not None:
                self.made = name
            return result

        return noting

    def __exit__(self, *_: object) -> None:
        for module, quantise in self.before.items():
            module.quantize = quantise


def first_difference(seed: int, count: int, coverage: Coverage) -> tuple[Case, str] | None:
    """The first case of a run in which something differs, and what; None where nothing does."""
    for one in cases(seed, count):
        if name := difference(one, coverage):
            return one, name
    return None
