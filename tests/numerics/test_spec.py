"""The words of a quantised operand: closed, frozen, hashable, one spelling for one meaning, and contradictions refused by name."""

import itertools
from fractions import Fraction
from typing import get_args

import pytest
import torch
from oracles import grids
from pydantic import ValidationError
from support.cases import every

from ablate.numerics.formats import SCALES
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import SCALE_ROUNDINGS
from ablate.numerics.select import CANDIDATES
from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range, Select, Transform, argument

E8M0 = BlockScale(format="e8m0")
DRAWN_SCALE = BlockScale(rounding="stochastic")
SCALES_CHOSEN = Select(among="scales")
IMPOSSIBLE = [
    (Quant, {"element": "e2m1x"}),
    (Quant, {"element": "bf16"}),
    (Quant, {"clip": 1.0}),
    (Quant, {"block": "1x15"}),
    (Quant, {"rounding": "up"}),
    (Quant, {"bits": 12}),
    (Quant, {"bits": "8"}),
    (Quant, {"source": "backward"}),
    (Quant, {"estimator": "sigmoid"}),
    (Hadamard, {"size": 12}),
    (Hadamard, {"size": 256}),
    (Hadamard, {"signs": "lucky"}),
    (BlockScale, {"format": "e5m2"}),
    (BlockScale, {"rounding": "up"}),
    (BlockScale, {"zero": "two"}),
    (Range, {"headroom": 0.0}),
    (Range, {"headroom": 4.5}),
    (Range, {"headroom": float("inf")}),
    (Range, {"headroom": float("nan")}),
    (Range, {"map_to": 0.0}),
    (Range, {"map_to": -6.0}),
    (Range, {"prescale": 0.0}),
    (Range, {"prescale": 8.5}),
    (Range, {"statistic": "rms"}),
    (Range, {"statistic": "rms:0"}),
    (Range, {"statistic": "std:-1"}),
    (Range, {"statistic": "std:inf"}),
    (Range, {"statistic": "amax:2"}),
    (Outer, {"bound": -1.0}),
    (Outer, {"bound": 0.0}),
    (Outer, {"granularity": "column"}),
    (Outer, {"statistic": "amax:0.5"}),
    (Outer, {"statistic": "percentile"}),
    (Outer, {"statistic": "percentile:"}),
    (Outer, {"statistic": "percentile:0"}),
    (Outer, {"statistic": "percentile:-0.5"}),
    (Outer, {"statistic": "percentile:1.0000001"}),
    (Outer, {"statistic": "percentile:1.5"}),
    (Outer, {"statistic": "percentile:99"}),
    (Outer, {"statistic": "percentile:nan"}),
    (Outer, {"statistic": "percentile:inf"}),
    (Outer, {"statistic": "percentile:x"}),
    (Outer, {"statistic": "percentile:0.5:0.5"}),
    (Outer, {"statistic": "delayed"}),
    (Outer, {"statistic": "delayed:0"}),
    (Outer, {"statistic": "delayed:1.5"}),
    (Outer, {"statistic": "hold:0"}),
    (Outer, {"statistic": "hold:-1"}),
    (Outer, {"statistic": "static"}),
    (Outer, {"statistic": "static:0"}),
    (Outer, {"statistic": "static:inf"}),
    (Outer, {"statistic": ""}),
    (Select, {}),
    (Select, {"among": "luck"}),
    (Select, {"among": "scales", "criterion": "kl"}),
    (Dge, {"k": 0.5}),
    (Dge, {"clip": 0.0}),
    (Transform, {"low_rank": 0}),
    (Transform, {"mean": True, "channels": 0.0}),
    (Transform, {"channels": 1.0}),
    (Transform, {"clamp": 1.0}),
    (Transform, {"clamp": 0.99, "channels_in": "fp8"}),
]
"""A class, and fields that it refuses each by itself."""
CONTRADICTIONS = [
    (BlockScale, {"format": "bf16", "rounding": "ceil"}, ("scale.rounding", "bf16")),
    (BlockScale, {"format": "fp32", "rounding": "stochastic"}, ("scale.rounding", "fp32")),
    (BlockScale, {"format": "e8m0", "zero": "one"}, ("scale.zero", "e8m0")),
    (Outer, {"granularity": "row", "statistic": "delayed:16"}, ("outer.statistic", "granularity row")),
    (Outer, {"granularity": "row", "statistic": "static:1"}, ("outer.statistic", "granularity row")),
    (
        Outer,
        {"granularity": "block:128", "statistic": "hold:50"},
        ("outer.statistic", "granularity block:128"),
    ),
    (Outer, {"granularity": "block:128", "statistic": "percentile:0.9"}, ("outer.statistic", "128")),
    (Transform, {}, ("transform", "null")),
    (Transform, {"mean": True, "channels_in": "bf16"}, ("transform.channels_in", "transform.channels")),
    (Transform, {"mean": True, "residual": False}, ("transform.residual", "transform.clamp")),
    (Quant, {"block": None}, ("block", "scale")),
    (Quant, {"scale": None}, ("block", "scale")),
    (Quant, {"block": None, "scale": None, "outer": None}, ("block scale", "outer scale")),
    (Quant, {"block": None, "scale": None}, ("outer.bound", "write 1")),
    (
        Quant,
        {"block": None, "scale": None, "outer": Outer(bound=1.0), "range": Range(headroom=1.5)},
        ("range", "no block scale"),
    ),
    (Quant, {"outer": Outer(bound=449.0)}, ("outer.bound", "448")),
    (Quant, {"scale": BlockScale(format="ue5m3"), "outer": Outer(bound=61441.0)}, ("outer.bound", "61440")),
    (Quant, {"block": "16x16", "outer": Outer(granularity="row")}, ("outer.granularity row", "16x16")),
    (
        Quant,
        {"block": "32x32", "outer": Outer(granularity="block:128")},
        ("outer.granularity block:128", "32x32"),
    ),
    (Quant, {"select": SCALES_CHOSEN, "rounding": "stochastic"}, ("select", "rounding stochastic")),
    (Quant, {"select": SCALES_CHOSEN, "element": "int4"}, ("select", "e2m1")),
    (Quant, {"select": SCALES_CHOSEN, "scale": E8M0, "outer": None}, ("select", "e4m3")),
    (Quant, {"select": SCALES_CHOSEN, "range": Range(headroom=17 / 16)}, ("select", "range")),
    (Quant, {"select": SCALES_CHOSEN, "scale": DRAWN_SCALE}, ("select", "scale.rounding")),
    (Quant, {"bits": 24}, ("bits 24", "rounding nearest")),
    (Quant, {"rounding": "ms_eden", "bits": 16, "outer": Outer(bound=256.0)}, ("bits 16", "ms_eden")),
    (Quant, {"rounding": "ms_eden"}, ("ms_eden", "outer.bound")),
    (Quant, {"rounding": "ms_eden", "outer": None}, ("ms_eden", "outer.bound")),
    (Quant, {"rounding": "ms_eden", "outer": Outer(bound=256.5)}, ("ms_eden", "outer.bound")),
    (Quant, {"rounding": "ms_eden", "block": "16x16", "outer": Outer(bound=256.0)}, ("ms_eden", "one row")),
    (Quant, {"rounding": "ms_eden", "element": "int4", "outer": Outer(bound=256.0)}, ("ms_eden", "e2m1")),
    (
        Quant,
        {"rounding": "ms_eden", "scale": BlockScale(format="fp32"), "outer": Outer(bound=256.0)},
        ("ms_eden", "e4m3"),
    ),
    (
        Quant,
        {"rounding": "ms_eden", "scale": BlockScale(rounding="stochastic"), "outer": Outer(bound=256.0)},
        ("ms_eden", "scale.rounding"),
    ),
]
"""A class, fields that contradict each other, and words that the reason must hold."""


