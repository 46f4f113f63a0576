"""Conformance kit: the emulator and other right implementations hold every property; its registry is complete."""

from dataclasses import fields

import pytest
import torch
from support.cases import every

from ablate.engines.products import backward, forward
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Quant
from ablate.recipes.presets import PRESETS
from ablate.verification.conformance import inputs
from ablate.verification.conformance.emulator import emulator
from ablate.verification.conformance.examination import Examination, NotApplicableError, expanded, reference
from ablate.verification.conformance.properties import PROMISES, PROPERTIES
from ablate.verification.conformance.properties.product import layer
from ablate.verification.conformance.reference_product import exact_products
from ablate.verification.conformance.replay import RedrawnLayer
from ablate.verification.conformance.result import Outcome
from ablate.verification.conformance.run import examined
from ablate.verification.conformance.subject import Quantised, Subject

THOROUGH = ("nvfp4", "four_over_six", "mxfp4")
"""Recipes of which every property is examined."""
QUICK = ("zero_block", "nan_visible", "infinity_visible", "adjacent_draws", "weight_gradient")


def failures(recipe: str, names: tuple[str, ...] = tuple(PROPERTIES)) -> dict[str, str]:
    """Return the properties that the emulator of a preset fails, with their details."""
    made = PRESETS[recipe]()
    bench = Examination(emulator(made), made)
    rows = [examined(bench, PROPERTIES[name]) for name in names]
    return {row.property: row.detail for row in rows if row.outcome == Outcome.FAIL}


