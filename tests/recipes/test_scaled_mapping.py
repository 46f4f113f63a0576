"""Tests of the mapping to tensor cores: a table of formats by hand, and promises over all presets."""

from pathlib import Path
from runpy import run_path

import pytest
import torch
from oracles import grids
from support.cases import every

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.spec import BlockScale, Outer, Quant, Range, Select, Transform
from ablate.numerics.transform import split
from ablate.recipes import PRESETS
from ablate.recipes.reasons import Reason, grouped
from ablate.recipes.recipe import SLOTS, Dgrad, Fprop, Layers, Phase, Products, Recipe, Rule, Wgrad
from ablate.recipes.scaled_mapping import (
    Verdict,
    eight_bits,
    emulated,
    entirely_native,
    families,
    fit,
    parts,
    plan,
    refusals,
    slots,
)
from ablate.recipes.te_mapping import recipe_refusals

DOCS = Path(__file__).parents[2] / "docs"
presets = run_path(str(DOCS / "generate_tensor_cores.py"))["presets"]


def mx(element: str, block: str = "1x32", **more) -> Quant:
    return Quant(element=element, block=block, scale=BlockScale(format="e8m0"), outer=None, **more)


def bare(element: str, granularity: str = "tensor") -> Quant:
    return Quant(element=element, block=None, scale=None, outer=Outer(granularity=granularity, bound=1.0))


FITS = {
    "nvfp4": Quant(),
    "nvfp4 square": Quant(block="16x16"),
    "nvfp4 long": Quant(block="1x128"),
    "nvfp4 chosen": Quant(select=Select(among="scales"), outer=Outer(bound=256.0)),
    "mxfp4": mx("e2m1"),
    "mxfp8": mx("e4m3"),
    "mxfp8 e5m2": mx("e5m2", "32x32"),
    "mxint4": mx("int4"),
    "fp8": bare("e4m3"),
    "fp8 rows": bare("e5m2", "row"),
    "fp4 without blocks": bare("e2m1"),
}
EXPECTED = {
    "nvfp4": ("nvfp4",),
    "nvfp4 square": ("nvfp4",),
    "nvfp4 long": ("nvfp4",),
    "nvfp4 chosen": ("nvfp4",),
    "mxfp4": ("mxfp4", "mxfp8"),
    "mxfp8": ("mxfp8",),
    "mxfp8 e5m2": ("mxfp8",),
    "mxint4": ("mxfp8",),
    "fp8": ("fp8", "mxfp8"),
    "fp8 rows": ("fp8", "mxfp8"),
    "fp4 without blocks": ("nvfp4", "mxfp4", "fp8", "mxfp8"),
}
MISFITS = {
    "block": (Quant(block="1x8"), mx("e2m1", "1x16"), mx("e4m3", "1x8")),
    "scale.format": (
        Quant(scale=BlockScale(format="ue5m3")),
        Quant(scale=BlockScale(format="bf16")),
        Quant(element="e4m3", block="1x32", scale=BlockScale(format="fp32"), outer=None),
    ),
    "outer.granularity": (Quant(outer=Outer(granularity="block:128")),),
    "element": (Quant(element="int4"), Quant(element="e4m3", block="1x32")),
    "select.among": (Quant(select=Select(among="grids")),),
}
TAKEN = {
    "mean": (Transform(mean=True), True),
    "low_rank": (Transform(low_rank=2), True),
    "channels": (Transform(channels=0.1), True),
    "patch": (Transform(patch=0.1), True),
    "clamp": (Transform(clamp=0.99), True),
    "clamp without the rest": (Transform(clamp=0.99, residual=False), False),
}
"""Transforms, and whether they leave more than one part."""


@every(name=FITS)
def test_an_operand_fits_in_these_families(name):
    assert fit(FITS[name]) == (EXPECTED[name], ())


@every(field=MISFITS)
def test_an_operand_that_fits_nowhere_is_named_with_the_field(field):
    for quant in MISFITS[field]:
        held, misfits = fit(quant)
        assert held == ()
        assert [misfit.replace(":", " ").split()[0] for misfit in misfits] == [field]


