"""An operand's error, amplified or permuted: against fp64 over random quantisers, in layers, and refused elsewhere."""

import pytest
import torch
from pydantic import ValidationError
from support.cases import every
from support.linears import Watch, drawn, run
from support.quantisers import cases, reference_only, same
from torch import nn

import ablate
from ablate.engines.emulated import convert
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.hadamard import rotate
from ablate.numerics.history import History
from ablate.numerics.kernels import forms, general
from ablate.numerics.partition import Partition
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Error, Hadamard, Outer, Quant, Transform
from ablate.numerics.stored import refuse
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import SLOTS, Dgrad, Fprop, Products, Run, Wgrad
from ablate.recipes.scaled_mapping import refusals as scaled_refusals
from ablate.recipes.scaled_mapping import verdict
from ablate.recipes.targets import TARGETS
from ablate.recipes.targets.model import Lost, Model
from ablate.training.rank_layout import Layout
from ablate.training.workloads.gpt import Gpt
from ablate.verification.conformance.reference_product import exact_products, operands

FOUR, PLACEBO = Error(times=4.0), Error(times=2.0, permuted=True)
ROUNDINGS = 4 * 2.0**-24
"""Relative: of the decoded value, the difference, the factor and the sum, each to nearest in fp32."""


def altered(quant: Quant, error: Error) -> Quant:
    return quant.model_copy(update={"error": error, "estimator": None})


def with_error(products: Products, error: Error, slots=SLOTS) -> Products:
    content = products.model_dump()
    for slot in slots:
        product, operand = slot.split(".")
        if content[product][operand]:
            content[product][operand]["error"] = error.model_dump()
    return Products.model_validate(content)


def test_random_forms_equal_a_sum_in_fp64_whose_cast_and_rotation_are_the_reference():
    for one in cases(40, 300):
        if one.part or not one.x.numel() or not one.x.isfinite().all():
            continue
        clock, sites = one.clocks[0], {"where": one.where, "product": one.product}
        quant = one.quant.model_copy(update={"estimator": None})
        made = quantize(
            one.x,
            altered(quant, FOUR),
            rotation=one.rotation,
            clock=clock,
            history=History(),
            keep="source",
            **sites,
        )
        with reference_only():
            cast = quantize(one.x, quant, rotation=one.rotation, clock=clock, history=History(), **sites)
            x = rotate(one.x, one.rotation, clock, one.product) if one.rotation else one.x
            q = cast.dequantize()[:, : x.shape[1]].double()
        assert made.values.dtype == torch.float32
        wanted = x.double() + 4 * (q - x.double())
        allowed = ROUNDINGS * (5 * x.double().abs() + 8 * q.abs()) + 2.0**-140
        overflows = wanted.abs() + allowed > torch.finfo(torch.float32).max / 8
        close = (made.values.double() - wanted).abs() <= allowed
        assert (close | overflows | ~wanted.isfinite()).all(), one
        assert same(made.cast.values, cast.values)


def test_a_factor_of_one_is_the_quantised_operand_itself():
    x = drawn(48, 64, seed=1).bfloat16()
    plain, one = quantize(x, Quant()), quantize(x, altered(Quant(), Error(times=1.0)))
    assert torch.equal(plain.values, one.values)
    assert torch.equal(plain.amax, one.amax)
    assert one.cast is None
    assert "error" not in Quant(error=Error()).canonical()
    assert Quant(error=FOUR).canonical()["error"] == {"times": 4.0, "permuted": False}


@every(rotation=[None, Hadamard(size=16)])
def test_a_permuted_error_has_the_same_elements_at_other_places_in_each_step(rotation):
    x = drawn(40, 50, seed=2).bfloat16()
    turned = rotate(x, rotation) if rotation else x
    error = (quantize(x, Quant(), rotation=rotation).dequantize()[:, : turned.shape[1]] - turned).flatten()
    permuted = Quant(error=Error(permuted=True))
    draws = [
        (quantize(x, permuted, rotation=rotation, clock=clock, where=where).values - turned).flatten()
        for clock, where in (
            (Clock(3), 5),
            (Clock(3), 5),
            (Clock(3, step=1), 5),
            (Clock(4), 5),
            (Clock(3), 6),
        )
    ]
    for draw in draws:  # x + e - x has the rounding of the sum
        torch.testing.assert_close(draw.sort().values, error.sort().values, rtol=0, atol=2.0**-21)
        assert (draw - error).abs().gt(0.01).float().mean() > 0.5
    assert torch.equal(draws[0], draws[1])
    assert all((draws[0] - other).abs().gt(0.01).float().mean() > 0.5 for other in draws[2:])
    assert permuted.draws
    with pytest.raises(ValueError, match="clock"):
        quantize(x, permuted)


ROWS = Quant(outer=Outer(granularity="row"))
PRODUCTS = {
    "nvfp4": PRESETS["nvfp4"]().products,
    "copies of the forward pass": Products(
        fprop=Fprop(x=Quant(), w=Quant(block="16x16")),
        dgrad=Dgrad(g=Quant(rounding="stochastic"), w=Quant(source="forward")),
        wgrad=Wgrad(g=Quant(), x=Quant(source="forward_bf16"), hadamard=Hadamard()),
    ),
    "a forward copy dequantised": PRESETS["nvfp4_dequantised"]().products,
    "powers of two": PRESETS["mxfp4"]().products,
    "an outer scale a row, one operand": Products(
        fprop=Fprop(x=ROWS, w=ROWS, gemm="fp32_out"), wgrad=Wgrad(g=Quant(rounding="stochastic"))
    ),
}


