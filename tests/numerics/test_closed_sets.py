"""Closed sets of words: each has one list, whose every word is accepted, computed and compared with something independent.

The fields are found by walking the specification, so that a new field or a new word is tried by being there.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from oracles import grids
from pydantic import ValidationError
from support.cases import every
from support.quantisers import ARGUMENTS, BLOCK_ARGUMENTS, ROWS, reachable

import ablate
from ablate.engines.products import DTYPES
from ablate.numerics import choices, formats, hadamard, rounding, scaling, select, transform
from ablate.numerics.estimators import ESTIMATORS
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range, Select, Spec, Transform
from ablate.recipes.recipe import DIRECTIONS, Fprop, Products, Recipe
from ablate.results.paired_stats import Kind, Reason, Verdict
from ablate.results.verdict_text import KINDS, REASONS

PACKAGE = Path(ablate.__file__).parent
TAGGED = {
    (Outer, "statistic"): (choices.STATISTICS, ARGUMENTS),
    (Outer, "granularity"): (choices.GRANULARITIES, ROWS),
    (Range, "statistic"): (choices.BLOCK_STATISTICS, BLOCK_ARGUMENTS),
}
"""Fields whose words may take a number, with their registry and numbers to try."""


def words(annotation: Any) -> tuple[str, ...]:
    """Return the strings that a field's type lists."""
    if get_origin(annotation) is Literal:
        return tuple(word for word in get_args(annotation) if isinstance(word, str))
    return tuple(word for argument in get_args(annotation) for word in words(argument))


def spelled(kind: type[Spec], field: str) -> list[str]:
    """Return every word of a field, those that take a number with one."""
    registry, arguments = TAGGED.get((kind, field), ({}, {}))
    if not registry:
        return list(words(kind.model_fields[field].annotation))
    return [
        word if entry.number is None else f"{word}:{arguments[word][0]}" for word, entry in registry.items()
    ]


SETS = {
    (kind, field): {
        word.partition(":")[0] if (kind, field) in TAGGED else word for word in spelled(kind, field)
    }
    for kind in sorted(reachable(Recipe) | reachable(Quant), key=lambda kind: kind.__name__)
    for field in kind.model_fields
    if spelled(kind, field)
}
"""The words of each closed set, by class and field."""


# --- every word is accepted, computed and compared ------------------------------------------------

SCALED = Quant(scale=BlockScale(format="ue5m3"), outer=Outer(bound=256.0))
BASES = (
    Quant(),
    SCALED,
    Quant(block="1x32", outer=None),
    Quant(select=Select(among="scales"), outer=Outer(bound=256.0)),
    Quant(transform=Transform(channels=0.1)),
    Quant(range=Range(statistic="rms:2.5")),
)
"""Quantisers one of which has each part, and lets each word stand."""
PATHS = {BlockScale: "scale", Range: "range", Outer: "outer", Select: "select", Transform: "transform"}


def with_word(base: Quant, kind: type[Spec], field: str, word: str) -> Quant | None:
    """Return the quantiser with a field of it or of one of its parts set; None if it lacks the part or the word contradicts it."""
    part = base if kind is Quant else getattr(base, PATHS[kind])
    if part is None:
        return None
    try:
        changed = kind.model_validate(dict(part) | {field: word})
        return changed if kind is Quant else Quant.model_validate(dict(base) | {PATHS[kind]: changed})
    except ValidationError:
        return None


NUMERIC = [
    (kind, field, word) for kind, field in SETS for word in spelled(kind, field) if kind in (Quant, *PATHS)
]


@every(kind__field__word=NUMERIC)
def test_a_word_is_accepted_and_the_reference_computes_it(kind, field, word):
    quant = next((made for base in BASES if (made := with_word(base, kind, field, word))), None)
    assert quant is not None
    assert Quant.model_validate_json(quant.model_dump_json()) == quant
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(0))
    result = quantize(x, quant, rotation=Hadamard(size=128), clock=Clock(0), keep=True)
    assert result.dequantize().isfinite().all()
    if quant.select is None:
        grid = torch.from_numpy(grids.named(quant.element)).float()
        assert torch.isin(result.codes.abs(), grid).all()
    if quant.scale and formats.SCALES[quant.scale.format].bits <= 8:
        assert torch.isin(result.block_scale, torch.from_numpy(grids.named(quant.scale.format)).float()).all()


