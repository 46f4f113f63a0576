"""First wrong stage of a cast and of a product: where it is, its share, factor, kind and an example."""

from dataclasses import replace

import pytest
import torch
from mutants.conformance.subjects import Layer
from support.published_faults import e2m1, nvfp4

from ablate.numerics.product import product
from ablate.recipes.presets import PRESETS
from ablate.verification.conformance import inputs
from ablate.verification.conformance.emulator import emulator
from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.result import Outcome
from ablate.verification.conformance.run import conform
from ablate.verification.conformance.stages import first_wrong_stage
from ablate.verification.conformance.subject import Subject


def stored(change):
    """Return a cast whose result is changed after it was computed."""
    return lambda x: change(replace(nvfp4(x), values=None))


def wrong_values(x):
    """Return values of which those of 448 and more are 3/2 times as large as code x scale x outer."""
    made = nvfp4(x)
    return replace(made, values=torch.where(x.abs() > 1, 1.5 * made.values, made.values))


CASTS = {
    "amax of every other row": (
        lambda x: nvfp4(x, amax=lambda x: x[::2].abs().amax()),
        ("amax: 2 of 3 wrong", "such as 0.953125, not 1.08594"),
    ),
    "a/4": (
        lambda x: nvfp4(x, scale=lambda a, outer: (a * 1.5) * (outer * (1 / torch.tensor(6.0)))),
        ("block scale: ", "mostly 1.273 to 1.625 times", "such as 320, not 224"),
    ),
    "4 becomes 3": (
        lambda x: nvfp4(x, e2m1=lambda y: torch.where(e2m1(y).abs() == 4, 3.0 * y.sign(), e2m1(y))),
        ("code: ", "0.75 times the recipe's", "such as -3, not -4"),
    ),
    "no negative numbers": (
        lambda x: nvfp4(x, e2m1=lambda y: e2m1(y.clamp(min=0))),
        ("code: ", "all zero", "all negative (9"),
    ),
    "values": (wrong_values, ("value: ", "1.5 times the recipe's")),
    "scales of the block before": (
        stored(lambda made: replace(made, scales=made.scales.roll(1, 1))),
        ("block scale: ", "the right ones at other places: that of ("),
    ),
    "values alone": (lambda x: -nvfp4(x).values, ("value: ", "-1 times the recipe's")),
}


def seen(cast):
    """Return the stage of casts of three magnitudes with its wrong numbers, and the casts."""
    bench = Examination(Subject("s", cast=cast), PRESETS["nvfp4"]())
    made = [inputs.normal(64, 256, seed) * 4.0 ** (seed - 1) for seed in range(3)]
    pairs = [bench.pair(bench.typed(x), bench.nearest, where=f"tensor {n}") for n, x in enumerate(made)]
    return first_wrong_stage(pairs), pairs


@pytest.mark.parametrize("name", CASTS)
def test_a_fault_is_found_in_its_stage_and_measured(name):
    cast, words = CASTS[name]
    (text, wrong), pairs = seen(cast)
    assert text.startswith(words[0]), text
    assert all(word in text for word in words[1:]), text
    share = text.partition(": ")[2].partition(" wrong")[0]
    count, _, cases = share.partition(" of ")
    assert wrong
    size = int(cases.replace(",", ""))
    expected = len(wrong) if "%" not in count else float(count.removesuffix(" %")) / 100 * size
    assert len(wrong) == pytest.approx(expected, rel=0.01)
    first = wrong[0]
    assert f"such as {first.subject:.6g}, not {first.recipe:.6g}, for {first.input:.6g}" in text
    assert {number.tensor for number in wrong} <= {pair.where for pair in pairs}


def test_an_amax_that_forgets_negative_numbers_is_counted_over_all_tensors_and_said():
    """Tensors whose amax is right count too, or else every amax would look wrong."""
    made = [inputs.normal(32, 128, 0) for _ in range(6)]
    for number, x in enumerate(made):
        x[3, 5] = 50.0 * (-1) ** (number % 3 > 0)
    bench = Examination(Subject("s", cast=lambda x: nvfp4(x, amax=lambda x: x.amax())), PRESETS["nvfp4"]())
    row = bench.judged([bench.pair(bench.typed(x), bench.nearest) for x in made])
    text, _ = first_wrong_stage(bench.failed)
    assert row.outcome == Outcome.FAIL
    assert text.startswith("amax: 4 of 6 wrong")
    assert "all where the largest element is negative (100 % of those)" in text


