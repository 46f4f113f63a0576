"""A recipe that contradicts itself cannot be built: the message names the field and the reason."""

import pytest
from pydantic import ValidationError
from support.cases import every

from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range, Select, Transform
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import (
    Dgrad,
    Fprop,
    OsciReset,
    Phase,
    Products,
    QEma,
    QRamping,
    Rule,
    Weights,
    Wgrad,
)

EDEN = Quant(rounding="ms_eden", outer=Outer(bound=256.0))
SR = Quant(rounding="stochastic")
W = Fprop(w=Quant())
NOTHING = {"block": None, "scale": None}

REFUSED = {
    "ms_eden without a rotation": (
        lambda: Wgrad(g=EDEN),
        "g.rounding ms_eden needs hadamard.size 32 or more",
    ),
    "ms_eden in a short rotation": (
        lambda: Dgrad(w=EDEN, hadamard=Hadamard(size=16)),
        "w.rounding ms_eden needs hadamard.size 32",
    ),
    "ms_eden in blocks longer than its rotation": (
        lambda: Wgrad(g=EDEN.model_copy(update={"block": "1x64"}), hadamard=Hadamard(size=32)),
        "g.block 1x64 exceeds hadamard.size 32",
    ),
    "ms_eden without room for its correction": (
        lambda: Quant(rounding="ms_eden"),
        "needs outer.bound at most 256",
    ),
    "ms_eden without an outer scale": (
        lambda: Quant(rounding="ms_eden", outer=None),
        "needs outer.bound at most 256",
    ),
    "ms_eden of tiles": (
        lambda: Quant(rounding="ms_eden", block="16x16", outer=Outer(bound=256.0)),
        "blocks of one row",
    ),
    "a copy of a gradient": (
        lambda: Recipe(fprop=Fprop(x=Quant()), dgrad=Dgrad(g=SR.model_copy(update={"source": "forward"}))),
        "dgrad.g.source forward: the forward pass has no copy",
    ),
    "a copy for the forward pass": (
        lambda: Recipe(fprop=Fprop(x=Quant(source="forward"))),
        "fprop.x.source forward",
    ),
    "a copy that is not made": (
        lambda: Recipe(fprop=Fprop(w=Quant()), wgrad=Wgrad(x=Quant(source="forward"))),
        "wgrad.x.source forward: fprop.x is not quantised",
    ),
    "a copy of a weight that is not made": (
        lambda: Recipe(fprop=Fprop(x=Quant()), dgrad=Dgrad(w=Quant(source="forward"))),
        "dgrad.w.source forward: fprop.w is not quantised",
    ),
    "a mask in the backward pass": (
        lambda: Recipe(dgrad=Dgrad(g=Quant(estimator="clip_mask"))),
        "dgrad.g.estimator",
    ),
    "a slope in the backward pass": (
        lambda: Recipe(wgrad=Wgrad(x=Quant(estimator=Dge()))),
        "wgrad.x.estimator",
    ),
    "an estimator in a rule": (
        lambda: Rule(match="*", use=Products(wgrad=Wgrad(x=Quant(estimator=Dge())))),
        "wgrad.x.estimator",
    ),
    "fp32 with a quantised operand": (lambda: Recipe(dtype="fp32", fprop=W), "dtype fp32 quantises nothing"),
    "fp32 with a rotation": (
        lambda: Recipe(dtype="fp32", wgrad=Wgrad(hadamard=Hadamard())),
        "dtype fp32 quantises nothing",
    ),
    "fp32 with a rule that quantises": (
        lambda: Recipe(dtype="fp32", layers={"rules": (Rule(match="*", use=Products(fprop=W)),)}),
        "dtype fp32 quantises nothing",
    ),
    "fp32 with a phase that quantises": (
        lambda: Recipe(dtype="fp32", schedule=(Phase(start="step:1", use=Products(fprop=W)),)),
        "dtype fp32 quantises nothing",
    ),
    "resets of weights that are not quantised": (
        lambda: Recipe(weights=Weights(osci_reset=OsciReset())),
        "weights.osci_reset acts on quantised weights, and fprop.w is not",
    ),
    "averages of weights that are not quantised": (
        lambda: Recipe(weights=Weights(q_ema=QEma())),
        "weights.q_ema acts on",
    ),
    "ramping of weights that are not quantised": (
        lambda: Recipe(weights=Weights(q_ramping=QRamping())),
        "weights.q_ramping acts on",
    ),
    "averages against random rounding": (
        lambda: Recipe(fprop=Fprop(w=SR), weights=Weights(q_ema=QEma())),
        "weights.q_ema decides how fprop.w is rounded",
    ),
    "averages against selection": (
        lambda: Recipe(fprop=Fprop(w=Quant(select=Select(among="scales"))), weights=Weights(q_ema=QEma())),
        "weights.q_ema decides how fprop.w is rounded",
    ),
    "a window as long as its period": (
        lambda: OsciReset(period=50, window=50),
        "osci_reset.window 50 must be shorter than period 50",
    ),
    "a ramping window as long as its period": (
        lambda: QRamping(period=9, window=9),
        "q_ramping.window 9 must be shorter than period 9",
    ),
    "a block without a scale": (lambda: Quant(scale=None), "block and scale go together"),
    "a scale without a block": (lambda: Quant(block=None), "block and scale go together"),
    "no scale at all": (lambda: Quant(**NOTHING, outer=None), "neither a block scale nor an outer scale"),
    "a bound of no block scale": (
        lambda: Quant(**NOTHING),
        "outer.bound 448 bounds a block scale, and there is none",
    ),
    "a range of no block scale": (
        lambda: Quant(**NOTHING, outer=Outer(bound=1.0), range=Range(headroom=1.5)),
        "range places",
    ),
    "a bound above the format": (
        lambda: Quant(outer=Outer(bound=449.0)),
        "outer.bound 449 is above the largest e4m3 scale, 448",
    ),
    "rows of tiles": (
        lambda: Quant(block="16x16", outer=Outer(granularity="row")),
        "outer.granularity row needs blocks of one row",
    ),
    "halves of a fine scale": (
        lambda: BlockScale(halve_below=0.87),
        "scale.halve_below halves powers of two that were rounded up",
    ),
    "halves of a scale that was rounded down": (
        lambda: BlockScale(format="e8m0", rounding="floor", halve_below=0.87),
        "scale.rounding ceil, not e8m0 and floor",
    ),
    "a pair of other candidates": (
        lambda: Select(among="grids", map_to=(6.0, 12.0)),
        "select.map_to is the pair of among scales",
    ),
    "a pair of one": (lambda: Select(among="scales", map_to=(6.0, 6.0)), "two different values from 1 to 48"),
    "rows that cut tiles": (
        lambda: Quant(block="16x16", outer=Outer(granularity="rows:8")),
        "outer.granularity rows:8 would cut blocks of 16x16",
    ),
    "one row in another spelling": (
        lambda: Outer(granularity="rows:1"),
        "2 or more; one row is 'row'",
    ),
    "selection among random roundings": (
        lambda: Quant(select=Select(among="scales"), rounding="stochastic"),
        "select chooses by error",
    ),
    "selection of a given range": (
        lambda: Quant(select=Select(among="scales"), range=Range(map_to=4.0)),
        "leave range out",
    ),
    "selection of another element": (
        lambda: Quant(select=Select(among="grids"), element="int4"),
        "select is defined for element e2m1",
    ),
    "random bits without random rounding": (
        lambda: Quant(bits=24),
        "bits 24 has no effect with rounding nearest",
    ),
    "a rule for zero without a zero": (
        lambda: BlockScale(format="e8m0", zero="one"),
        "scale.zero does not apply to e8m0",
    ),
    "a floor for a fine format": (
        lambda: BlockScale(format="fp32", rounding="floor"),
        "scale.rounding floor is for",
    ),
    "a held scale for each row": (
        lambda: Outer(granularity="row", statistic="hold:50"),
        "outer.statistic hold:50 is one number a tensor",
    ),
    "a quantile of 128": (
        lambda: Outer(granularity="block:128", statistic="percentile:0.5"),
        "percentile needs granularity tensor or row",
    ),
    "a transform of nothing": (lambda: Transform(), "transform takes nothing out; write null"),
    "a format of no channels": (
        lambda: Transform(mean=True, channels_in="bf16"),
        "no effect without transform.channels",
    ),
    "a residual of no clamp": (
        lambda: Transform(mean=True, residual=False),
        "no effect without transform.clamp",
    ),
    "an empty pattern": (lambda: Rule(match=""), "match"),
}