def accepted(kind: type[Spec], field: str, word: str) -> bool:
    try:
        kind.model_validate(({"start": "step:1"} if "start" in kind.model_fields else {}) | {field: word})
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "field"),
    [key for key in SETS if key[0] not in (Quant, *PATHS)],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_word_outside_the_quantisers_is_accepted_and_no_other(kind, field):
    assert all(accepted(kind, field, word) for word in spelled(kind, field))
    assert not accepted(kind, field, "no_such_word")


COMPUTED = {
    "element roundings": ((Quant, "rounding"), rounding.ROUNDINGS.keys() | {"ms_eden"}),
    "scale roundings": ((BlockScale, "rounding"), rounding.SCALE_ROUNDINGS.keys()),
    "statistics": ((Outer, "statistic"), scaling.STATISTICS.keys()),
    "block statistics": ((Range, "statistic"), scaling.BLOCK_STATISTICS.keys()),
    "candidates": ((Select, "among"), select.CANDIDATES.keys()),
    "criteria": ((Select, "criterion"), select.CRITERIA.keys()),
    "signs": ((Hadamard, "signs"), hadamard.SIGNS.keys()),
    "channels": ((Transform, "channels_in"), transform.CHANNEL_FORMATS.keys()),
    "estimators": ((Quant, "estimator"), ESTIMATORS.keys() - {Dge.__name__.lower()}),
    "outputs": ((Fprop, "gemm"), DTYPES.keys() - choices.DTYPES.keys()),
    "types": ((Recipe, "dtype"), choices.DTYPES.keys()),
}
"""Fields, and the words that have a function, a format or a type."""


@pytest.mark.parametrize("name", COMPUTED)
def test_the_words_of_a_field_are_those_that_are_computed(name):
    key, implemented = COMPUTED[name]
    assert SETS[key] == set(implemented)


def test_every_format_has_an_independent_table():
    """Other words are compared by `test_kernels_differential`, whose cases must have drawn each of them."""
    for name in (*formats.ELEMENTS, *(name for name, scale in formats.SCALES.items() if scale.bits <= 8)):
        assert len(grids.named(name)) > 1


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_direction_drops_its_products(direction):
    left = Products(fprop=Fprop(x=Quant())).high_precision(direction)
    assert left.fprop.plain == ("fprop" in DIRECTIONS[direction])


# --- no other module lists them -------------------------------------------------------------------

REGISTRIES = ("numerics/formats.py", "numerics/choices.py", "numerics/spec.py")
OTHERS_FACTS = "what another implementation can compute"
PASSES = "the passes of a training step"
EXCEPTIONS = {
    ("recipes/te_mapping.py", "element"): OTHERS_FACTS,
    ("recipes/te_mapping.py", "block"): OTHERS_FACTS,
    ("recipes/te_mapping.py", "rounding"): OTHERS_FACTS,
    ("recipes/te_mapping.py", "statistic"): OTHERS_FACTS,
    ("recipes/te_mapping.py", "signs"): OTHERS_FACTS,
    ("recipes/targets/fouroversix.py", "criterion"): OTHERS_FACTS,
    ("recipes/targets/fouroversix.py", "rounding"): OTHERS_FACTS,
    ("recipes/targets/fouroversix.py", "block"): OTHERS_FACTS,
    ("recipes/scaled_mapping.py", "format"): OTHERS_FACTS,
    ("recipes/scaled_mapping.py", "granularity"): OTHERS_FACTS,
    ("verification/parity/bench.py", "criterion"): OTHERS_FACTS,
    ("verification/peers.py", "element"): OTHERS_FACTS,
    ("verification/peers.py", "block"): OTHERS_FACTS,
    ("verification/peers.py", "rounding"): OTHERS_FACTS,
    ("verification/conformance/examination.py", "rounding"): "the two roundings to nearest",
    ("verification/conformance/emulator.py", "rounding"): "names of a subject's casts",
    ("verification/conformance/declared.py", "granularity"): "extents of a NaN",
    ("verification/conformance/declared.py", "rounding"): "roundings that a subject may declare",
    ("numerics/product.py", "dtype"): "the ways in which a CPU multiplies bf16 operands",
    ("reports/walkthrough.py", "block"): "one row for each of two blocks of one figure",
    ("recipes/recipe.py", "slots"): "the registry of directions",
    **{
        ("recipes/experts.py", field): "the field's own list"
        for field in ("gate_up", "rounding_state", "routing")
    },
    ("training/hyperparameters.py", "dtype"): "types of the optimizer's moments, which no recipe has",
    ("cli/bench.py", "slots"): PASSES,
    ("verification/linear_layers.py", "slots"): PASSES,
    ("reports/figures/bench.py", "slots"): PASSES,
    ("cli/bench.py", "dtype"): "the two baselines' presets",
    ("verification/bench_runs.py", "dtype"): "the two baselines' presets",
    ("verification/linear_layers.py", "dtype"): "formats that a GPU has a peak for",
}
"""Modules outside the registries that list words, and why they may: the fewer, the better."""


