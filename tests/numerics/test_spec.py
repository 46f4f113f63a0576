"""The words of a quantised operand: closed, frozen, hashable, and one spelling for one meaning."""

from fractions import Fraction

import pytest
from pydantic import ValidationError

from ablate.numerics.spec import Hadamard, Outer, Quant, Range, argument


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Quant, {"element": "e2m1x"}),
        (Quant, {"clip": 1.0}),
        (Quant, {"block": "1x15"}),
        (Quant, {"rounding": "up"}),
        (Quant, {"bits": 12}),
        (Quant, {"bits": "8"}),
        (Hadamard, {"size": 12}),
        (Hadamard, {"signs": "lucky"}),
        (Range, {"headroom": 0.0}),
        (Range, {"headroom": float("inf")}),
        (Outer, {"bound": -1.0}),
        (Outer, {"statistic": "amax:0.5"}),
        (Outer, {"statistic": "percentile"}),
        (Outer, {"statistic": "percentile:0"}),
        (Outer, {"statistic": "percentile:1.5"}),
        (Outer, {"statistic": "percentile:nan"}),
        (Outer, {"statistic": "percentile:x"}),
    ],
)
def test_an_impossible_value_is_refused_when_it_is_written(kind, fields):
    with pytest.raises(ValidationError):
        kind(**fields)


def test_a_spec_is_frozen_and_equal_by_value():
    with pytest.raises(ValidationError):
        Quant().rounding = "stochastic"
    assert hash(Quant(range=Range(headroom=1.5))) == hash(Quant(range=Range(headroom=1.5)))
    assert len({Quant(), Quant(), Quant(rounding="stochastic")}) == 2


def test_a_percentile_has_one_spelling():
    assert Outer(statistic="percentile:.90") == Outer(statistic="percentile:0.9")
    assert argument(Outer(statistic="percentile:.90").statistic) == Fraction(9, 10)
    assert argument("amax") is None


def test_a_spec_survives_json():
    quant = Quant(rounding="stochastic", range=Range(headroom=17 / 16), outer=Outer(statistic="percentile:0.999"))
    assert Quant.model_validate_json(quant.model_dump_json()) == quant