def cut_off(x: torch.Tensor) -> torch.Tensor:
    """Return the cast of x with zeros in a last block that is cut short."""
    values = quantize(x, Quant()).dequantize()[:, : x.shape[1]]
    values[:, x.shape[1] // 16 * 16 :] = 0
    return values


def packed(x: torch.Tensor) -> Quantised:
    """Return the cast of x as bytes, two codes each; the last byte of an odd row has one."""
    operand, columns = quantize(x, Quant(), keep=True), x.shape[1]
    signs, magnitudes = operand.codes.signbit().long() * 8, inputs.grid("e2m1")
    codes = signs + torch.searchsorted(magnitudes, operand.codes.abs().float())
    pairs = (codes[:, 0::2] + 16 * codes[:, 1::2])[:, : -(-columns // 2)]
    factor = operand.amax * (1.0 / torch.tensor(2688.0))
    return Quantised(None, pairs.to(torch.uint8), operand.block_scale[:, 0, :, 0], factor)


USED = {
    ("nvfp4", "fprop", "x"): 126,
    ("nvfp4", "fprop", "w"): 14,
    ("tetrajet2", "fprop", "x"): 22,
    ("four_over_six", "fprop", "x"): 77,
    ("four_over_six", "dgrad", "g"): 106,
    ("quartet2", "fprop", "x"): 77,
    ("quartet2", "dgrad", "g"): 120,
}
"""Number of values of E4M3, which has 126 above zero, that are scales of `every_scale`'s tensor."""


@every(operand=tuple(USED))
def test_as_many_scales_are_used_as_every_scale_says(operand):
    preset, product, side = operand
    quant = getattr(getattr(PRESETS[preset](), product), side).changed(rounding="nearest")
    scales = quantize(inputs.every_scale(quant, 32, 256), quant).block_scale
    of_format = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.isin(scales, of_format).all()
    assert len(scales.unique()) == USED[operand]
    assert f" {USED[operand]}" in inputs.every_scale.__doc__


@every(columns=(1, 2, 5, 8, 24))
def test_a_last_block_cut_short_is_tried_of_subjects_that_take_it(columns):
    made = PRESETS["nvfp4"]()
    for cast, outcome in ((cut_off, Outcome.FAIL), (packed, Outcome.PASS)):
        seen = []
        subject = Subject("s", cast=lambda x, c=cast, s=seen: s.append(x.shape[1]) or c(x), columns=columns)
        row = examined(Examination(subject, made), PROPERTIES["shape_lattice"])
        assert (row.outcome, not seen) == (outcome, False), cast.__name__
        assert all(size % columns == 0 for size in seen)
        assert any(size % 16 for size in seen)
    assert row.cases > 100_000


@every(columns=(None, 16, 32, 48))
def test_subjects_that_declare_whole_blocks_get_whole_blocks(columns):
    bench = Examination(Subject("s", cast=cut_off, columns=columns), PRESETS["nvfp4"]())
    assert examined(bench, PROPERTIES["shape_lattice"]).outcome == Outcome.PASS


def test_a_square_block_cut_short_is_tried_of_subjects_that_take_it():
    bench = Examination(Subject("s", cast_square=lambda x: squares(x, 0), columns=1), PRESETS["nvfp4"]())
    assert examined(bench, PROPERTIES["square_blocks"]).outcome == Outcome.PASS
    bench = Examination(Subject("s", cast_square=lambda x: squares(x, 1), columns=1), PRESETS["nvfp4"]())
    assert examined(bench, PROPERTIES["square_blocks"]).outcome == Outcome.FAIL


def squares(x: torch.Tensor, filler: float) -> torch.Tensor:
    """Return the cast of x in square blocks, with numbers of the same size in place of zeros beyond it."""
    rows, columns = x.shape
    whole = torch.full((-(-rows // 16) * 16, -(-columns // 16) * 16), filler * x.abs().max().item()).to(x)
    whole[:rows, :columns] = x
    return quantize(whole, Quant(block="16x16")).dequantize()[:rows, :columns]


@pytest.mark.parametrize("recipe", THOROUGH)
def test_the_emulator_holds_every_property_of_the_recipes_that_the_kit_is_made_for(recipe):
    assert failures(recipe) == {}


@pytest.mark.parametrize("recipe", sorted({*PRESETS} - {*THOROUGH}))
def test_the_emulator_fails_no_property_under_any_preset(recipe):
    assert failures(recipe, QUICK) == {}


@pytest.mark.parametrize(("fault", "outcome"), [(0.0, Outcome.PASS), (1.0, Outcome.FAIL)])
def test_draws_that_are_returned_in_bf16_are_adjacent_up_to_its_rounding(fault, outcome):
    """One element of each tensor is off by `fault` of itself."""
    recipe = PRESETS["nvfp4"]()

    def cast(x, seed):
        values = emulator(recipe).cast_stochastic(x, seed).values
        values[0, 0] *= 1 + fault
        return values.bfloat16()

    bench = Examination(Subject("rounds its results to bf16", cast_stochastic=cast), recipe)
    assert examined(bench, PROPERTIES["adjacent_draws"]).outcome == outcome


@pytest.mark.parametrize(("bits", "outcome"), [(3, Outcome.FAIL), (4, Outcome.FAIL), (8, Outcome.PASS)])
def test_draws_by_few_random_bits_are_biased(bits, outcome):
    """By 2^-bits / 2 of a step on average: 1 % of a gradient for 4 bits."""

    def cast(x, seed):
        made = quantize(x, Quant(), keep=True)
        lower, upper = ELEMENTS["e2m1"].neighbours(made.scaled.abs())
        place = ((made.scaled.abs() - lower) / (upper - lower)).nan_to_num(0.0)
        drawn = torch.randint(2**bits, x.shape, generator=torch.Generator().manual_seed(seed))
        codes = torch.where((place * 2**bits).floor() > drawn, upper, lower).copysign(made.scaled)
        return codes * expanded(reference(x, Quant()), Quant())

    bench = Examination(Subject("few bits", cast_stochastic=cast), PRESETS["nvfp4"]())
    assert examined(bench, PROPERTIES["adjacent_draws"]).outcome == Outcome.PASS
    assert examined(bench, PROPERTIES["mean_of_draws"]).outcome == outcome


def test_every_property_names_its_promise_and_a_function_of_a_subject():
    functions = {field.name for field in fields(Subject)}
    for name, one in PROPERTIES.items():
        assert (one.name, one.function in functions) == (name, True)
        assert PROMISES[name].endswith(".")
    assert {*PROMISES} == {*PROPERTIES}


PLAIN = sorted(name for name, preset in PRESETS.items() if preset().products.backward_needs)


@pytest.mark.parametrize("preset", PLAIN)
def test_operands_that_the_forward_pass_made_are_those_of_the_engine(preset):
    """Another computation of the same products: that of a training step."""
    made = PRESETS[preset]()
    products = made.products
    try:
        bench = Examination(Subject("none"), made)
        given = layer(bench)
    except NotApplicableError:
        pytest.skip("no certain gradient")
    x, w, dy = given.x, given.w, given.dy
    step = RedrawnLayer((w.shape[1], len(w)), "up", products, Clock(0), 0)
    with torch.no_grad():
        y, kept = forward(step, products, x, w)
        dx, dw = backward(step, products, kept, dy, (True, True))
    exact = exact_products(products, x, w, dy)
    for key, got in (("y", y), ("dx", dx), ("dw", dw)):
        assert not exact[key].far(got).any(), key
