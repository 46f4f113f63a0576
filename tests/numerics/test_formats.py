"""Number formats, over the registries: every code, against tables written out, bit fields, and torch's own types."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from oracles import grids

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.spec import ELEMENT_BITS, SCALE_MAX, Quant
from ablate.recipes.recipe import Fprop

SMALL_SCALES = ("e4m3", "ue5m3", "e8m0")
"""Scale formats whose values can be enumerated; the others are torch's dtypes."""


def codes_of(dtype: torch.dtype) -> np.ndarray:
    """Every finite non-negative value that one of torch's 8-bit types holds, ascending."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    values = values[values.isfinite() & (values >= 0)]
    return np.unique(values.double().numpy())


@pytest.mark.parametrize("name", ELEMENTS)
class TestElements:
    """What every entry of ELEMENTS promises; its values stand in tests/oracles/grids.py."""

    def test_its_fields_enumerate_the_values_of_its_codes(self, name):
        element = ELEMENTS[name]
        np.testing.assert_array_equal(grids.magnitudes(element.mantissa, element.emin, element.max), grids.named(name))

    def test_it_has_a_zero_and_its_largest_value_is_max(self, name):
        values = grids.named(name)
        assert values[0] == 0
        assert values[-1] == ELEMENTS[name].max

    def test_step_is_the_distance_to_the_next_code(self, name):
        values = grids.named(name)
        inside = (values[1:] + values[:-1]) / 2
        steps = np.diff(values)
        for y in (values[:-1], inside, np.nextafter(values[1:].astype(np.float32), np.float32(0))):
            for sign in (1, -1):
                np.testing.assert_array_equal(ELEMENTS[name].step(torch.from_numpy(sign * y).float()).numpy(), steps)

    def test_its_bits_are_what_its_codes_and_a_sign_take(self, name):
        assert ELEMENT_BITS[name] == 1 + math.ceil(math.log2(len(grids.named(name))))
        assert Quant(element=name).four_bits == (ELEMENT_BITS[name] == 4)

    def test_step_changes_no_input(self, name):
        y = torch.linspace(-8, 8, 33)
        before = y.clone()
        ELEMENTS[name].step(y)
        assert torch.equal(y, before)


def test_every_element_has_a_width_and_none_is_counted_as_four_bits_by_default(monkeypatch):
    assert set(ELEMENT_BITS) == set(ELEMENTS) == set(get_args(Quant.model_fields["element"].annotation))
    operand = Quant.model_construct(**dict(Quant()) | {"element": "e2m3"})  # a format that comes later
    with pytest.raises(KeyError):
        _ = operand.four_bits
    monkeypatch.setitem(ELEMENT_BITS, "e2m3", 6)
    assert not operand.four_bits
    assert not Fprop.model_construct(x=operand, w=Quant(), hadamard=None).fp4


def test_four_bit_formats_have_eight_magnitudes_and_the_others_as_many_as_torchs_types():
    assert {name: len(grids.named(name)) for name in ELEMENTS} == {"e2m1": 8, "e1m2": 8, "int4": 8, "e3m0": 8, "e4m3": 127, "e5m2": 124}
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("e8m0", torch.float8_e8m0fnu)):
        np.testing.assert_array_equal(grids.named(name), codes_of(dtype))


@pytest.mark.parametrize("name", SCALES)
def test_the_largest_scale_is_the_one_that_the_spec_checks_bounds_against(name):
    assert SCALES[name].max == SCALE_MAX[name]
    if name in SMALL_SCALES:
        assert grids.named(name)[-1] == SCALE_MAX[name]
    else:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[name]
        assert torch.finfo(dtype).max == SCALE_MAX[name]


def test_every_scale_format_is_in_the_spec_and_the_other_way_round():
    assert SCALES.keys() == SCALE_MAX.keys()


def test_ue5m3_reserves_its_top_exponent_as_its_paper_does():
    # arXiv 2609.02846, eq. 3: 1.875 * 2^15, not PTX's 1.75 * 2^16; smallest normal 2^-14, smallest subnormal 2^-17.
    values = grids.named("ue5m3")
    assert (values[-1], values[8], values[1]) == (61440, 2.0**-14, 2.0**-17)
    assert len(values) == 248