@every(kind__fields=IMPOSSIBLE)
def test_an_impossible_value_is_refused_when_it_is_written_and_its_field_named(kind, fields):
    with pytest.raises(ValidationError) as caught:
        kind(**fields)
    named = {part for error in caught.value.errors() for part in error["loc"]}
    assert named & (fields.keys() or {"among"})


@every(kind__fields__words=CONTRADICTIONS)
def test_a_contradiction_is_refused_with_a_reason_that_names_both_sides(kind, fields, words):
    with pytest.raises(ValidationError) as caught:
        kind(**fields)
    message = str(caught.value)
    assert all(word in message for word in words), message


def test_a_percentile_outside_its_interval_says_which_interval():
    for word in ("percentile:0", "percentile:1.2", "percentile:95"):
        with pytest.raises(ValidationError, match=r"\(0, 1\]"):
            Outer(statistic=word)


def test_the_ends_of_intervals_belong_to_them():
    for fields in (
        {"statistic": "percentile:1"},
        {"statistic": "percentile:1e-9"},
        {"statistic": "delayed:1"},
        {"bound": 448.0},
    ):
        assert Outer(**fields)
    assert Range(headroom=4.0)
    assert Range(prescale=1.0)
    assert Quant(rounding="ms_eden", outer=Outer(bound=256.0))