def listed(source: str) -> Iterator[tuple[str, ...]]:
    """Yield the strings of each tuple, list, set and dictionary's keys that a module writes out, those of a Literal included."""
    for node in ast.walk(ast.parse(source)):
        items = (
            node.elts
            if isinstance(node, ast.Tuple | ast.List | ast.Set)
            else node.keys
            if isinstance(node, ast.Dict)
            else ()
        )
        strings = tuple(
            item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)
        )
        if len(strings) > 1:
            yield strings


def offences(source: str, sets: dict[tuple[Any, str], set[str]] = SETS) -> set[str]:
    """Return the fields of whose words a module lists two or more together; sets with the same words count as one."""
    found = set()
    for strings in listed(source):
        for (_, field), known in sets.items():
            common = known & set(strings)
            if len(common) > 1:
                found.add("dtype" if common <= choices.DTYPES.keys() else field)
    return found


def test_no_module_but_a_registry_lists_the_words_of_a_closed_set():
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    found = {
        (name, field)
        for name, path in paths.items()
        if name not in REGISTRIES
        for field in offences(path.read_text())
    }
    assert found == EXCEPTIONS.keys()


VERDICTS = {(Verdict, "kind"): {*get_args(Kind)}, (Verdict, "reason"): {*get_args(Reason)}}
SIGNS = "the two kinds with a sign, in the order of its sentence or axis"
LISTED = {
    ("results/headline.py", "kind"): SIGNS,
    ("results/answer_sentences.py", "kind"): SIGNS,
    ("reports/dose_parts.py", "kind"): SIGNS,
    ("reports/change_table.py", "kind"): SIGNS,
    ("reports/table.py", "kind"): "classes of the style sheet",
    ("results/answer_sentences.py", "reason"): "reasons that more seeds remove",
    ("results/proposals.py", "kind"): "reasons of a gate, of which two words are also kinds",
    ("results/next_runs.py", "reason"): "reasons that more seeds do not remove",
}


def test_the_words_of_verdicts_stand_in_one_file():
    """`paired_stats` defines the kinds and reasons, `verdict_text` has their words."""
    assert KINDS.keys() == VERDICTS[Verdict, "kind"]
    assert REASONS.keys() == VERDICTS[Verdict, "reason"]
    homes = ("paired_stats.py", "verdict_text.py")
    found = {
        (path.relative_to(PACKAGE).as_posix(), field)
        for folder in ("results", "reports")
        for path in (PACKAGE / folder).rglob("*.py")
        if path.name not in homes
        for field in offences(path.read_text(), VERDICTS)
    }
    assert found == LISTED.keys()


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('if quant.element in ("e2m1", "int4"): pass', "element"),
        ('x = {"e4m3": 1, "ue5m3": 2}', "format"),
        ('signs: Literal["none", "fixed"]', "signs"),
        ('words = ["percentile", "hold"]', "statistic"),
    ],
)
def test_a_list_of_words_would_be_seen(line, field):
    assert field in offences(line)
    assert not offences('x = quant.element == "e2m1"')