@every(name=PRODUCTS, error=[FOUR, PLACEBO])
def test_a_layer_multiplies_altered_operands_as_fp64_does(name, error):
    products = with_error(PRODUCTS[name], error)
    linear = nn.Linear(64, 48, bias=False)
    x, dy = drawn(32, 64, seed=3).bfloat16(), drawn(32, 48, seed=4).bfloat16()
    layer = EmulatedLinear(linear, "conform", Clock(0), torch.bfloat16)
    layer.products = products
    y, dx, dw = run(layer, x.clone(), dy)
    results = {"y": y, "dx": dx, "dw": dw.bfloat16()}  # rounded to bf16, and the weight is in fp32
    exact = exact_products(products, x, linear.weight.detach().bfloat16(), dy)
    for which, got in results.items():
        assert not exact[which].far(got).any(), which
    plain = exact_products(PRODUCTS[name], x, linear.weight.detach().bfloat16(), dy)
    assert plain["y"].far(results["y"]).any()


def test_a_backward_operand_starts_from_what_the_forward_pass_multiplied():
    products = with_error(PRODUCTS["copies of the forward pass"], FOUR, ("fprop.x",))
    x, w, dy = (drawn(*shape, seed=5).bfloat16() for shape in ((32, 64), (48, 64), (32, 48)))
    made = operands(products, x, w, dy)
    multiplied = made["fprop.x"].values.bfloat16().t()
    copy = quantize(multiplied, products.wgrad.x, rotation=products.wgrad.hadamard)
    assert torch.equal(made["wgrad.x"].values, copy.values)


def test_still_weights_telemetry_and_weight_casts_see_the_cast_and_change_nothing():
    recipe = Recipe.of(with_error(PRESETS["nvfp4"]().products, FOUR))
    results = []
    for still in (False, True):
        model = nn.Module()
        model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 32, bias=False))])
        nn.init.normal_(model.blocks[0][0].weight, generator=torch.Generator().manual_seed(0))
        engine = convert(model, recipe, Clock(0))
        engine.at(0, Run(1))
        layer, watch = model.blocks[0][0], Watch()
        x, dy = drawn(16, 64, seed=6).bfloat16(), drawn(16, 32, seed=7).bfloat16()
        if still:
            with engine.still_weights():
                run(layer, x.clone(), dy)
                results.append(run(layer, x.clone(), dy))
        else:
            results.append(run(layer, x.clone(), dy))
            engine.listen(watch)
            run(layer, x.clone(), dy)
            assert all(seen.quant.cast == seen.quant and seen.cast is None for seen in watch.seen.values())
            plain = quantize(layer.weight.detach().bfloat16(), recipe.fprop.w.cast)
            assert torch.equal(layer.quantised_weight(), plain.dequantize())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_transform_keeps_what_it_takes_out():
    quant = Quant(transform=Transform(mean=True), error=FOUR)
    layer = EmulatedLinear(nn.Linear(64, 32), "x", Clock(0), torch.bfloat16)
    x = drawn(16, 64, seed=8).bfloat16()
    rest, mean = layer.operand(x, "fprop.x", quant, None)
    plain, same = layer.operand(x, "fprop.x", quant.cast, None)
    assert torch.equal(mean.values, same.values)
    assert torch.equal(rest.cast.values, plain.values)


@every(error=[FOUR, PLACEBO])
def test_kernels_engines_and_exports_refuse_an_altered_error(error):
    quant = Quant(error=error)
    assert not forms.on_gpu(quant)
    assert not general.covers(quant)
    with pytest.raises(ValueError, match="error"):
        refuse(quant)
    recipe = Recipe(fprop=Fprop(x=quant, w=Quant()))
    assert [why.partition(":")[0] for why in scaled_refusals(recipe)] == ["fprop.x.error"]
    assert ".error: " in verdict(quant, Quant(), False).why
    for target, export in TARGETS.items():
        with pytest.raises(Lost) as lost:
            export.write(recipe, Model(blocks=2))
        assert any("error" in reason for reason in lost.value.reasons), (target, lost.value.reasons)


def test_a_path_sets_the_factor_of_one_operand():
    recipe = ablate.recipe("nvfp4", {"recipe.fprop.x.error.times": 4.0})
    assert [slot for slot, quant in recipe.quantised() if quant.altered] == ["fprop.x"]


def test_ranks_that_divide_tokens_refuse_permuted_errors_alone():
    config = Gpt(batch=4, context=64)
    for error, refused in ((PLACEBO, True), (FOUR, False)):
        recipe = Recipe.of(with_error(PRESETS["nvfp4"]().products, error))
        reasons = [*Layout(2).misfits(config, recipe, "emulated")]
        assert any("permuted" in reason for reason in reasons) == refused, reasons


def test_an_error_without_a_meaning_is_refused():
    for fields in ({"times": 0.5}, {"times": float("inf")}):
        with pytest.raises(ValidationError):
            Error(**fields)
    with pytest.raises(ValidationError, match="estimator"):
        Quant(error=FOUR, estimator="clip_mask")
    half = Partition(axis=0, index=0, count=2)
    assert "permuted" in half.misfit(32, 32, Quant(error=PLACEBO), None)
    assert half.misfit(32, 32, Quant(error=FOUR), None) is None