def consistent() -> list[Quant]:
    """Every combination of the choices that the spec accepts, one outer statistic for all."""
    names = ("element", "block", "rounding")
    choices = [get_args(Quant.model_fields[name].annotation) for name in names]
    choices[1] = ("1x8", "1x16", "1x32", "1x64", "1x128", "16x16", "32x32", None)
    scales = [
        None,
        *(
            BlockScale.model_construct(format=f, rounding=r, zero="zero")
            for f in SCALES
            for r in SCALE_ROUNDINGS
        ),
    ]
    outers = [
        None,
        *(
            Outer(granularity=g, bound=b)
            for g in ("tensor", "row", "rows:16", "block:128")
            for b in (256.0, 1.0)
        ),
    ]
    selects = [None, *(Select(among=among) for among in CANDIDATES)]
    found = []
    for element, block, rounding, scale, outer, select in itertools.product(
        *choices, scales, outers, selects
    ):
        if (block is None) != (scale is None) or (select and element != "e2m1"):
            continue
        try:
            scale_checked = scale and BlockScale(**scale.model_dump())
            found.append(
                Quant(
                    element=element,
                    block=block,
                    rounding=rounding,
                    scale=scale_checked,
                    outer=outer,
                    select=select,
                )
            )
        except ValidationError:
            pass
    return found


@pytest.mark.slow
def test_whatever_the_spec_accepts_can_be_computed():
    accepted = consistent()
    assert len(accepted) > 5000
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    chosen = torch.randperm(len(accepted), generator=torch.Generator().manual_seed(1))[:1500].tolist()
    for quant in (accepted[index] for index in chosen):
        result = quantize(x, quant, rotation=Hadamard(size=128), clock=Clock(0), keep=True)
        assert result.dequantize().isfinite().all(), quant
        if (
            quant.select is None or quant.select.among != "grids"
        ):  # IF4's second grid is not the element's own
            assert torch.isin(
                result.codes.abs(), torch.from_numpy(grids.named(quant.element)).float()
            ).all(), quant
        assert result.values.shape == (3, 128)


def test_a_spec_is_frozen_and_equal_by_value():
    with pytest.raises(ValidationError):
        Quant().rounding = "stochastic"
    assert hash(Quant(range=Range(headroom=1.5))) == hash(Quant(range=Range(headroom=1.5)))
    assert len({Quant(), Quant(), Quant(rounding="stochastic")}) == 2


def test_a_statistic_has_one_spelling():
    assert Outer(statistic="percentile:.90") == Outer(statistic="percentile:0.9")
    assert argument(Outer(statistic="percentile:.90").statistic) == Fraction(9, 10)
    assert Outer(statistic="delayed:0016") == Outer(statistic="delayed:16")
    assert Range(statistic="rms:2.50") == Range(statistic="rms:2.5")
    assert argument("amax") is None


def test_a_spec_survives_json():
    for quant in (
        Quant(
            rounding="stochastic", range=Range(headroom=17 / 16), outer=Outer(statistic="percentile:0.999")
        ),
        Quant(select=SCALES_CHOSEN, estimator=Dge(k=3.0), transform=Transform(mean=True, channels=0.1)),
        Quant(element="e4m3", block=None, scale=None, outer=Outer(statistic="delayed:1024", bound=1.0)),
        Quant(
            block="1x32",
            scale=E8M0,
            outer=None,
            range=Range(statistic="std:2.92247856", map_to=6.0),
            estimator="clip_mask",
        ),
    ):
        assert Quant.model_validate_json(quant.model_dump_json()) == quant


def test_a_product_needs_fp32_operands_exactly_where_code_times_scale_needs_more_than_eight_bits():
    for format in SCALES:
        assert Quant(scale=BlockScale(format=format), outer=None).wide == (format in ("bf16", "fp32"))
    assert Quant(outer=Outer(granularity="block:128")).wide
    assert not Quant(outer=Outer(granularity="row")).wide
    assert Quant(select=Select(among="grids")).wide
    assert not Quant(select=SCALES_CHOSEN).wide


@pytest.mark.parametrize("granularity", ["rows:128", "block:128"])
def test_a_percentile_of_a_few_rows_or_a_short_block_is_refused(granularity):
    with pytest.raises(ValidationError, match=r"percentile .* granularity tensor or row"):
        Outer(statistic="percentile:0.999", granularity=granularity)
    assert Outer(statistic="percentile:0.999", granularity="row")