@pytest.mark.parametrize("kept", ["outer", "values"])
def test_of_two_faults_the_first_stage_is_shown(kept):
    """The amax is that of the returned factor, or else that of the values."""

    def two(x):
        made = nvfp4(x, amax=lambda x: 2 * x.abs().amax(), e2m1=lambda y: e2m1(y) * 0.5)
        return replace(made, **{other: None for other in ("outer", "values") if other != kept})

    bench = Examination(Subject("s", cast=two), PRESETS["nvfp4"]())
    text, wrong = first_wrong_stage([bench.pair(bench.typed(inputs.normal(32, 128, 0)), bench.nearest)])
    assert text.startswith("amax: 1 of 1 wrong")
    if kept == "outer":
        assert wrong[0].subject == pytest.approx(2 * wrong[0].recipe)


def test_faults_of_blocks_cut_short_are_said_to_be():
    def cut(x):
        values = nvfp4(torch.nn.functional.pad(x, (0, -x.shape[1] % 16))).values[:, : x.shape[1]].clone()
        values[:, x.shape[1] // 16 * 16 :] *= 2
        return values

    bench = Examination(Subject("s", cast=cut, columns=8), PRESETS["nvfp4"]())
    pair = bench.pair(bench.typed(inputs.normal(64, 40, 0)), bench.nearest)
    assert "2 times the recipe's, all in blocks cut short (9" in first_wrong_stage([pair])[0]


def test_a_factor_is_named_only_if_all_wrong_numbers_have_it():
    """Numbers that are 0 in the recipe have none."""

    def cast(x):
        values = nvfp4(x).values
        wrong = torch.where(values == 0, 0.25, values)
        wrong[0, :2] *= 1.5
        return wrong

    (text, wrong), _ = seen(cast)
    assert any(number.recipe == 0 for number in wrong)
    assert "times the recipe's" not in text


def test_the_recipe_has_no_wrong_stage():
    (text, wrong), _ = seen(nvfp4)
    assert (text, wrong) == ("", ())


@pytest.mark.parametrize(
    ("weight", "words"),
    [(-1.0, "with the weight -1"), (0.0, "with the weight 0"), (2.0, "with the weight 2")],
)
def test_the_weights_of_a_product_s_terms_are_measured(weight, words):
    def multiply(a, b, out):
        weights = torch.where(torch.arange(a.values.shape[1]) == 37, weight, 1.0)
        return product(replace(a, values=(a.values * weights).to(a.values.dtype)), b, out)

    row = conform(Subject("s", product=Layer(multiply).product), only="forward_product").rows[0]
    assert f"terms 37 of 160 {words}" in row.stage, row.stage


def test_an_operand_that_is_not_the_recipe_s_is_named():
    layer = Layer()

    def product_of_others(x, w, dy):
        return layer.product(x, w.clamp(min=0), dy)[0], *layer.product(x, w, dy)[1:]

    row = conform(Subject("s", product=product_of_others), only="forward_product").rows[0]
    assert "operand w is not the recipe's: gain " in row.stage


def test_a_wrong_product_that_takes_no_other_sizes_keeps_its_stage_and_place():
    right = emulator(PRESETS["nvfp4"]()).product

    def doubled(x, w, dy):
        if len(x) % 32:
            raise RuntimeError("tokens are a multiple of 32")
        y, dx, dw = right(x, w, dy)
        return y, 2 * dx, dw

    row = conform(Subject("s", product=doubled), only=["input_gradient"]).rows[0]
    assert row.stage.startswith("product: dx, 99.9 % of 15,360 wrong, 1.9998 times the recipe's")
    assert row.block.place == "dx: row 0, column 0"