@every(contradiction=REFUSED)
def test_a_contradiction_is_refused_with_its_field_and_reason(contradiction):
    build, message = REFUSED[contradiction]
    with pytest.raises(ValidationError) as refusal:
        build()
    assert message in str(refusal.value)


STARTS = [
    "step:-1",
    "step:1.5",
    "step:",
    "step:٣",
    "tokens:1.5",
    "tokens:-1",
    "tokens",
    "fraction:1.5",
    "fraction:",
    "fraction:-0.5",
]
STARTS += [
    "fraction:1e-1",
    "0.5",
    "epoch:1",
    "fraction:.",
    "",
    "decay:0.5",
    "noise_ratio",
    "noise_ratio:",
    "noise_ratio:-1",
]
STARTS += ["noise_ratio:1.7:0", "noise_ratio:1.7:000", "noise_ratio:1.7:2.5", "noise_ratio:1.7:"]


@every(start=STARTS)
def test_an_impossible_start_is_refused_with_the_possible_ones(start):
    with pytest.raises(
        ValidationError, match=r"must be 'step:n', 'tokens:n', 'fraction:f' with f in \[0, 1\], 'decay'"
    ):
        Phase(start=start)


@pytest.mark.parametrize(
    "field",
    [{"dtype": "fp16"}, {"fprops": {}}, {"fprop": {"x": {"clipp": 1}}}, {"schedule": [{"begin": "step:1"}]}],
)
def test_an_unknown_word_is_refused(field):
    with pytest.raises(ValidationError):
        Recipe(**field)


@pytest.mark.parametrize("product", [Fprop, Wgrad])
def test_a_rotation_of_one_operand_alone_cannot_be_written(product):
    with pytest.raises(ValidationError, match=r"x\.hadamard"):
        product(x={"hadamard": {}})


@every(name=[name for name in PRESETS if not PRESETS[name]().plain])
def test_a_phase_never_makes_a_recipe_that_could_not_be_written(name):
    recipe = PRESETS[name]()
    for slots in ("all", "forward", "backward"):
        for use in (None, *(PRESETS[other]().products for other in ("nvfp4", "quartet2", "row_scaled"))):
            replaced = recipe.products.replaced(slots, use or Products())
            assert Products.model_validate(replaced.model_dump()) == replaced