@every(name=TAKEN)
def test_the_rest_of_an_operand_is_multiplied_where_an_undivided_one_is(name):
    """Products of parts add up in fp32, which torch's MXFP4 and FlashInfer's FP4 do not write."""
    transform, several = TAKEN[name]
    assert several == (
        len(split(torch.randn(32, 32), Quant(transform=transform), 1)) > 1 or bool(transform.patch)
    )
    own, four = Quant(transform=transform), mx("e2m1", transform=transform)
    assert plan(Products(fprop=Fprop(x=own, w=Quant())))["fprop"] == Verdict("native", "nvfp4", parts=several)
    given = plan(Products(wgrad=Wgrad(g=mx("e2m1"), x=four)))["wgrad"]
    assert (given.family, given.parts) == ("mxfp8" if several else "mxfp4", several)
    assert [reason.text for reason in given.not_in_fp4] == [
        ": torch's MXFP4 product writes bf16, and fp32 is wanted"
    ] * several
    other = plan(Products(dgrad=Dgrad(g=Quant(), w=own)), "cutlass")["dgrad"]
    assert [fields(reason) for reason in other.reasons] == [("dgrad.w", "transform")] * several
    assert other.family == (None if several else "nvfp4")


def fields(reason: Reason) -> tuple[str, str]:
    """Return the slot that a reason is about, and the field in the way with its value."""
    return reason.at, reason.text.removeprefix(".").partition(": ")[0]


def test_every_field_in_the_way_is_named_of_both_operands():
    first = Quant(element="int4", block="1x8", outer=Outer(granularity="block:128"))
    second = Quant(scale=BlockScale(format="ue5m3"))
    given = plan(Products(dgrad=Dgrad(g=first, w=second)))["dgrad"]
    assert {fields(reason) for reason in given.reasons} == {
        ("dgrad.g", "element int4"),
        ("dgrad.g", "block 1x8"),
        ("dgrad.g", "outer.granularity block:128"),
        ("dgrad.w", "scale.format ue5m3"),
    }
    unmatched = plan(Products(dgrad=Dgrad(g=first)))["dgrad"]
    assert [reason.at for reason in unmatched.reasons] == ["dgrad.w", *["dgrad.g"] * 3]


def test_both_operands_with_factors_of_rows_are_named_for_flashinfer():
    rows = Quant(outer=Outer(granularity="row"))
    given = plan(Products(wgrad=Wgrad(g=rows, x=rows)), "cudnn")["wgrad"]
    assert [fields(reason) for reason in given.reasons] == [
        ("wgrad.g", "outer.granularity"),
        ("wgrad.x", "outer.granularity"),
    ]


def test_reasons_that_differ_in_the_slot_alone_are_one_line():
    lines = grouped(emulated(PRESETS["ue5m3"]()))
    assert lines == (f"{', '.join(SLOTS)}: scale.format ue5m3: tensor cores take e4m3 and e8m0",)


@every(element=ELEMENTS)
def test_eight_bits_hold_every_value_of_an_element_or_are_not_said_to(element):
    """The oracle casts the independent list of the element's values by torch."""
    values = torch.tensor(grids.named(element), dtype=torch.float32)
    exact = {
        name: bool((values.to(kind).float() == values).all())
        for name, kind in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
    }
    held = eight_bits(element)
    assert (held is not None) == any(exact.values())
    assert held is None or exact[held]


PAIRS = [
    (Quant(), Quant(block="16x16"), False, "cublaslt", "nvfp4"),
    (Quant(), None, False, "cublaslt", None),
    (Quant(), mx("e4m3"), False, "cublaslt", None),
    (mx("e2m1"), mx("e4m3"), False, "cublaslt", "mxfp8"),
    (mx("e2m1"), mx("e2m1"), True, "cublaslt", "mxfp8"),
    (mx("e2m1", range=Range(prescale=0.75)), mx("e2m1"), False, "cublaslt", "mxfp8"),
    (mx("e2m1", range=Range(prescale=0.75)), mx("e2m1"), False, "cudnn", "mxfp4"),
    (mx("e2m1"), mx("e2m1"), False, "cutlass", "mxfp8"),
    (bare("e5m2"), bare("e4m3"), False, "cublaslt", "fp8"),
    (bare("e5m2"), bare("e5m2"), False, "cublaslt", None),
    (bare("e4m3", "row"), bare("e5m2", "row"), False, "cublaslt", "mxfp8"),
    (bare("e4m3", "row"), bare("e4m3"), False, "cublaslt", "fp8"),
    (Quant(outer=Outer(granularity="row")), Quant(), False, "cublaslt", "nvfp4"),
    (Quant(outer=Outer(granularity="row")), Quant(), False, "cudnn", None),
]


