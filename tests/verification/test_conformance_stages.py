"""Stages of a cast and of a product: a fault that no list has is found in its stage, and said as what it does."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.published_faults import e2m1, nvfp4

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from conformance_mutants import THIRD
from conformance_subjects import Layer

from ablate.numerics.product import product
from ablate.recipes.presets import PRESETS
from ablate.verification.conformance import inputs
from ablate.verification.conformance.computation import RECIPE
from ablate.verification.conformance.diagnosis import diagnosed
from ablate.verification.conformance.examination import Examination, weighed
from ablate.verification.conformance.properties import PROPERTIES
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.run import conform
from ablate.verification.conformance.stages.casts import wrong_stages
from ablate.verification.conformance.stages.places import left_out
from ablate.verification.conformance.subject import Subject


def stored(change):
    """Return a cast whose result is changed after it was computed."""
    return lambda x: change(replace(nvfp4(x), values=None))


def rolled(made):
    return replace(made, scales=made.scales.roll(1, 1))


CASTS = {
    "amax of every other row": (
        lambda x: nvfp4(x, amax=lambda x: x[::2].abs().amax()),
        "amax of the tensor leaves out rows with index 1 modulo 2",
    ),
    "amax at most 3": (
        lambda x: nvfp4(x, amax=lambda x: x.abs().amax().clamp(max=3)),
        "amax of the tensor clamped to at most 3 (factor 0.001116)",
    ),
    "a/5": (
        lambda x: nvfp4(x, scale=lambda a, outer: (a * 1.5) * (outer * (1 / torch.tensor(6.0)))),
        "block scale 3/2 times what it should be",
    ),
    "4 becomes 3": (
        lambda x: nvfp4(x, e2m1=lambda y: torch.where(e2m1(y).abs() == 4, 3.0 * y.sign(), e2m1(y))),
        "scaled elements of magnitude 3.5",
    ),
    "no negative numbers": (
        lambda x: nvfp4(x, e2m1=lambda y: e2m1(y.clamp(min=0))),
        "negative elements become zero",
    ),
    "scales of the block before": (
        stored(rolled),
        "each block scale stored at another place: it is that of 1",
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_fault_of_a_cast_that_no_list_has_is_measured(name):
    cast, words = CASTS[name]
    bench = Examination(Subject("s", cast=cast), PRESETS["nvfp4"]())
    made = [inputs.normal(64, 256, seed) * 4.0 ** (seed - 1) for seed in range(3)]
    pairs = [bench.pair(bench.typed(x), bench.nearest) for x in made]
    assert wrong_stages(pairs).startswith(words)


def test_the_recipe_has_no_wrong_stage():
    bench = Examination(Subject("s", cast=nvfp4), PRESETS["nvfp4"]())
    pairs = [bench.pair(bench.typed(inputs.spread(33, 256, 16, seed)), bench.nearest) for seed in range(2)]
    assert wrong_stages(pairs) == ""


def test_blocks_of_one_row_without_a_rule_have_no_description():
    blocks = [(torch.tensor([row]), 2.0) for row in ((4.0, 2.0, 1.0), (2.0, 4.0, 1.0))]
    assert left_out(blocks, "amax of a block") == ""


def test_terms_that_a_product_subtracts_are_counted():
    def multiply(a, b, out):
        signs = torch.where(torch.arange(a.values.shape[1]) == 37, -1.0, 1.0)
        return product(replace(a, values=(a.values * signs).to(a.values.dtype)), b, out)

    row = conform(Subject("s", product=Layer(multiply).product), only="forward_product").rows[0]
    assert row.fault.startswith("y: terms 37 of 160 of the contraction subtracted; dx: terms 37 of 144")


@pytest.mark.parametrize(
    ("name", "only", "words"),
    [
        ("dropped_nan", "nan_visible", "NaN ignored by the amax of its block"),
        ("dropped_tail", "contraction_sizes", "y: terms 1024 to 1103 of 1104 of the contraction"),
        ("inverted_outer", "saturated_scales", "global scale stored as its reciprocal"),
        ("overwritten", "mean_of_draws", "rounds to nearest, without draws"),
        ("repeated_bits", "independent_draws", "equal random bits in rows 16 apart"),
        ("rounded_stages", "rotation_values", "intermediate sums of the rotation rounded"),
        ("past_the_group", "grouped_widths", "dw: 16 terms of other experts included (48 to 63)"),
    ],
)
def test_a_fault_of_the_third_set_is_named(name, only, words):
    row = conform(THIRD[name].subject(), THIRD[name].recipe, only=only).rows[0]
    assert (row.outcome, row.fault.startswith(words)) == (Outcome.FAIL, True), row


def test_a_computation_that_raises_ends_nothing():
    def raises(*given):
        raise IndexError("beyond")

    bench = Examination(Subject("s", cast=nvfp4), PRESETS["nvfp4"]())
    pair = bench.pair(bench.typed(inputs.normal(16, 64, 0)), bench.nearest)
    assert weighed(replace(RECIPE, scale=raises), pair) is None
    bench.failed["random_bf16"] = [None]
    row = diagnosed(bench, PROPERTIES["random_bf16"], Row("random_bf16", Outcome.FAIL, 2, 1))
    assert (row.fault, row.detail) == ("", "no name, as the diagnosis raised AttributeError")