@every(a__rest=[(pair[0], pair[1:]) for pair in PAIRS])
def test_a_product_is_multiplied_in_this_family(a, rest):
    b, wide, backend, family = rest
    product = Wgrad(g=a, x=b, dw="fp32" if wide else "bf16")
    given = plan(Products(wgrad=product), backend)["wgrad"]
    assert given.family == family
    assert given.runs == ("native" if family else "emulated")
    assert bool(given.why) == (family is None)
    assert not given.why or given.why.startswith("wgrad")


def test_a_product_in_bf16_is_neither_native_nor_emulated():
    assert plan(Products())["dgrad"] == Verdict("bf16", None, (Reason("dgrad", ": no operand is quantised"),))
    assert not entirely_native(Recipe())
    assert emulated(Recipe()) == ()


def test_one_misfit_costs_its_product_alone():
    recipe = PRESETS["nvfp4"]()
    odd = recipe.model_copy(update={"wgrad": recipe.wgrad.model_copy(update={"g": Quant(element="int4")})})
    assert [given.runs for given in plan(odd.products).values()] == ["native", "native", "emulated"]
    assert slots(odd.products)["wgrad.x"].why.startswith("wgrad.g.element int4: ")
    assert {*slots(odd.products)} == {*SLOTS}
    assert not entirely_native(odd)
    assert families(odd) == {"nvfp4"}


def test_layers_and_phases_count():
    odd = Products(fprop=Fprop(x=Quant(element="int4"), w=Quant(element="int4")))
    by_rule = Recipe(
        **dict(PRESETS["nvfp4"]().products), layers=Layers(rules=(Rule(match="*.down", use=odd),))
    )
    by_phase = Recipe(**dict(PRESETS["nvfp4"]().products), schedule=(Phase(start="step:3", use=odd),))
    for recipe in (by_rule, by_phase):
        assert len(parts(recipe)) == 2
        assert [fields(reason) for reason in emulated(recipe)] == [
            ("fprop.x", "element int4"),
            ("fprop.w", "element int4"),
        ]


@every(preset=PRESETS, backend=("cublaslt", "cudnn", "cutlass"))
def test_every_product_of_every_preset_has_a_verdict_with_a_reason_if_it_is_emulated(preset, backend):
    for one in parts(PRESETS[preset](), backend):
        for name, given in one.items():
            assert (given.runs == "native") == (given.family is not None) == (not given.why)
            assert not given.why or given.why.startswith(name)


@every(preset=PRESETS)
def test_what_transformer_engine_computes_tensor_cores_multiply(preset):
    recipe = PRESETS[preset]()
    if not recipe.plain and not list(recipe_refusals(recipe)):
        assert entirely_native(recipe)


@pytest.mark.parametrize("field", ["dw", "gemm"])
def test_flashinfer_refuses_fp32_outputs_of_fp4_alone(field):
    four, eight = Quant(), bare("e4m3")
    made = {
        "dw": lambda quant: Recipe(wgrad=Wgrad(g=quant, x=quant, dw="fp32")),
        "gemm": lambda quant: Recipe(dgrad=Dgrad(g=quant, w=quant, gemm="fp32_out")),
    }[field]
    assert next(refusals(made(four), "cudnn")).partition(":")[0] in ("wgrad.dw fp32", "dgrad.gemm fp32_out")
    assert list(refusals(made(eight), "cudnn")) == list(refusals(made(four))) == []


def test_the_page_is_current():
    assert (DOCS / "run" / "tensor_cores.md").read_text().endswith(f"\n\n{presets()}"), "run `make pages`"
    rows = [line for line in presets().splitlines() if line.startswith("| `")]
    named = {line.split("`")[1] for line in rows}
    assert {name for name, make in PRESETS.items() if not make().plain} < named
